"""State dicts and models in memory, in place of files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.making import FP8, NEW_LIBRARY, numbers
from support.small_models import auto_of, ids, save_model
from support.stored import original, to_fp8, write
from torch import nn

import quanterr
from quanterr.tensors.in_memory import DTYPES, TensorsFile, hold

GOLDEN = Path(__file__).parents[1] / "golden"
STORED = ("bnb_nf4/bnb_nested_ragged", "fp8_row/fbgemm_fp8", "hqq/hqq_4_bits")


class Scaled(torch.Tensor):
    """Codes with a scale, as torchao's tensors are: a class without values of its own."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float, dtype: torch.dtype = torch.float32):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes: torch.Tensor, scale: float, dtype: torch.dtype = torch.float32) -> None:
        self.codes, self.scale, self.calls = codes, scale, 0

    def __tensor_flatten__(self):
        return ["codes"], self.scale

    def dequantize(self) -> torch.Tensor:
        self.calls += 1
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Opaque(Scaled):
    """A tensor class whose values cannot be read."""

    dequantize = torch.Tensor.dequantize


def numbers_of(report: quanterr.Report) -> list[tuple[object, ...]]:
    """Return a report's numbers for each layer; the order depends on where tensors are stored."""
    layers = [(layer.layer_name, layer.format, layer.snr_db, layer.max_absolute_error) for layer in report.layers]
    return sorted(layers)


@pytest.mark.parametrize("case", STORED)
def test_state_dict_is_read_like_its_file(case):
    file = GOLDEN / f"{case}.safetensors"
    with quanterr.open_checkpoint(file) as stored:
        held = hold(load_file(file))
        expected = {name: entry.read() for name, entry in stored.entries.items()}
        assert {name: entry.read() for name, entry in held.entries.items()} == expected
        original = {name: values + 1 for name, values in load_file(file.with_suffix(".expected.safetensors")).items()}
        assert numbers_of(quanterr.compare(original, held)) == numbers_of(quanterr.compare(original, stored)) != []


@pytest.mark.skipif(not NEW_LIBRARY, reason="this safetensors knows fewer dtypes")
def test_every_dtype_has_its_bytes_and_name(tmp_path):
    known = {name: getattr(torch, name.removeprefix("torch.")) for name in DTYPES if hasattr(torch, name[6:])}
    tensors = {name: torch.arange(16, dtype=torch.uint8).view(dtype) for name, dtype in known.items()}
    save_file(tensors, tmp_path / "all.safetensors")
    held = hold(tensors)
    with quanterr.open_checkpoint(tmp_path / "all.safetensors") as stored:
        for name, entry in stored.entries.items():
            mine = held.entries[name]
            assert (mine.dtype, mine.shape, mine.read()) == (entry.dtype, entry.shape, entry.read())


def test_any_byte_range_is_read():
    tensors = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.empty(0), "c": torch.arange(3, dtype=torch.int16)}
    file = TensorsFile("some", tensors)
    every = bytes(range(5)) + bytes([0, 0, 1, 0, 2, 0])
    for begin in range(len(every)):
        for end in range(begin + 1, len(every) + 1):
            assert file.read(begin, end - begin) == every[begin:end]


def test_noncontiguous_tensors_are_read_in_order():
    x = torch.arange(6).view(2, 3).t()
    assert TensorsFile("some", {"x": x}).read(0, 48) == x.contiguous().numpy().tobytes()


def test_compare_finds_the_same_as_in_files(tmp_path):
    x, y = original(), to_fp8(original())
    files = quanterr.compare(write(tmp_path / "a.safetensors", x), write(tmp_path / "b.safetensors", y))
    held = quanterr.compare(x, y)
    assert numbers_of(held) == numbers_of(files) != []
    assert held.verdict == files.verdict
    assert held.findings == files.findings
    assert (held.original.path, held.quantized.path) == ("state dict 1", "state dict 2")


def test_model_keeps_its_quantization_config(tmp_path):
    model = nn.Linear(64, 32, bias=False)

    class Config:
        def to_json_string(self) -> str:
            return '{"quantization_config": {"quant_method": "fbgemm_fp8"}}'

    model.config = Config()
    assert hold(model).config["config.json"]["quantization_config"] == {"quant_method": "fbgemm_fp8"}


