"""Derive golden conversions from converters' own code.

llama.cpp:
    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36, and unpack it
    PYTHONPATH=tests python tests/golden_conversions/make.py llama.cpp llama_cpp_python-0.3.36/vendor/llama.cpp [NAME …]
mlx-lm, where mlx-lm, torch and transformers are installed:
    PYTHONPATH=tests python tests/golden_conversions/make.py mlx [NAME …]
mlx-vlm and mlx-audio, where these, torch and transformers are installed:
    PYTHONPATH=tests python tests/golden_conversions/make.py mlx_vlm [NAME …]
    PYTHONPATH=tests python tests/golden_conversions/make.py mlx_audio [NAME …]

Each original is converted with all weights 1, then 2, then 0: what becomes of these is the arithmetic of an element.
Then with a different value for each element: the places of the values are the map. Last with random values: map and
arithmetic must give what the converter gives.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_runs import LlamaCpp
from mlx_runs import Mlx, MlxAudio, MlxVlm
from originals import ORIGINALS, Original, write_original
from safetensors.numpy import save_file
from support.conversions import GOLDEN, apply, elements_of, gather, read_golden, write_golden

LABEL_BITS = 21  # labels are 1 + k·2^-21: they stay distinct, and sums with small numbers exact, in float32
FUNCTIONS = ("exp", "negexp", "softplus")
# The tolerance of values: libraries round exponentials differently, and products have several factors.
ROUNDINGS = 2 * 2.0**-23


def main(kind: str, *arguments: str) -> None:
    """Write the golden conversions of a converter for all originals, or for the named ones."""
    makers = {"llama.cpp": lambda: LlamaCpp(Path(arguments[0])), "mlx": Mlx, "mlx_vlm": MlxVlm, "mlx_audio": MlxAudio}
    converter = makers[kind]()
    wanted = arguments[1:] if kind == "llama.cpp" else arguments
    documents = dict(read_golden(kind)) if (GOLDEN / f"{kind}.json.xz").exists() else {}
    for name, original in ORIGINALS.items():
        for variant, options in original.variants_for(kind).items():
            full = f"{name}-{variant}" if variant else name
            if not wanted or full in wanted or name in wanted:
                try:
                    documents[full] = golden(converter, original, options)
                except Exception as error:  # the converter cannot make it: say so, and go on
                    print(f"{kind}-{full}: {type(error).__name__}: {error}", flush=True)
    write_golden(kind, documents)


def golden(converter: Any, original: Original, options: dict[str, Any]) -> dict[str, Any]:
    """Convert an original several times, and return the document."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "original"
        config, stored = write_original(original, folder)
        shapes = {name: tuple(tensor["shape"]) for name, tensor in stored.items()}

        def run(values: dict[str, np.ndarray], quantized: bool = False) -> Any:
            save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
            return converter.run(folder, quantized, options)

        tensors, derived, keys = derive(shapes, run)
        rng = np.random.default_rng(1)
        values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        check(tensors, values, run(values).tensors)
        types = run(values, quantized=True).types
    for name, tensor in tensors.items():
        tensor["type"] = types[name]
    uses = uses_of(shapes, tensors)
    return {
        "converter": converter.version,
        "origin": original.origin(options),
        "config": config,
        "original": stored,
        "keys": keys,
        "tensors": tensors,
        "derived": derived,
        "dropped": [name for name, count in uses.items() if not count.any()],
        "uses": {name: histogram(count) for name, count in uses.items() if count.any() and (count != 1).any()},
    }


