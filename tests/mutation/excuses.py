"""Damage beside what findings excuse: a block by each method, under each declaration that such files have.

Rules excuse errors that a method leaves: those that GPTQ lets compensate each other, factors that AWQ folds into
columns and ranges that it clips, codes that AutoRound learns, groups that an importance matrix gives up. Here each
damage of ``methods`` meets each of them. The programs themselves made the files, of a block of a small Llama that was
trained for minutes (tests/producers/make_methods.py); rounded ones are made here.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from safetensors import safe_open
from torch import Tensor

from mutation import files, methods, originals
from mutation.coding import Coded, Layout, Stored, code, sound
from mutation.judging import Outcome, of_sound
from mutation.layouts import OUTER, find_layout, scheme
from mutation.originals import Tensors, linear, make_generator
from mutation.pairs import Bench, Case, Sound
from mutation.parts import DAMAGES, GROUP, Change

FOLDER = Path(__file__).parents[1] / "golden_methods"
ONE = "model.layers.0.mlp.up_proj.weight"
CONFIG = originals.CONFIG | {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
OF_GROUP = "one group × 1.15"  # 64 columns, which need a scale of their own to be told from others
ROUNDED = "rounded"  # a file with the nearest codes, which no program wrote
NIBBLES = 4 * torch.arange(8, dtype=torch.int32)
OF_AWQ = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # places of columns 0 to 7 in a word
ROUNDS = 16  # rounds of least squares, which fit factors of rows and of columns in turn


class Declared(NamedTuple):
    """A layout, and the configuration that stands beside it, for groups of so many columns."""

    layout: str
    config: Callable[[int], dict[str, Any]]


def _gptq_config(method: str, group: int) -> dict[str, Any]:
    return find_layout("GPTQ 4 bits").config | {"quant_method": method, "group_size": group}


def _awq_config(group: int) -> dict[str, Any]:
    return find_layout("AWQ").config | {"group_size": group}


DECLARED = {
    "gptq": Declared("GPTQ 4 bits", partial(_gptq_config, "gptq")),
    "auto-round": Declared("GPTQ 4 bits", partial(_gptq_config, "auto-round")),
    "awq": Declared("AWQ", _awq_config),
    "compressed-tensors": Declared("CT INT4 g128", lambda group: scheme(4, group, True)),
    "compressed-tensors, actorder": Declared("CT INT4 g128", lambda group: scheme(4, group, True, actorder="static")),
    "compressed-tensors, asymmetric": Declared("CT INT4 asym g128", lambda group: scheme(4, group, False)),
    "Q4_K": Declared("Q4_K", lambda _group: {}),
}
EXCUSES = {  # file → what rules excuse in it
    ROUNDED: "nothing",
    "gptqmodel": "compensated",
    "llmcompressor": "compensated",
    "autoround": "learned",
    "autoawq": "folded and clipped",
    "llmcompressor_awq": "folded",
    "importance": "by importance",
}
OWN_DECLARATIONS = {  # file → the declaration that its program wrote
    "gptqmodel": "gptq",
    "llmcompressor": "compressed-tensors, actorder",
    "autoround": "auto-round",
    "autoawq": "awq",
    "llmcompressor_awq": "compressed-tensors, asymmetric",
}
CASES = (  # declaration, file
    ("gptq", ROUNDED),
    ("gptq", "gptqmodel"),
    ("gptq", "autoround"),  # its export for runtimes of GPTQ
    ("auto-round", ROUNDED),
    ("auto-round", "autoround"),
    ("awq", ROUNDED),
    ("awq", "autoawq"),
    ("compressed-tensors", ROUNDED),
    ("compressed-tensors", "gptqmodel"),
    ("compressed-tensors", "autoround"),  # its export for llm-compressor's runtimes
    ("compressed-tensors, actorder", ROUNDED),
    ("compressed-tensors, actorder", "llmcompressor"),
    ("compressed-tensors, asymmetric", ROUNDED),
    ("compressed-tensors, asymmetric", "autoawq"),
    ("compressed-tensors, asymmetric", "llmcompressor_awq"),
    ("Q4_K", ROUNDED),
    ("Q4_K", "importance"),
)


def case_name(declared: str, file: str) -> str:
    """Return the name of a sound file under a declaration."""
    return f"{declared}, {file}"


class Codes(NamedTuple):
    """Codes from 0 to 15, (rows, cols), scales and zero points, (rows, groups), or the parts of Q4_K's blocks."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    parts: dict[str, Tensor] = {}  # noqa: RUF012


