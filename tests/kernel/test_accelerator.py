"""Comparisons on a simulated accelerator: the CPU's numbers and findings, ordered streams, little memory."""

import gc
import json
from itertools import groupby

import pytest
import torch
from support.golden_files import CASES, GOLDEN, expected_of, values_of
from support.making import CPU, numbers
from support.simulated_device import NAME, UNKNOWN, check_tables, register, simulate
from support.stored import write, write_pair

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.comparison import compare_each, devices, scheduler
from quanterr.comparison.devices import choose_device
from quanterr.errors import ResourceError
from quanterr.kernel import library
from quanterr.options import CompareOptions
from quanterr.tensors.devices import describe_device, own_stream, pick_device
from quanterr.tensors.workspace import Workspace

pytestmark = UNKNOWN
SUMS = 1e-9  # float64 sums of float32 rows, added in another order
# The smallest file of each format, and those with requantized scales.
SOME_CASES = {
    min(of_format, key=lambda case: case.stat().st_size) for _, of_format in groupby(CASES, lambda case: case.parent)
}
SOME_CASES |= {case for case in CASES if "double_quant" in case.stem}


def name_of(case):
    return f"{case.parent.name}/{case.stem}"


@pytest.fixture(autouse=True)
def torch_kernel(monkeypatch):
    """Let the CPU compute by torch's kernel, as devices do."""
    monkeypatch.setenv(library.VARIABLE, "torch")


def device(number=0):
    register()
    return torch.device(NAME, number)


def document(report):
    """Return the document of a report without its run."""
    fields = json.loads(report.to_json())
    del fields["run"]
    return fields


def both(make, **where):
    """Return the documents of two reports, one made on the CPU and one on the device."""
    here = make("cpu")
    with simulate(**where):
        return document(here), document(make(NAME))


def blur(case, folder):
    """Write a golden file's values, each off by some per cent, as an original that differs from the file."""
    random = torch.Generator().manual_seed(0)
    values = {
        name: (tensor * (1 + 0.02 * torch.randn(tensor.shape, generator=random))).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in values_of(case).items()
    }
    return write(folder / "original.safetensors", values)


@pytest.mark.session
@pytest.mark.parametrize("case", sorted(SOME_CASES), ids=name_of)
def test_numbers_and_findings_equal_the_cpu(case, tmp_path, monkeypatch):
    check_tables(monkeypatch, "quanterr.formats")
    # Exact to the bit: the same torch operations, one after the other, on the same chunks.
    original = blur(case, tmp_path)
    on_cpu, on_device = both(lambda name: quanterr.compare(original, case, device=name))

    assert on_cpu == on_device


@pytest.mark.slow  # what samples add depends on the format, not on the file
@pytest.mark.parametrize("case", sorted({*CASES} - SOME_CASES), ids=name_of)
def test_numbers_of_other_files_equal_the_cpu(case, tmp_path, monkeypatch):
    check_tables(monkeypatch, "quanterr.formats")
    original = blur(case, tmp_path)
    on_cpu, on_device = both(lambda name: compare_each(original, [case], CompareOptions(device=name), samples=False)[0])

    assert on_cpu == on_device


@pytest.mark.skipif(library.find_best().kernel is None, reason="no compiled kernel here")
def test_samples_are_examined_on_the_cpu_by_the_compiled_kernel(monkeypatch, tmp_path):
    monkeypatch.delenv(library.VARIABLE)
    monkeypatch.setattr(scheduler, "DEVICE_CHUNK", 1 << 14)
    files = write_pair(tmp_path, a=(300, 200), b=(16, 64))
    here = quanterr.compare(*files, device="cpu")
    with simulate():
        report = quanterr.compare(*files, device=NAME)

    for x, y in zip(here.layers, report.layers, strict=True):
        assert x.excess_db == y.excess_db is not None
        assert x.scale_loss_db == y.scale_loss_db is not None
        assert x.worst_element == y.worst_element
        assert x.mean_squared_error == pytest.approx(y.mean_squared_error, rel=5e-8)  # float32 lanes of the kernel


def test_exact_formats_are_exact_on_a_device():
    case = min(SOME_CASES)
    with simulate():
        report = quanterr.compare(expected_of(case), case, device=NAME)

    assert not report.layers
    assert report.lossless


