"""The simulated device refuses what CUDA refuses, and finds work whose order is right only by luck."""

import pytest
import torch
from support.simulated_device import NAME, UNKNOWN, make_empty, register, simulate
from support.simulated_streams import Event, HazardError, Stream, choose, current

pytestmark = UNKNOWN


@pytest.fixture
def there():
    """The simulated device."""
    register()
    with simulate():
        yield torch.device(NAME, 0)


def pin(n):
    return make_empty(n, pin_memory=True).zero_()


class TestPlaces:
    @pytest.mark.parametrize(
        "mix",
        [
            lambda x, y: x + y,
            lambda x, y: y + x,
            lambda x, y: torch.add(y, y, out=x),
            lambda x, y: y.add_(x),
            lambda x, y: torch.cat([x, y]),
            lambda x, y: x.index_select(0, y.long()),
            lambda x, y: y[x.long()],
            lambda x, y: x.__setitem__(torch.tensor([0, 1]), y[:2]),
            lambda x, y: torch.bucketize(x, y),
            lambda x, y: x.equal(y),
            lambda x, y: x.sum() + y.sum() + y,
            lambda x, y: x.clamp(y.sum()),
            lambda x, y: y.sum().add_(x.sum()),
        ],
    )
    def test_places_do_not_mix(self, there, mix):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix(torch.arange(4.0, device=there), torch.arange(4.0))

    @pytest.mark.parametrize(
        "mix",
        [
            lambda x, y: x + y.sum(),
            lambda x, y: y.sum() * x,
            lambda x, y: x[y.long()],
            lambda x, y: x[[1, 2]],
            lambda x, y: x.__setitem__(y.long(), y.sum()),
            lambda x, y: x.__setitem__([1, 2], 1),
            lambda x, y: x.copy_(y),
            lambda x, y: y.copy_(x),
            lambda x, y: x.__setitem__(slice(2), y[:2]),
            lambda x, y: x.new_tensor([1.0]) + x,
            lambda x, y: x + y.to(x.device),
            lambda x, y: x.cpu() + y,
            lambda x, y: torch.where(x > 1, x, y.sum()),
        ],
    )
    def test_places_mix_as_cuda_allows(self, there, mix):
        mix(torch.arange(4.0, device=there), torch.arange(4.0))

    def test_two_devices_do_not_mix(self):
        with simulate(count=2):
            x, y = (torch.ones(2, device=f"{NAME}:{number}") for number in (0, 1))
            with pytest.raises(RuntimeError, match="of tensors on"):
                x + y

            assert [1, 1] == y.to(x.device).tolist()

    def test_device_memory_is_not_host_memory(self, there):
        x = torch.ones(2, device=there)
        with pytest.raises(TypeError, match="copy it to host memory first"):
            x.numpy()

        assert not isinstance(x.data_ptr(), int)
        assert x.data_ptr() == x.view(2, 1).data_ptr() != x[1:].data_ptr()


class TestCudaLacks:
    def test_integer_products_are_missing(self, there):
        x = torch.ones(2, 2, dtype=torch.int32, device=there)
        with pytest.raises(NotImplementedError, match="mm is not implemented on CUDA"):
            x @ x

    def test_operations_for_the_cpu_only_are_missing(self, there):
        with pytest.raises(NotImplementedError, match="histogram has no CUDA kernel"):
            torch.histogram(torch.ones(4, device=there), 2)

    def test_results_cannot_change_their_shape(self, there):
        x = torch.ones(4, device=there)
        with pytest.raises(RuntimeError, match="gives its result another shape"), pytest.warns(match="resized"):
            torch.add(x, 1, out=torch.empty(3, device=there))

    def test_dtypes_named_by_the_test_are_missing(self):
        with simulate(lacks=[torch.float64]), pytest.raises(TypeError, match="does not support"):
            torch.ones(2, device=NAME).double()


class TestMemory:
    def test_memory_runs_out_at_a_byte(self):
        with simulate(limit=64) as device:
            x = torch.zeros(16, device=NAME)
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(1, dtype=torch.uint8, device=NAME)
            y = x[:8]  # the same memory
            del x

            assert 64 == device.used
            del y
            assert (0, 64) == (device.used, device.peak)


class TestOrder:
    """The order of copies and streams."""

    def test_buffer_filled_again_before_its_copy_is_an_error(self, there):
        host, x = pin(4), torch.zeros(4, device=there)
        x.copy_(host, non_blocking=True)
        host += 1

        with pytest.raises(HazardError, match="filled again before the copy"):
            (x + 1).tolist()

    def test_order_is_kept_by_an_event(self, there):
        host, x, copied = pin(4), torch.zeros(4, device=there), Event(there)
        x.copy_(host, non_blocking=True)
        copied.record()
        copied.synchronize()
        host += 1

        assert [0, 0, 0, 0] == x.tolist()

    def test_earlier_event_does_not_keep_the_order(self, there):
        host, x, copied = pin(4), torch.zeros(4, device=there), Event(there)
        copied.record()
        x.copy_(host, non_blocking=True)
        copied.synchronize()
        host += 1

        with pytest.raises(HazardError, match="filled again before the copy"):
            x.tolist()

    @pytest.mark.parametrize(
        "copy", [lambda x, host: x.copy_(host), lambda x, host: x.copy_(host.clone(), non_blocking=True)]
    )
    def test_blocking_or_unpinned_copy_keeps_the_order(self, there, copy):
        host, x = pin(4), torch.zeros(4, device=there)
        copy(x, host)
        host += 1

        assert [0, 0, 0, 0] == x.tolist()

    @pytest.fixture
    def other(self, there):
        """A tensor that another stream made, and that stream."""
        stream = current(0)
        x = torch.zeros(4, device=there)
        choose(Stream(there))
        yield x, stream
        stream.synchronize()
        choose(stream)

    def test_streams_are_unordered(self, other):
        with pytest.raises(HazardError, match="on one stream"):
            other[0] + 1

    def test_waiting_on_the_host_orders_streams(self, other):
        other[1].synchronize()

        assert [1, 1, 1, 1] == (other[0] + 1).tolist()

    def test_event_on_the_device_orders_streams(self, other):
        made = Event()
        made.record(other[1])
        current(0).wait_event(made)

        assert [1, 1, 1, 1] == (other[0] + 1).tolist()

    def test_buffer_filled_before_a_copy_on_another_stream_is_an_error(self, there):
        """The stream that waits for the copy is done, and so is the copy."""
        host, x, copied, copies = pin(4), torch.zeros(4, device=there), Event(there), Stream(there)
        current(0).synchronize()
        computing = current(0)
        choose(copies)
        x.copy_(host, non_blocking=True)
        copied.record()
        choose(computing)
        computing.wait_event(copied)
        host += 1

        with pytest.raises(HazardError, match="filled again before the copy"):
            x.tolist()

    def test_stream_order_does_not_matter_for_separate_bytes(self, other):
        x, stream = other
        stream.synchronize()
        x[:2].add_(1)
        first = current(0)
        choose(stream)
        x[2:].add_(2)
        with pytest.raises(HazardError, match="on one stream"):
            x[1:].add_(1)
        first.synchronize()