def test_tensor_class_dequantizes_its_tensors():
    codes = torch.arange(-64, 64, dtype=torch.int8).view(2, 64)
    weight = Scaled(codes, 0.5)
    exact = quanterr.compare({"w.weight": codes.float() * 0.5}, {"w.weight": weight})
    assert exact.verdict == "pass"
    assert [layer.layer_name for layer in exact.lossless] == ["w.weight"]
    assert exact.quantized.path == "state dict 2 (1 Scaled dequantized)"
    assert weight.calls == 1


def test_dequantized_weights_are_not_taken_for_broken_copies():
    x = {f"{n}.weight": numbers(32, 64, seed=n, dtype=torch.float32) for n in range(8)}
    y = {name: Scaled((weight * 1000).round().to(torch.int16), 1 / 1000) for name, weight in x.items()}
    assert quanterr.compare(x, y).findings == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "expected a tensor or an array of numpy; got an int"),
        (torch.empty(2, device="meta"), "on meta: expected a dense tensor"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (Opaque(torch.zeros(2, 2), 1.0), "Opaque, which has no dequantize()"),
    ],
)
def test_values_without_bytes_are_refused_by_name(value, says):
    with pytest.raises(quanterr.UsageError, match=r"state dict 2: w\.weight") as caught:
        quanterr.compare({"w.weight": torch.zeros(2, 2)}, {"w.weight": value})
    assert says in str(caught.value)


def test_class_that_dequantizes_to_another_dtype_is_an_error():
    wrong = Scaled(torch.ones(2, 64), 1.0, torch.bfloat16)
    with pytest.raises(
        quanterr.CheckpointError, match=r"is torch.bfloat16 \[2, 64\], but dequantizes to torch.float32"
    ):
        hold({"w.weight": wrong}).entries["w.weight"].read()


def test_change_in_place_discards_the_results():
    tensors = {"w.weight": torch.ones(4, 64)}
    held = hold(tensors)
    held.check_unchanged()
    tensors["w.weight"][0] = 2
    with pytest.raises(quanterr.CheckpointError, match=r"w.weight changed while it was read"):
        held.check_unchanged()


def test_rank_sweep_and_inspect_take_state_dicts():
    x = original()
    y = to_fp8(x)
    ranking = quanterr.rank(x, [y, {**y}])
    assert sorted(candidate.name for candidate in ranking.candidates) == ["state dict 2", "state dict 3"]
    assert [candidate.name for candidate in quanterr.sweep(x, "int8_row,fp8_row").candidates] == ["int8_row", "fp8_row"]
    assert set(quanterr.inspect(y).formats) == set(quanterr.compare(x, y).formats)


def test_journal_for_other_tensors_is_refused(tmp_path):
    x = original()
    quanterr.compare(x, to_fp8(x), resume=tmp_path / "journal")
    other = to_fp8({name: tensor * 2 for name, tensor in x.items()})
    with pytest.raises(quanterr.UsageError, match="journal"):
        quanterr.compare(x, other, resume=tmp_path / "journal")


def test_evaluate_takes_models_on_both_sides(tmp_path):
    folder = save_model("llama", tmp_path / "original")
    x, y = (auto_of("llama").from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for weight in y.parameters():
            weight.copy_(weight.to(FP8).to(weight.dtype) if weight.ndim == 2 else weight)
    y.save_pretrained(tmp_path / "y")
    options = {"tokens": ids(tmp_path), "context": 32}

    held, files = quanterr.evaluate(x, y, **options), quanterr.evaluate(folder, tmp_path / "y", **options)

    assert held.candidates[0].scores == files.candidates[0].scores
    assert held.candidates[0].name == "LlamaForCausalLM 2"


def test_state_dict_without_a_config_cannot_be_evaluated(tmp_path):
    tensors = load_file(save_model("llama", tmp_path / "original") / "model.safetensors")
    with pytest.raises(quanterr.CheckpointError, match=r"state dict/config.json: No such file"):
        quanterr.evaluate(tensors, against="int8_row", tokens=ids(tmp_path), context=32)


def test_evaluate_takes_a_state_dict_as_a_candidate(tmp_path):
    folder = save_model("llama", tmp_path / "original")
    tensors = load_file(folder / "model.safetensors")
    y = {name: tensor.to(FP8).to(tensor.dtype) if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    evaluation = quanterr.evaluate(folder, [y, write(tmp_path / "y.safetensors", y)], tokens=ids(tmp_path), context=32)
    held, file = sorted(evaluation.candidates, key=lambda candidate: candidate.name != "state dict")
    assert held.scores.kld_mean == file.scores.kld_mean > 0
