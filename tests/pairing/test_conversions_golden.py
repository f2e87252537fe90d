"""Golden conversions are correct: maps lead back to sources, and files made from them can be read back."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.conversions import Conversion, elements_of, list_conversions, materialize, read_conversion


@pytest.fixture(params=list_conversions(), scope="module")
def conversion(request: pytest.FixtureRequest) -> Conversion:
    return read_conversion(request.param)


@pytest.mark.slow  # this checks the golden conversions, not the project
def test_each_original_element_is_used_once_unless_recorded(conversion: Conversion) -> None:
    uses = {name: np.zeros(np.prod(of["shape"], dtype=int), int) for name, of in conversion.original.items()}
    for name, tensor in conversion.tensors.items():
        pieces = elements_of(tensor["source"])
        assert sum(len(elements) for _, elements in pieces) == np.prod(tensor["shape"], dtype=int), name
        for source, elements in pieces:
            np.add.at(uses[source], elements, 1)
    for name, counts in uses.items():
        once = {"0" if name in conversion.dropped else "1": counts.size}
        assert Counter(counts.tolist()) == {int(k): n for k, n in conversion.uses.get(name, once).items()}, name


@pytest.mark.slow
def test_materialized_files_can_be_read_back(conversion: Conversion, tmp_path: Path) -> None:
    made = materialize(conversion, tmp_path)
    assert made.squares.keys() == conversion.tensors.keys()
    shapes = read_shapes(made.quantized)
    for name, tensor in conversion.tensors.items():
        quantized = tensor["type"] in ("Q8_0", "affine") or isinstance(tensor["type"], dict)
        assert made.errors[name] <= (0.02 if quantized else 1e-4) * made.squares[name], name
        if conversion.is_gguf:
            assert shapes[name] == tensor["shape"], name
    assert conversion.tensors.keys() | conversion.derived.keys() <= shapes.keys()


def read_shapes(folder: Path) -> dict[str, list[int]]:
    if (folder / "model.gguf").exists():
        gguf = pytest.importorskip("gguf")
        return {of.name: of.shape[::-1].tolist() for of in gguf.GGUFReader(folder / "model.gguf").tensors}
    with safe_open(folder / "model.safetensors", "np") as file:
        names = file.keys()
        return {name: file.get_slice(name).get_shape() for name in names}


def test_omitted_transform_is_an_error(tmp_path: Path) -> None:
    conversion = read_conversion("llama.cpp-qwen3_5")
    left_out = {"blk.0.attn_norm.weight", "blk.0.ssm_out.weight"}
    made = materialize(conversion, tmp_path, left_out=left_out)
    worse = {name for name, error in made.errors.items() if error > 0.1 * made.squares[name]}
    assert worse == left_out