class TestRanking:
    def test_candidates_are_ranked_as_on_the_cpu(self, tmp_path):
        original, quantized = write_pair(tmp_path, a=(64, 64), b=(32, 96))
        candidates = [quantized, write_pair(tmp_path / "other", a=(64, 64), b=(32, 96))[1]]
        on_cpu, on_device = both(lambda name: quanterr.rank(original, candidates, device=name))

        assert on_cpu == on_device

    def test_recipes_are_swept_as_on_the_cpu(self, tmp_path):
        original, _ = write_pair(tmp_path, a=(64, 64))
        to = ["fp8_row", "int4_g32", "nvfp4", "gguf_q4_k"]
        on_cpu, on_device = both(lambda name: quanterr.sweep(original, to=to, device=name))

        assert on_cpu == on_device

    def test_recipes_are_planned_as_on_the_cpu(self, tmp_path):
        original, _ = write_pair(tmp_path, a=(64, 64), b=(32, 96))
        on_cpu, on_device = both(
            lambda name: quanterr.plan(original, to=["fp8_row", "int4_g32"], bits=6.0, device=name)
        )

        assert on_cpu == on_device


def test_measure_takes_device_tensors():
    x = numbers(40, 70)
    y = x + 0.1 * numbers(40, 70, seed=1)
    here = quanterr.measure(x, y)
    with simulate():
        metrics = quanterr.measure(x.to(device()), y.to(device()))

    assert here == metrics


class TestMany:
    """Weights have several ranges, and there are as many workers as on a GPU, each with its own stream."""

    @pytest.fixture(autouse=True)
    def _small_ranges(self, monkeypatch):
        monkeypatch.setattr(scheduler, "CPU_CHUNK", 1 << 12)
        monkeypatch.setattr(scheduler, "DEVICE_CHUNK", 1 << 12)
        monkeypatch.setattr(scheduler, "SMALL_ELEMENTS", 1)

    def test_workers_on_separate_streams_give_the_same_sums(self, tmp_path):
        files = write_pair(tmp_path, a=(20, 1000), b=(10, 800), c=(8, 8))
        on_cpu, on_device = both(lambda name: quanterr.compare(*files, device=name))

        assert on_cpu == on_device

    @pytest.mark.parametrize("name", ["quip_sharp/handmade_rvq3", "vptq/vptq_synthetic"])
    def test_shared_parts_are_in_order(self, name, tmp_path):
        case = GOLDEN / f"{name}.safetensors"
        original = blur(case, tmp_path)
        on_cpu, on_device = both(lambda name: quanterr.compare(original, case, device=name))

        assert on_cpu == on_device


class TestBuffers:
    """Workers read and share buffers on their own streams."""

    @pytest.fixture
    def entry(self, tmp_path):
        """A tensor of the numbers from 0 to 127."""
        with open_checkpoint(write(tmp_path / "x.safetensors", {"x": torch.arange(128.0)})) as checkpoint:
            yield checkpoint.entries["x"]

    @pytest.mark.parametrize("number", [0, 1])
    def test_buffers_are_refilled_only_after_the_copy_to_the_device(self, entry, number):
        with simulate(count=2):
            workspace = Workspace(device(number))
            pieces = [workspace.read("x", entry, first, (64,)).clone() for first in (0, 64)]

            assert [*range(128)] == torch.cat(pieces).tolist()

    def test_shared_buffers_wait_until_they_are_made(self, entry):
        with simulate():
            simulated_device = device()
            for _ in range(2):
                with own_stream(simulated_device):
                    workspace = Workspace(simulated_device)
                    shared = workspace.share("x", entry, lambda: torch.arange(4, device=simulated_device))
            total = int(shared.sum())

        assert 6 == total

    def test_shared_buffers_wait_until_their_pieces_are_filled(self, entry):
        with simulate():
            simulated_device = device()
            workspaces = [Workspace(simulated_device) for _ in range(2)]
            for workspace in workspaces:
                with own_stream(simulated_device):
                    shared = workspace.share(
                        "x",
                        entry,
                        lambda: torch.empty(2, device=simulated_device),
                        lambda out, piece: out[piece].fill_(piece),
                        2,
                    )
            with own_stream(simulated_device):
                total = int(shared.sum())

        assert 1 == total

    def test_shared_buffers_are_kept_for_all_who_use_them(self, entry):
        with simulate():
            simulated_device = device()
            workspaces = [Workspace(simulated_device) for _ in range(2)]
            for workspace in workspaces:
                with own_stream(simulated_device):
                    shared = workspace.share("x", entry, lambda: torch.arange(4, device=simulated_device)) + 1
            workspaces.clear()  # frees the shared tensor, which the second stream may still read
            del workspace

            assert (4,) == shared.shape