def read(name: str) -> Tensors:
    """Return all tensors of a file."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def own_config(name: str) -> dict[str, Any]:
    """Return the quantization_config that the program wrote."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["quantization_config"])


def _unpack(words: Tensor) -> Tensor:
    """Return the codes of words, (r, c) → (r, 8 · c), low bits first."""
    return (words[..., None] >> NIBBLES & 15).flatten(1)


def _of_gptq(module: str, t: Tensors) -> Codes:
    zeros = _unpack(t[f"{module}.qzeros"]) + 1
    return Codes(_unpack(t[f"{module}.qweight"].T), t[f"{module}.scales"].T.float(), zeros.T)


def _of_awq(module: str, t: Tensors) -> Codes:
    codes, zeros = (
        _unpack(t[f"{module}.{part}"]).unflatten(1, (-1, 8))[..., OF_AWQ].flatten(1) for part in ("qweight", "qzeros")
    )
    return Codes(codes.T, t[f"{module}.scales"].T.float(), zeros.T)


def _of_compressed_tensors(module: str, t: Tensors) -> Codes:
    scale, zero = t[f"{module}.weight_scale"].float(), t.get(f"{module}.weight_zero_point")
    zeros = torch.full_like(scale, 8) if zero is None else _unpack(zero.T).T
    return Codes(_unpack(t[f"{module}.weight_packed"]), scale, zeros)


def _of_q4_k(module: str, t: Tensors) -> Codes:
    blocks = t[f"{module}.weight"]
    rows = len(blocks)
    blocks = blocks.view(-1, 144)
    d, dmin = (blocks[:, at : at + 2].contiguous().view(torch.float16).float().view(rows, -1) for at in (0, 2))
    scales, minima = (
        torch.from_numpy(part.astype("float32")).view(rows, -1)
        for part in gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].numpy())
    )
    low = blocks[:, 16:].view(len(blocks), 4, 1, 32)
    codes = torch.cat([low & 15, low >> 4], 2).view(rows, -1)
    parts = {"d": d, "dmin": dmin, "scales": scales, "minima": minima}
    scale, minimum = (inner * outer.repeat_interleave(8, 1) for inner, outer in ((scales, d), (minima, dmin)))
    return Codes(codes, scale, minimum, parts)


READERS = {"qweight": _of_gptq, "weight_packed": _of_compressed_tensors, "weight": _of_q4_k}


def codes_of(file: str) -> dict[str, Codes]:
    """Return the codes of a program's file, by weight."""
    tensors, codes_by_weight = read(file), {}
    for name in tensors:
        module, _, ending = name.rpartition(".")
        if module.endswith("_proj") and ending in READERS:
            reader = _of_awq if file == "autoawq" else READERS[ending]
            codes_by_weight[f"{module}.weight"] = reader(module, tensors)
    return codes_by_weight


def code_as(layout: Layout, stored_codes: Codes) -> Coded:
    """Return codes in a layout, whose codes may begin at -8."""
    low = int(layout.grid.low)
    codes = (stored_codes.codes.float() + low).contiguous()
    if stored_codes.parts:
        stored = Stored(stored_codes.scale.double(), -stored_codes.zero.double(), stored_codes.parts)
    else:
        scale, zero = stored_codes.scale.contiguous(), stored_codes.zero.float() + low
        stored = layout.keep(scale, -scale * zero if layout.shifted else None, 1.0)
    rows, cols = codes.shape
    wanted = stored.scale.float(), None if stored.shift is None else stored.shift.float()
    return Coded(layout, (rows, cols), layout.groups(codes), stored, wanted)


