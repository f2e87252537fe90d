"""Casts of unquantized tensors: correct ones are recognized in every dtype and magnitude, and damage never is."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from support.casting import (
    DAMAGES,
    DTYPES,
    EMBEDDING,
    HEAD,
    NORM,
    PAIRS,
    ROUTER,
    UNQUANTIZED,
    apply_damage,
    model,
    noisy,
    with_codes,
)
from support.gguf_stored import Stored, architecture, write_gguf
from support.making import compare, numbers, store

import quanterr
from quanterr.tensors.casts import CastTest, Copy, rounds_to_nearest

NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_F16 = 65504.0


def of_all_magnitudes(dtype=torch.float32):
    """Return values from far below the smallest F16 number to the largest, with both signs, ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-12, 4.8, 8192, dtype=torch.float64)
    x = sizes * (1 + torch.rand(8192, generator=generator, dtype=torch.float64)) / 2
    x *= torch.randint(0, 2, (8192,), generator=generator) * 2 - 1
    x[::97], x[1::97] = 0, 1
    return x.clamp(-LARGEST_F16, LARGEST_F16).to(dtype).view(64, 128)


def judge_cast(x, y, computed=False):
    """Return the verdict on two stored tensors, taken in by rows."""
    test = CastTest(NAMES[x.dtype], NAMES[y.dtype], computed)
    wide = [t.double() if torch.float64 in (x.dtype, y.dtype) else t.float() for t in (x, y)]
    for rows in zip(*(t.split(16) for t in wide), strict=True):
        test.add(*rows)
    return test.result


def truncate(x):
    """Cast F32 to BF16 by dropping bits."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


class TestCasts:
    @pytest.mark.parametrize(("original", "quantized"), list(product(DTYPES, DTYPES)))
    def test_torch_casts_count_as_the_same(self, original, quantized):
        x = of_all_magnitudes(DTYPES[original])

        assert Copy.SAME == judge_cast(x, x.to(DTYPES[quantized]))

    @pytest.mark.parametrize(("original", "quantized"), PAIRS)
    @pytest.mark.parametrize("through", [torch.bfloat16, torch.float16], ids=str)
    def test_casts_through_another_dtype_count_as_the_same(self, original, through, quantized):
        x = of_all_magnitudes(DTYPES[original])

        assert Copy.SAME == judge_cast(x, x.to(through).to(DTYPES[quantized]))

    @pytest.mark.parametrize("quantized", [np.float16, ml_dtypes.bfloat16])
    def test_numpy_casts_count_as_the_same(self, quantized):
        x = of_all_magnitudes()
        y = torch.from_numpy(x.numpy().astype(quantized).astype(np.float32))

        assert Copy.SAME == judge_cast(x, y.to(torch.float16 if quantized is np.float16 else torch.bfloat16))

    @pytest.mark.parametrize(("original", "quantized"), [("BF16", "F32"), ("F16", "F32"), ("BF16", "F16")])
    def test_casts_from_a_rounded_original_count_as_the_same(self, original, quantized):
        y = of_all_magnitudes().to(DTYPES[quantized])

        assert Copy.SAME == judge_cast(y.to(DTYPES[original]), y)

    def test_casts_with_ties_either_way_count_as_the_same(self):
        x = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8]])  # halfway between two BF16 numbers
        up = torch.tensor([[1 + 2.0**-7, 1 + 4 * 2.0**-8]]).bfloat16()
        down = torch.tensor([[1.0, 1 + 2.0**-7]]).bfloat16()

        assert (Copy.SAME, Copy.SAME) == (judge_cast(x, up), judge_cast(x, down))

    def test_truncating_casts_are_coarse(self):
        x = of_all_magnitudes()

        assert Copy.COARSE == judge_cast(x, truncate(x))
        assert Copy.COARSE == judge_cast(x, truncate(x).float())

    def test_randomly_rounding_casts_are_coarse(self):
        x = of_all_magnitudes()
        noise = torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)

        assert Copy.COARSE == judge_cast(x, truncate((x.view(torch.int32) + noise).view(torch.float32)))

    def test_f16_casts_that_truncate_subnormals_are_coarse(self):
        x = 2.0**-24 * torch.linspace(0.01, 900, 512).view(4, 128)
        y = 2.0**-24 * torch.linspace(0.01, 900, 512).floor().view(4, 128)

        assert Copy.COARSE == judge_cast(x, y.half())

    def test_overflowing_casts_have_no_nearest_number(self):
        x = torch.full((16, 128), 1e5)
        clamped = x.clamp(max=LARGEST_F16).half()

        assert Copy.SAME == judge_cast(x, x.half())  # infinite values have their own finding
        assert Copy.CHANGED == judge_cast(x, clamped)

    def test_computed_values_are_cast_within_float32(self):
        x = numbers(64, 128, dtype=torch.float32)
        y = -x.double().exp()

        assert Copy.SAME == judge_cast(-x.exp(), y.float(), computed=True)
        assert Copy.CHANGED == judge_cast(-x.exp(), noisy(y.float(), 1e-4), computed=True)


class TestDamage:
    @pytest.mark.parametrize(("original", "quantized"), PAIRS)
    @pytest.mark.parametrize("damage", list(DAMAGES.values()), ids=list(DAMAGES))
    def test_damage_is_not_a_cast(self, damage, original, quantized):
        x = numbers(64, 128, dtype=DTYPES[original])

        assert Copy.CHANGED == judge_cast(x, damage(x).to(DTYPES[quantized]))

    def test_step_within_the_same_dtype_is_damage(self):
        x = numbers(64, 128)
        y = (x.view(torch.int16) + 1).view(torch.bfloat16)

        assert Copy.CHANGED == judge_cast(x, y)

    def test_noise_below_the_original_digits_is_accepted(self):
        x = numbers(64, 128)

        assert Copy.SAME == judge_cast(x, noisy(x.float(), 1e-5))
        assert Copy.CHANGED == judge_cast(x, noisy(x.float(), 1e-2))


@pytest.mark.parametrize(("original", "quantized"), PAIRS)
def test_sums_prove_nearest_rounding(original, quantized):
    """A cast never moves a normal number by more than half a step."""
    x = numbers(64, 128, dtype=torch.float32).sign().add(0.1).to(DTYPES[original])
    y = x.to(DTYPES[quantized])
    relative_max = float(((y.double() - x.double()) / x.double()).abs().max())

    assert (original != quantized) == rounds_to_nearest(original, quantized, relative_max)
    assert not rounds_to_nearest(original, quantized, 0.004)


def changes(report):
    """Return the names reported as changed, and all other findings above info."""
    findings = [finding for finding in report.findings if finding.severity != "info"]
    changed = [finding for finding in findings if finding.code == "unquantized_changed"]
    return [name for finding in changed for name in finding.evidence["layers"]], [
        finding for finding in findings if finding not in changed
    ]


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize(("original", "quantized"), PAIRS)
def test_model_with_plain_casts_raises_no_finding(tmp_path, monkeypatch, original, quantized, kernel):
    monkeypatch.setenv("QUANTERR_KERNEL", "torch" if kernel == "torch" else "")
    x = model(DTYPES[original])
    y = {name: weight.to(DTYPES[quantized]) for name, weight in x.items()}

    assert ([], []) == changes(compare(tmp_path, x, with_codes(y)))
    assert "cast_coarse" not in {
        finding.code for finding in quanterr.compare(*store_pair(tmp_path), device="cpu").findings
    }


def store_pair(folder):
    return folder / "original.safetensors", folder / "quantized.safetensors"


@pytest.mark.parametrize(("name", "damage"), list(product((EMBEDDING, HEAD, NORM, ROUTER), DAMAGES)))
def test_damage_in_a_cast_tensor_is_reported(tmp_path, name, damage):
    x = model()
    broken = apply_damage(x[name], damage)
    y = {other: weight.float() for other, weight in (x | {name: broken}).items()}
    report = compare(tmp_path, x, with_codes(y))
    named = {finding.layer for finding in report.findings if finding.severity != "info"}
    changed, _ = changes(report)

    assert [name] == changed or {name} == named


def test_truncated_casts_are_an_info(tmp_path):
    x = {name: weight * (1 + 2.0**-12) for name, weight in model(torch.float32).items()}
    y = {name: truncate(weight) for name, weight in x.items()}
    report = compare(tmp_path, x, with_codes(y))
    (finding,) = (finding for finding in report.findings if finding.code == "cast_coarse")

    assert ([], []) == changes(report)
    assert sorted(UNQUANTIZED) == sorted(finding.evidence["layers"])


LLAMA_NAMES = {EMBEDDING: "token_embd.weight", HEAD: "output.weight", NORM: "blk.0.attn_norm.weight"}
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEADS = 4


def as_gguf(folder, weights, name, one_more, dtype="F32"):
    """Write the converter's version as llama.cpp does, with norms in F32 and the rest in ``dtype``."""
    tensors = []
    for original, weight in weights.items():
        numbers_ = weight.float()
        if original == QUERY:
            numbers_ = numbers_.view(HEADS, 2, 8, 64).swapaxes(1, 2).reshape(64, 64) if name == "llama" else numbers_
        is_norm = numbers_.dim() < 2
        numbers_ = numbers_ + 1 if is_norm and one_more else numbers_
        ggml_type = "F32" if is_norm else dtype
        raw = numbers_.to(DTYPES[ggml_type]).contiguous()
        path = LLAMA_NAMES.get(original, "blk.0.attn_q.weight")
        tensors.append(Stored(path, ggml_type, tuple(raw.shape), raw.view(torch.uint8).numpy().tobytes()))
    return write_gguf(folder / "model.gguf", tensors, architecture(name))