class TestRoom:
    """A device is short of memory: chunks of 2^14 elements are halved down to 2^12, and to 2^11 on the CPU."""

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch):
        for name, n in (("DEVICE_CHUNK", 1 << 14), ("MIN_DEVICE_CHUNK", 1 << 12), ("CPU_CHUNK", 1 << 11)):
            monkeypatch.setattr(scheduler, name, n)

    @pytest.fixture
    def files(self, tmp_path):
        return write_pair(tmp_path, a=(70, 1000))

    def compare(self, files, name=NAME, **where):
        """Return the report, and the maximum number of bytes that the comparison held on the device."""
        with simulate(**where) as memory:
            return quanterr.compare(*files, device=name), memory.peak

    def test_missing_byte_is_found_with_smaller_chunks(self, files):
        whole, whole_peak = self.compare(files)
        report, peak = self.compare(files, limit=whole_peak - 1)

        assert peak < whole_peak
        assert whole.run.device == report.run.device
        assert whole.layers[0].max_absolute_error == report.layers[0].max_absolute_error
        assert whole.layers[0].mean_squared_error == pytest.approx(report.layers[0].mean_squared_error, rel=SUMS)

    def test_cpu_goes_on_where_device_memory_runs_out(self, files):
        whole, _ = self.compare(files)
        report, peak = self.compare(files, "auto", limit=1000)

        assert peak <= 1000
        assert f"{NAME}:0 (simulated); also cpu, as memory ran out at a.weight" == report.run.device
        assert whole.layers[0].mean_squared_error == pytest.approx(report.layers[0].mean_squared_error, rel=SUMS)

    def test_exhausted_memory_is_an_error_where_the_cpu_may_not_go_on(self, files):
        with pytest.raises(ResourceError, match=r"out of GPU memory at a\.weight; try device cpu") as raised:
            self.compare(files, limit=1000)

        assert 5 == raised.value.status

    @pytest.mark.session
    def test_device_memory_is_released_at_the_end(self, files):
        with simulate() as memory:
            quanterr.compare(*files, device=NAME)
            gc.collect()

            assert memory.used < 1 << 14  # formats keep some tables


class TestChoice:
    def test_auto_picks_the_accelerator(self):
        with simulate():
            assert torch.device(NAME, 0) == pick_device("auto")

    def test_each_rank_on_a_machine_has_its_own_accelerator(self, monkeypatch):
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        with simulate(count=2):
            assert torch.device(NAME, 1) == pick_device("auto")
        with simulate(), pytest.raises(ResourceError, match="sees 1 SIM device here; try --device cpu"):
            pick_device("auto")

    @pytest.mark.parametrize("lacking", [torch.float64, torch.float8_e4m3fn], ids=str)
    def test_device_without_a_needed_dtype_is_refused_by_name(self, lacking):
        with simulate(lacks=[lacking]):
            assert CPU == pick_device("auto")
            with pytest.raises(ResourceError, match=f"does not compute in {str(lacking)[6:]}, .*; try --device cpu"):
                pick_device(NAME)

    @pytest.mark.parametrize(
        ("cores", "instructions", "expected"),
        [(2, "avx512", NAME), (16, "avx512", "cpu"), (4, "base", NAME), (6, "base", "cpu"), (64, None, NAME)],
    )
    def test_auto_compares_where_it_is_expected_to_be_faster(self, monkeypatch, cores, instructions, expected):
        monkeypatch.setattr(devices, "usable_cores", lambda: cores)
        with simulate():
            chosen = choose_device("auto", instructions and library.Kernel(None, instructions))

            assert expected == chosen.type

    @pytest.mark.parametrize(
        ("product", "known"),
        [("NVIDIA H200", "was measured at 1.6"), ("X1", "was not measured and is expected to compare 1.6")],
    )
    def test_notice_says_why_the_accelerator_is_not_taken(self, monkeypatch, capsys, product, known):
        monkeypatch.setattr(devices, "usable_cores", lambda: 16)
        with simulate() as memory:
            monkeypatch.setattr(type(memory), "get_device_name", lambda *_: product)
            choose_device("auto", library.Kernel(None, "avx512"))

            assert (
                f"--device auto takes the CPU: 16 cores compare about 8.0 G weights/s, sim:0 ({product}) {known}; "
                "to use it, say --device sim:0"
            ) == capsys.readouterr().err.strip().removeprefix("quanterr: ")

    def test_named_accelerator_is_taken_without_a_notice(self, monkeypatch, capsys):
        monkeypatch.setattr(devices, "usable_cores", lambda: 16)
        with simulate():
            assert device() == choose_device(NAME + ":0", library.Kernel(None, "avx512"))
        assert not capsys.readouterr().err

    def test_full_device_still_supports_its_dtypes(self):
        with simulate(limit=0):
            assert torch.device(NAME, 0) == pick_device("auto")

    def test_device_is_described_with_its_product(self):
        with simulate():
            assert "sim:0 (simulated)" == describe_device(device())
