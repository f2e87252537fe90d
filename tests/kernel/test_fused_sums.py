"""Triton's kernel, run by Triton's interpreter: its sums are those of the specification, which decodes by torch.

`make test-triton` runs these tests: Triton is a gigabyte, and slows down the start of every process that imports torch.
"""

import os
import subprocess
import sys
from itertools import groupby

import pytest
import torch
from support.golden_files import NUMBERS, expected_of
from support.making import CPU, numbers, open_pairing
from support.stored import write_pair

import quanterr
from quanterr.kernel import fused_sums, library
from quanterr.kernel.fused_sums import Codes, can_fuse, sum_codes, sum_fused
from quanterr.kernel.native_sums import Operand
from quanterr.kernel.specification import SUMS_ALONE, SumOptions, exact_sums
from quanterr.metrics import OUTLIER
from quanterr.metrics.peaks import CellGrid
from quanterr.metrics.sums import Sums, as_float
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads this variable only when it is imported.
    pytest.skip("Triton's interpreter is not asked for: make test-triton", allow_module_level=True)
# numpy, by which the interpreter computes, warns where a GPU gives infinity or NaN.
pytestmark = [pytest.mark.session, pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")]

SOME_CASES = {
    min(cases, key=lambda case: case.stat().st_size) for _, cases in groupby(NUMBERS, lambda case: case.parent.name)
}
SLOW = [pytest.param(case, marks=() if case in SOME_CASES else pytest.mark.slow) for case in NUMBERS]
ROWS = 64  # rows of a golden weight that are summed
TILE_ELEMENTS = 1 << 15  # elements of a tile: the interpreter takes as long for small ones
FINITE = SumOptions(cells=CellGrid(1, 64))
# Sums of terms of both signs, and what bounds them.
SIGNED = {"x": ["x_abs"], "y": ["x_abs", "e_abs"], "e": ["e_abs"]}


def check(expected, sums):
    """Both sum the same float64 numbers, in another order."""
    n = expected.elements
    for name in ("x", "y", "e", "x_abs", "e_abs", "x_sq", "y_sq", "e_sq", "xy", "relative", "weighted_x_sq"):
        bound = sum(as_float(getattr(expected, of)) for of in SIGNED.get(name, [name]))
        if name == "xy":
            bound = as_float(expected.x_sq) ** 0.5 * as_float(expected.y_sq) ** 0.5
        assert as_float(getattr(sums, name)) == pytest.approx(
            as_float(getattr(expected, name)), rel=0, abs=n * 2.0**-52 * bound
        ), name
    for name in (*fused_sums.COUNTS, "e_max", "e_min", "relative_max", "x_max", "cast_max", "dead_rows", "saturated"):
        assert getattr(expected, name) == getattr(sums, name), name
    assert (expected.elements, expected.worst) == (sums.elements, sums.worst)
    assert expected.histogram == sums.histogram
    assert len(expected.peaks) == len(sums.peaks)
    assert all(torch.equal(x.values, y.values) for x, y in zip(expected.peaks, sums.peaks, strict=True))
    for rows, others in ((expected.rows, sums.rows), (expected.matrices, sums.matrices)):
        assert rows.keys() == others.keys()
        assert all(as_float(rows[row].e_sq) == pytest.approx(as_float(others[row].e_sq), rel=1e-12) for row in rows)
        assert all(rows[row][2:] == others[row][2:] for row in rows)


@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case.parent.name}/{case.stem}")
def test_golden_files_have_the_sums_of_the_specification(case, monkeypatch):
    monkeypatch.setattr(fused_sums, "TILE", TILE_ELEMENTS)
    with torch.inference_mode(), open_pairing(expected_of(case), case) as plan:
        for pair in plan.pairs:
            rows, cols = pair.original.matrix
            if pair.original.needs_float64 or pair.quantized.needs_float64 or not pair.original.n:
                continue
            chunk = Chunk(0, min(rows, ROWS), 0, cols)
            sides = Operand(pair.original, Workspace()), Operand(pair.quantized, Workspace())
            values = [side.dequantize(chunk) for side in sides]
            expected = exact_sums(
                lambda _, pair=values: (pair[0].weight, pair[1].weight), [chunk], cols, OUTLIER, FINITE
            )
            expected.saturated = sum(int(side.saturated) for side in values if side.saturated is not None)
            check(expected, sum_fused(sides, chunk, OUTLIER, FINITE))


def test_common_formats_are_decoded_by_the_kernel(monkeypatch):
    """Torch would fail this test if it decoded a value of these formats."""
    names = {"fp8_row", "fp8_block", "int8_block", "nvfp4", "gptq", "awq_gemm", "bnb_int8", "mxfp4", "torchao_int4"}
    cases = {case.parent.name: case for case in SOME_CASES}
    monkeypatch.setattr(fused_sums, "_read_values", lambda operand, chunk: pytest.fail(operand.weight.format))
    monkeypatch.setattr(fused_sums, "sum_codes", lambda *_: Sums())
    for name in names:
        with open_pairing(expected_of(cases[name]), cases[name]) as plan:
            pair = plan.pairs[0]
            chunk = Chunk(0, pair.original.matrix[0], 0, pair.original.matrix[1])
            sum_fused(tuple(Operand(side, Workspace()) for side in (pair.original, pair.quantized)), chunk, 1.0, FINITE)