def llama(dtype=torch.bfloat16):
    x = model(dtype)
    return {name: x[name] for name in LLAMA_NAMES} | {QUERY: numbers(64, 64, seed=7).to(dtype)}


class TestGguf:
    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    @pytest.mark.parametrize(("name", "one_more"), [("llama", False), ("gemma", True)])
    @pytest.mark.parametrize("original", ["F32", "F16", "BF16"])
    def test_converter_conventions_are_casts(self, tmp_path, original, name, one_more, dtype):
        x = llama(DTYPES[original])
        y = as_gguf(tmp_path, x, name, one_more, dtype)
        report = quanterr.compare(store(tmp_path / "original.safetensors", x), y, device="cpu")

        assert {"identical"} >= {finding.code for finding in report.findings if finding.severity != "info"}

    @pytest.mark.parametrize(("name", "one_more"), [("llama", False), ("gemma", True)])
    @pytest.mark.parametrize("damage", list(DAMAGES))
    @pytest.mark.parametrize("weight", [EMBEDDING, NORM, QUERY])
    def test_damage_in_a_gguf_file_is_reported(self, tmp_path, weight, damage, name, one_more):
        x = llama()
        y = as_gguf(tmp_path, x | {weight: apply_damage(x[weight].float(), damage)}, name, one_more)
        report = quanterr.compare(store(tmp_path / "original.safetensors", x), y, device="cpu")
        named = {finding.layer for finding in report.findings if finding.severity != "info"}
        named |= {tensor.layer_name for tensor in report.not_compared}
        changed, _ = changes(report)

        assert [weight] == changed or weight in named
