"""Configurations that programs wrote, resolved for each module, against what the same programs stored."""

import json
from pathlib import Path

import pytest

from quanterr.checkpoints.labels import find_quantization_config
from quanterr.declarations import Declarations

FOLDER = Path(__file__).parents[1] / "golden_declarations"
FILES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
MIXED = [name for name, file in FILES.items() if file["other_bits"]]
EXCLUDED, LEFT = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def declare(name, case):
    return Declarations(*find_quantization_config(FILES[name]["declared"][case]))


def is_quantized(declarations, module):
    """Return whether loaders look for codes of a module; None if they follow the tensors."""
    scheme = declarations.of(module)
    if scheme is not None and declarations.follows_tensors and not scheme.entry:
        return None
    return scheme is not None and scheme.is_quantized


@pytest.mark.parametrize("name", FILES)
def test_declared_modules_are_those_that_the_program_quantized(name):
    declarations, file = declare(name, "right"), FILES[name]
    expected = {module: module not in file["left"] for module in file["modules"]}
    quantized = {module: is_quantized(declarations, module) for module in file["modules"]}
    if declarations.program.leaves_head:
        del expected["lm_head"]

    assert {} == {m: quantized[m] for m, wanted in expected.items() if quantized[m] not in (wanted, None)}
    assert [] == [
        entries for _, entries, are_all in declarations.find_idle(f"{m}.weight" for m in quantized) if are_all
    ]
    assert [] == declarations.unknown


@pytest.mark.parametrize("name", FILES)
def test_module_that_another_run_left_out_is_excluded(name):
    assert is_quantized(declare(name, "excluded_but_quantized"), EXCLUDED) in (False, None)
    assert is_quantized(declare(name, "right"), EXCLUDED)


@pytest.mark.parametrize("name", FILES)
def test_module_that_another_run_quantized_is_declared(name):
    assert is_quantized(declare(name, "declared_but_not"), LEFT)


@pytest.mark.parametrize("name", MIXED)
def test_other_bits_of_one_module_are_resolved(name):
    (module,) = FILES[name]["other_bits"]
    right, alike = (declare(name, case) for case in ("right", "other_bits_undeclared"))

    resolved, others = (
        [(scheme.number, scheme.bits) for scheme in map(declarations.of, (module, EXCLUDED))]
        for declarations in (right, alike)
    )
    assert resolved[0] != resolved[1]
    assert others[0] == others[1]