def derive(shapes: dict[str, tuple[int, ...]], run: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return stored tensors with map and arithmetic, tensors without a source, and metadata."""
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    assert total <= 2**LABEL_BITS, total
    ones, twos, zeros = (
        run({name: np.full(shape, value, np.float32) for name, shape in shapes.items()}) for value in (1, 2, 0)
    )
    order = np.random.default_rng(0).permutation(total)
    labels = (1 + order * 2.0**-LABEL_BITS).astype(np.float32)
    labelled = run(split(labels, shapes))
    assert ones.keys == twos.keys == labelled.keys
    assert ones.tensors.keys() == twos.tensors.keys() == zeros.tensors.keys() == labelled.tensors.keys()
    tensors, derived = {}, {}
    for name, out in labelled.tensors.items():
        first, second, zero = (of.tensors[name].ravel() for of in (ones, twos, zeros))
        if (first == second).all():
            assert (out.ravel() == first).all(), name
            derived[name] = {"shape": list(out.shape), "values": numbers(out)}
            continue
        op, elements = explain(name, np.stack([first, second, zero]), out.ravel(), labels)
        tensors[name] = {"shape": list(out.shape), "op": op, "source": pieces_of(elements, shapes)}
    return tensors, derived, ones.keys


def split(values: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return an array's values as the tensors of an original, one after the other."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, np.split(values, ends), strict=True)}


def explain(name: str, made: np.ndarray, out: np.ndarray, labels: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return the arithmetic of a stored tensor, and for each of its elements the original's element.

    ``made``: what becomes of 1, 2 and 0 in each element. ``out``: what becomes of the labels.
    """
    elements = np.zeros(out.size, np.int64)
    outcomes, which = np.unique(made, axis=1, return_inverse=True)
    ops = [operation(name, *outcome) for outcome in outcomes.T]
    for index, op in enumerate(ops):
        if op[0] != "set":
            elements[which == index] = find(name, op, out[which == index], labels)
    if len(ops) == 1:
        return ops[0], elements
    starts = np.concatenate([[0], np.flatnonzero(np.diff(which)) + 1, [out.size]])
    return ["pieces", [[int(b - a), ops[which[a]]] for a, b in pairwise(starts)]], elements


def operation(name: str, first: np.float32, second: np.float32, zero: np.float32) -> Any:
    """Return the arithmetic that makes these numbers of 1, 2 and 0."""
    if (first, second) == (1, 2):
        return "identity"
    for function in FUNCTIONS:
        if np.allclose([first, second], apply([function], np.float32([1, 2])), rtol=ROUNDINGS, atol=0):
            return [function]
    if first == second:
        return ["set", float(str(first))]
    if second == 2 * first:
        return ["mul", float(str(first))]
    if (first, second) == (zero + 1, zero + 2):
        return ["add", float(str(zero))]
    raise ValueError(f"{name}: 1 becomes {first}, 2 becomes {second}")


def is_exact(op: Any) -> bool:
    """Return whether a converter's arithmetic has one rounding at most."""
    return not any(name in json.dumps(op) for name in (*FUNCTIONS, "mul"))


def find(name: str, op: Any, out: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the elements whose labels, after arithmetic, are these values."""
    table = apply(op, labels)
    order = np.argsort(table)
    place = np.searchsorted(table, out, sorter=order).clip(1, table.size - 1)
    lower, upper = table[order[place - 1]], table[order[place]]
    elements = order[np.where(np.abs(out - lower) < np.abs(out - upper), place - 1, place)]
    if not np.allclose(table[elements], out, rtol=0 if is_exact(op) else ROUNDINGS, atol=0):
        raise ValueError(f"{name}: its values are not those of single elements after {op}")
    return elements


def check(tensors: dict[str, Any], values: dict[str, np.ndarray], converted: dict[str, np.ndarray]) -> None:
    """Raise an error unless maps and arithmetic give what the converter makes of these values."""
    for name, tensor in tensors.items():
        mapped = apply(tensor["op"], gather(tensor["source"], values)).reshape(tensor["shape"])
        if not np.allclose(mapped, converted[name], rtol=0 if is_exact(tensor["op"]) else ROUNDINGS, atol=0):
            raise ValueError(f"{name}: map and arithmetic do not give what the converter does")


def pieces_of(elements: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> list[Any]:
    """Return a map in the form that conversions.elements_of expands. ``elements`` count through the whole original."""
    names = list(shapes)
    starts = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())])
    sources = np.searchsorted(starts, elements, side="right") - 1
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(sources)) + 1, [elements.size]])
    pieces = []
    for a, b in pairwise(bounds):
        source = sources[a]
        pieces += [[names[source], first, loops] for first, loops in nest(elements[a:b] - starts[source])]
    return pieces


def nest(elements: np.ndarray) -> list[tuple[int, list[list[int]]]]:
    """Return a sequence as few nested loops, each with its first element."""
    loops: list[tuple[int, list[list[int]]]] = [(int(first), [[count, step]]) for first, count, step in runs(elements)]
    while True:
        joined = [piece for like in alike(loops) for piece in outer(like)]
        if len(joined) == len(loops):
            return joined
        loops = joined


def outer(loops: list[tuple[int, list[list[int]]]]) -> Iterator[tuple[int, list[list[int]]]]:
    """Join loops that differ only in their first elements."""
    inner = loops[0][1]
    for first, count, step in runs(np.array([first for first, _ in loops])):
        yield first, [[count, step], *inner] if count > 1 else inner


def alike(loops: list[tuple[int, list[list[int]]]]) -> Iterator[list[tuple[int, list[list[int]]]]]:
    """Return consecutive loops of the same counts and steps together."""
    group = [loops[0]]
    for loop in loops[1:]:
        if loop[1] != group[0][1]:
            yield group
            group = []
        group.append(loop)
    yield group


def runs(sequence: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Return first, count and step of the arithmetic progressions that a sequence consists of, the longest first."""
    steps = np.diff(sequence)
    changes = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    start = 0
    while start < len(sequence):
        if start == len(sequence) - 1:
            yield int(sequence[start]), 1, 1
            return
        end = int(changes[np.searchsorted(changes, start, side="right")]) + 1
        yield int(sequence[start]), end - start, int(steps[start])
        start = end


def uses_of(shapes: dict[str, tuple[int, ...]], tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return how often each element of each source is used."""
    counts = {name: np.zeros(int(np.prod(shape)), np.int64) for name, shape in shapes.items()}
    for tensor in tensors.values():
        for name, elements in elements_of(tensor["source"]):
            np.add.at(counts[name], elements, 1)
    return counts


def histogram(counts: np.ndarray) -> dict[str, int]:
    """Return how many elements are used how often."""
    return {str(uses): int(number) for uses, number in zip(*np.unique(counts, return_counts=True), strict=True)}


def numbers(values: np.ndarray) -> list[float]:
    """Return float32 values as short decimals that stand for them exactly."""
    return [float(str(value)) for value in values.ravel()]


if __name__ == "__main__":
    main(*sys.argv[1:])