def fold(x: Tensor, y: Tensor) -> Tensor:
    """Return a weight with the factors of rows and of columns that were folded into it before it became ``y``."""
    x, y = x.double(), y.double()
    for _ in range(ROUNDS):
        for axis in (0, 1):
            x = x * ((x * y).sum(axis, keepdim=True) / x.square().sum(axis, keepdim=True).clamp(min=1e-30))
    return x.float()


def of_rounding(layout: Layout, x: Tensors) -> dict[str, Coded | Tensor]:
    """Return the block with the nearest codes."""
    columns = layout.group[1] if not layout.two_levels else OUTER
    return {n: sound(layout, w) if linear(n) and w.shape[1] % columns == 0 else w for n, w in x.items()}


def make_pair(bench: Bench, declared: str, file: str) -> Sound:
    """Return the sound pair of a file under a declaration."""
    declaration, x = DECLARED[declared], read("original")
    plain = find_layout(declaration.layout)
    codes = {} if file == ROUNDED else codes_of(file)
    group = next((of.codes.shape[1] // of.scale.shape[1] for of in codes.values()), plain.group[1])
    config = own_config(file) if OWN_DECLARATIONS.get(file) == declared else declaration.config(group)
    if (declared, file) == ("gptq", "autoround"):
        config |= {"provider": "auto-round"}  # which the export for llm-compressor does not say
    layout = replace(plain, group=(1, group), config=config)
    if codes:
        others = x if file == "importance" else read(file)
        weights = {
            name: code_as(layout, codes[name]) if name in codes else others.get(name, w) for name, w in x.items()
        }
    else:
        weights = of_rounding(layout, x)
    original = files.write(bench.place(), x, CONFIG)
    if "folded" in EXCUSES[file]:
        x = {name: fold(w, weights[name].values) if name in codes else w for name, w in x.items()}
    return Sound(bench, layout, original, CONFIG, x, weights, f"{declared}: {EXCUSES[file]}")


def move(change: Change) -> methods.Damage:
    """Return a damage that makes up for a changed original in the codes, and leaves what the method left."""

    def damage(layout: Layout, x: Tensor, before: Coded) -> Coded:
        off = change(x.float().clone(), make_generator(7)) - x.float()
        return code(layout, before.values.float() + off, *before.wanted)

    return damage


KINDS = (*methods.KINDS, *(methods.Kind(damage.name, move(damage.change), False) for damage in DAMAGES))


def of_norms(pair: Sound) -> Iterator[Case]:
    """Change norms, into which a method may have folded factors."""
    for name in (name for name, weight in pair.weights.items() if not isinstance(weight, Coded) and weight.dim() == 1):
        norm = pair.weights[name]
        assert isinstance(norm, Tensor)
        off = 1 + 0.1 * torch.randn(norm.shape, generator=make_generator(7))
        unit_factors = torch.ones_like(off)
        unit_factors[len(unit_factors) // 3] = 1.5
        for label, factors in {"off by 10 %": off, "one channel × 1.5": unit_factors}.items():
            broken = (norm.float() * factors).to(norm.dtype)
            yield Case(f"{name.split('.')[-2]} {label}", {name: broken}, names=tuple(pair.weights))


def outcomes(bench: Bench, declared: str, file: str) -> Iterator[Outcome]:
    """Yield the outcome of a sound file under a declaration, and of each damage to it."""
    pair = make_pair(bench, declared, file)
    assert not pair.report.not_compared, case_name(declared, file)
    yield of_sound("excuses, sound", case_name(declared, file), pair.report)._replace(excuse=pair.excuse)
    kinds = [kind for kind in KINDS if kind.name != OF_GROUP or pair.layout.group[1] <= GROUP]
    for outcome in methods.damage_pair(pair, "excuses", ONE, kinds):
        yield outcome._replace(name=f"{file}: {outcome.name}")
    for case in of_norms(pair):
        yield pair.outcome("excuses", case._replace(name=f"{file}, {case.name}"))