def both(x, y, chunk=None, wanted=SUMS_ALONE, outlier=OUTLIER, tile=fused_sums.TILE, cols=None):
    """Return the sums of values by the specification and by the kernel."""
    chunk = chunk or Chunk(0, x.shape[0], 0, x.shape[1])
    expected = exact_sums(lambda _: (x.float(), y.float()), [chunk], cols or x.shape[1], outlier, wanted)
    return expected, sum_codes(Codes(x), Codes(y), chunk, cols or x.shape[1], outlier, wanted, tile)


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (2, 65), (1, 1100), (20, 3)])
@pytest.mark.parametrize("tile", [64, 1024])
def test_sums_do_not_depend_on_tiles(shape, tile):
    x = numbers(*shape)
    check(*both(x, x + 0.1 * numbers(*shape, seed=1), wanted=FINITE, tile=tile))


def test_every_requested_sum_is_computed():
    x = numbers(6, 130)
    wanted = SumOptions(lambda chunk: numbers(1, 130, seed=2).abs(), 3, CellGrid(2, 64), 2.0**-3)
    check(*both(x, x + 0.1 * numbers(6, 130, seed=1), wanted=wanted))
    wanted = SumOptions(lambda chunk: numbers(6, 130, seed=2).abs())
    check(*both(x, x + 0.1 * numbers(6, 130, seed=1), wanted=wanted))


def test_pieces_of_rows_are_marked():
    x = numbers(1, 100)
    check(*both(x, x.round(), Chunk(7, 8, 100, 200), cols=300))


def test_special_values_are_counted_as_in_the_specification():
    inf, nan, smallest = torch.inf, torch.nan, 2.0**-149
    x = torch.tensor([[0.0, -0.0, 1.0, inf, -inf, nan, 1.0, smallest, 1e-40, 3e38, 100.0, 0.5]])
    y = torch.tensor([[-0.0, 1.0, 0.0, 1.0, -inf, 2.0, nan, 0.0, 1e-40, -3e38, 101.0, 0.75]])
    check(*both(x, y, outlier=0.25, wanted=FINITE))
    check(*both(torch.full((2, 3), nan), torch.zeros(2, 3)))
    check(*both(torch.ones(2, 3), torch.zeros(2, 3)))
    check(*both(torch.zeros(2, 3), torch.zeros(2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_number_of_16_bits_is_read(dtype):
    bits = torch.arange(1 << 16).to(torch.int16).view(256, 256)
    x = bits.view(dtype) if dtype.itemsize == 2 else bits.view(torch.bfloat16).float()
    check(*both(x, x.float(), tile=1 << 16))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the kernel sum on the CPU."""
    monkeypatch.setattr(fused_sums, "COMPILED_FOR", ("cpu",))
    fused_sums._check_kernel.cache_clear()
    yield
    fused_sums._check_kernel.cache_clear()


def test_reports_are_those_of_the_specification(on_the_cpu, monkeypatch, tmp_path):
    monkeypatch.setenv(library.VARIABLE, "torch")
    files = write_pair(tmp_path, a=(40, 700), b=(8, 64))
    report = quanterr.compare(*files, device="cpu")
    monkeypatch.setattr(fused_sums, "COMPILED_FOR", ())
    fused_sums._check_kernel.cache_clear()
    expected = quanterr.compare(*files, device="cpu")

    assert [finding.code for finding in expected.findings] == [finding.code for finding in report.findings]
    for x, y in zip(expected.layers, report.layers, strict=True):
        assert x.max_absolute_error == y.max_absolute_error
        assert x.absolute_error_percentiles == y.absolute_error_percentiles
        assert x.mean_squared_error == pytest.approx(y.mean_squared_error, rel=1e-12)


def test_kernel_is_checked_before_its_first_use(on_the_cpu):
    assert can_fuse(CPU)


@pytest.mark.parametrize("failure", [RuntimeError("Failed to find C compiler"), None], ids=["error", "wrong"])
def test_notice_says_why_torch_computes_the_sums(on_the_cpu, monkeypatch, capsys, failure):
    launch = fused_sums._launch

    def fail(*args):
        if failure is not None:
            raise failure
        sums, histogram = launch(*args)
        return 2 * sums, histogram

    monkeypatch.setattr(fused_sums, "_launch", fail)

    assert not can_fuse(CPU)
    assert (
        f"cpu: torch computes the sums, as Triton's kernel fails: {failure or 'its sums are wrong'}"
        == capsys.readouterr().err.strip()
    )


COMPILE = """
import torch
from quanterr.kernel.fused_sums import Codes, sum_codes
from quanterr.kernel.specification import SumOptions
from quanterr.metrics.peaks import CellGrid
from quanterr.tensors.chunks import Chunk
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    def get_current_device(self):
        return TARGETS.index(target)

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return target


def compile_only(function, grid):
    return lambda **arguments: made.append(function.warmup(grid=grid, **arguments))


TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]
JITFunction.__getitem__, made = compile_only, []
driver.set_active(Driver())
for target in TARGETS:
    for rows, cols in ((4, 300), (1, 1)):  # Triton passes integers that are 1 as constants
        numbers = torch.rand(rows, 3)
        x = Codes(torch.rand(rows, cols).bfloat16())
        y = Codes(torch.zeros(rows, cols, dtype=torch.uint8), torch.rand(256, 2), *[numbers] * 3, 128, 0.5)
        wanted = SumOptions(lambda chunk: torch.rand(1, cols), 2, CellGrid(1, 64), 0.1)
        sum_codes(x, y, Chunk(0, rows, 0, cols), cols, 0.01, wanted)
for each in made:
    assert "fma.rn.f32" not in each.asm.get("ptx", "")
    print(*each.asm.keys() & {"cubin", "hsaco"})
"""


def test_kernel_compiles_for_gpus_that_are_not_here(tmp_path):
    """In a new process: in this one, the interpreter has replaced Triton's own functions."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)

    assert [*4 * ["cubin"], *2 * ["hsaco"]] == done.stdout.split(), done.stderr[-2000:]
