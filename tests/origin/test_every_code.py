"""Every code of a weight is checked: how a tensor follows from its original, and where it does not."""

import threading

import pytest
import torch
from mutation import excuses
from mutation.pairs import Bench
from support.gguf_stored import LLAMA, Stored, gguf, key

import quanterr
from quanterr.checkpoints.gguf_file import TEXT
from quanterr.errors import UsageError
from quanterr.origin import tracing
from quanterr.recipes.tensors import quantize_tensor

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLS = 96, 256
IMATRIX = key("quantize.imatrix.file", TEXT, "imatrix.gguf")
FLAT_RECIPES = ("fp8_row", "int8_block64", "nvfp4", "mxfp8", "nf4", "int4_g32:asym")
BLOCK_RECIPES = ("gguf_q8_0", "gguf_q5_1", "gguf_q4_k")
CODES_AT = {"gguf_q8_0": 2, "gguf_q5_1": 8, "gguf_q4_k": 16}  # bytes of a block before its codes
BLOCK_BYTES = {"gguf_q8_0": 34, "gguf_q5_1": 24}


def draw(rows=ROWS, cols=COLS, dtype=torch.bfloat16):
    return (0.02 * torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))).to(dtype)


def quantize(weight, recipe):
    """Return the stored tensors of a weight by their names."""
    parts = quantize_tensor(weight, recipe)
    return {f"{NAME}.{name}": tensor for name, tensor in parts.items()}


def codes_of(stored, recipe):
    """Return the bytes of the codes, (rows, bytes), which share memory with the stored tensors."""
    codes = next(iter(stored.values()))
    rows = ROWS if recipe.startswith("nf4") else len(codes)
    return codes.view(torch.uint8).view(rows, -1)


def compare(original, stored, path, recipe, **options):
    """Compare in memory, or a type of ggml as a file."""
    if recipe.startswith("gguf"):
        [raw] = stored.values()
        dtype = recipe.removeprefix("gguf_").upper()
        path = path / "quantized.gguf"
        shape = tuple(original.shape)
        path.write_bytes(gguf([Stored("blk.0.ffn_up.weight", dtype, shape, raw.numpy().tobytes())], LLAMA))
        return quanterr.compare({f"{NAME}.weight": original}, path, every_code=True, device="cpu", **options)
    return quanterr.compare({f"{NAME}.weight": original}, dict(stored), every_code=True, device="cpu", **options)


def trace(original, stored, path, recipe):
    [tensor_origin] = compare(original, stored, path, recipe).origin
    return tensor_origin


@pytest.mark.parametrize("recipe", [*FLAT_RECIPES, *BLOCK_RECIPES])
class TestOneWeight:
    def test_codes_of_a_recipe_are_exact(self, recipe, tmp_path):
        weight = draw()

        origin = trace(weight, quantize(weight, recipe), tmp_path, recipe)

        assert (origin.kind, origin.off_codes, origin.unlike) == ("exact", 0, 0)

    def test_exact_weights_are_not_decoded_a_second_time(self, recipe, tmp_path, monkeypatch):
        monkeypatch.setattr(tracing._Tracer, "_compare", None)
        weight = draw()

        assert trace(weight, quantize(weight, recipe), tmp_path, recipe).kind == "exact"

    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    def test_one_wrong_code_is_named_with_its_place(self, recipe, place, tmp_path):
        weight = draw()
        stored = quantize(weight, recipe)
        codes = codes_of(stored, recipe)
        row = {"first": 0, "middle": 41, "last": ROWS - 1}[place]
        wide = len(codes[0]) // (COLS // 256) if recipe.endswith("_k") else BLOCK_BYTES.get(recipe, 1)
        at = {"first": 0, "middle": len(codes[0]) // wide // 2, "last": len(codes[0]) // wide - 1}[place] * wide
        codes[row, at + CODES_AT.get(recipe, 0)] ^= 1

        origin = trace(weight, stored, tmp_path, recipe)

        assert origin.kind == "not_shown"
        assert origin.unlike == 1
        assert [row] == [place[0] for place in origin.unlike_places]
        assert origin.reason == f"{origin.recipe} gives all values but 1"

    def test_two_exchanged_rows_are_named(self, recipe, tmp_path):
        weight = draw()
        stored = quantize(weight, recipe)
        codes = codes_of(stored, recipe)
        codes[[7, 50]] = codes[[50, 7]]

        origin = trace(weight, stored, tmp_path, recipe)

        assert (origin.kind, origin.off_rows) == ("not_shown", 2)
        assert [7, 50] == [place[0] for place in origin.places]


@pytest.mark.parametrize("recipe", ["fp8_row", "int8_block64", "nvfp4", "gguf_q4_k"])
@pytest.mark.parametrize("change", ["a LoRA", "an earlier step"])
def test_another_weight_before_quantization_is_not_shown(recipe, change, tmp_path):
    weight, generator = draw(dtype=torch.float32), torch.Generator().manual_seed(2)
    if change == "a LoRA":
        off = torch.randn(ROWS, 4, generator=generator) @ torch.randn(4, COLS, generator=generator)
    else:
        off = torch.randn(ROWS, COLS, generator=generator)
    other = weight + 1e-4 * off

    origin = trace(weight.bfloat16(), quantize(other.bfloat16(), recipe), tmp_path, recipe)

    assert origin.kind == "not_shown"
    assert origin.off_codes
    assert origin.places


class TestScales:
    def test_lowest_bit_of_a_scale_is_named_with_its_row(self):
        weight, recipe = draw(), "fp8_row"
        stored = quantize(weight, recipe)
        stored[f"{NAME}.weight_scale"].view(torch.int32).view(-1)[41] ^= 1

        origin = trace(weight, stored, None, recipe)

        assert origin.kind == "nearest"  # only the scales may differ from what the recipe writes
        assert [41] == [place[0] for place in origin.unlike_places]
        assert origin.reason.startswith("fp8_row gives all values but")

    def test_scale_that_was_rounded_after_the_codes_leaves_them_the_nearest(self):
        weight, recipe = draw(), "fp8_row"
        stored = quantize(weight, recipe)
        stored[f"{NAME}.weight_scale"] = stored[f"{NAME}.weight_scale"].half()

        origin = trace(weight, stored, None, recipe)

        assert (origin.kind, origin.arithmetic) == ("nearest", "float16")

    def test_another_scale_under_the_same_codes_is_not_shown(self):
        weight, recipe = draw(), "fp8_row"
        stored = quantize(weight, recipe)
        stored[f"{NAME}.weight_scale"][41] *= 1.2

        origin = trace(weight, stored, None, recipe)

        assert origin.kind == "not_shown"
        assert [41] == [place[0] for place in origin.places]

    def test_bits_in_scales_that_the_codes_leave_open_are_counted(self):
        weight = draw()
        stored = quantize(weight, "int8_row")
        scale = stored[f"{NAME}.weight_scale"]
        scale *= 1.01
        stored[f"{NAME}.weight"] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)

        origin = trace(weight, stored, None, "int8_row")

        assert (origin.kind, origin.arithmetic, origin.recipe) == ("nearest", "float32", None)
        assert origin.scale_bits == 32 * ROWS


class TestPlainTensors:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_cast_is_identical(self, dtype):
        weight = draw(dtype=torch.float32)

        assert trace(weight, {f"{NAME}.weight": weight.to(dtype)}, None, "").kind == "identical"

    def test_digits_that_the_original_lacks_are_not_shown(self):
        weight = draw(dtype=torch.float32)

        origin = trace(weight.bfloat16(), {f"{NAME}.weight": weight}, None, "")

        assert origin.kind == "not_shown"

    def test_sign_of_one_zero_is_not_shown(self):
        weight = draw()
        weight[5, 9] = 0
        other = weight.clone()
        other[5, 9] = -0.0

        origin = trace(weight, {f"{NAME}.weight": other}, None, "")

        assert (origin.kind, origin.places) == ("not_shown", ((5, 9),))


class TestWhole:
    def test_tensor_that_only_one_side_has_is_not_shown(self):
        weight = draw()
        extra = {"model.layers.0.mlp.down_proj.weight": draw()}

        report = compare(weight, quantize(weight, "fp8_row") | extra, None, "fp8_row")

        assert ["exact", "not_shown"] == [tensor_origin.kind for tensor_origin in report.origin]
        assert "only" not in report.origin[0].layer_name

    def test_findings_about_codes_of_sampled_rows_are_stated_of_all_codes(self):
        weight = draw(rows=1024)
        stored = quantize(weight, "int8_row")
        codes = stored[f"{NAME}.weight"][::2]
        moves = 4 * torch.randint(2, codes.shape, generator=torch.Generator().manual_seed(2)) - 2
        codes.copy_((codes + moves).clamp(-127, 127))

        report = compare(weight, stored, None, "")

        [tensor] = report.origin
        [finding] = [finding for finding in report.findings if finding.code.startswith("excess_")]
        places = f"{tensor.off_codes:,} in 512 rows differ from the nearest, first in row 0, column 0"
        assert finding.message.endswith(f"; of all codes, {places}")
        assert finding.evidence["off_codes"] == tensor.off_codes > 100_000

    def test_gate_judges_the_share_of_bytes(self):
        weight = draw()
        stored = quantize(weight, "fp8_row")
        rule = ["share(not_shown) == 0"]

        assert compare(weight, stored, None, "", require=rule).verdict == "pass"
        codes_of(stored, "fp8_row")[4, 4] ^= 1
        assert compare(weight, stored, None, "", require=rule).verdict == "fail"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # with the recipe's bytes, and with others
    def test_interrupted_pass_is_inconclusive(self, dtype, monkeypatch):
        stop, weight = threading.Event(), draw(dtype=torch.float32)
        follow = tracing._Tracer.trace
        monkeypatch.setattr(tracing._Tracer, "trace", lambda *given: (stop.set(), follow(*given))[1])

        report = compare(weight.bfloat16(), quantize(weight.to(dtype), "fp8_row"), None, "", stop=stop)

        assert (report.complete, report.verdict, report.origin) == (False, "inconclusive", [])
        assert report.reasons == ["interrupted: not every code was looked at"]

    def test_gate_without_the_option_is_an_error(self):
        weight = {f"{NAME}.weight": draw()}

        with pytest.raises(UsageError, match="needs every_code"):
            quanterr.compare(weight, weight, require=["share(not_shown) == 0"])

    def test_journal_is_refused(self):
        with pytest.raises(UsageError, match="resume"):
            quanterr.compare("a", "b", every_code=True, resume="journal")

    def test_infinity_in_both_is_not_shown(self):
        weight = draw()
        weight[3, 5] = torch.inf
        stored = quantize(weight.nan_to_num(posinf=1.0), "fp8_row")

        assert trace(weight, stored, None, "fp8_row").kind == "not_shown"

    def test_every_row_of_a_large_weight_is_read(self):
        weight = draw(2048, 512)
        stored = quantize(weight, "int8_row")
        stored[f"{NAME}.weight"][1234, 5] ^= 1

        origin = trace(weight, stored, None, "int8_row")

        assert (origin.kind, origin.unlike_places) == ("not_shown", ((1234, 5),))


@pytest.mark.parametrize(("keys", "origin_class"), [((), "not_shown"), ((IMATRIX,), "compensated")])
def test_few_moved_codes_of_ggml_need_an_importance_matrix(keys, origin_class, tmp_path):
    weight, path = draw(), tmp_path / "quantized.gguf"
    blocks = codes_of(quantize(weight, "gguf_q5_1"), "gguf_q5_1")
    blocks[::2, 8] ^= 1  # the first code of every other row
    stored = Stored("blk.0.ffn_up.weight", "Q5_1", (ROWS, COLS), blocks.numpy().tobytes())
    path.write_bytes(gguf([stored], (*LLAMA, *keys)))

    [tensor_origin] = quanterr.compare({f"{NAME}.weight": weight}, path, every_code=True, device="cpu").origin

    assert (tensor_origin.kind, tensor_origin.off_codes, tensor_origin.off_rows) == (origin_class, ROWS // 2, ROWS // 2)


@pytest.mark.session
@pytest.mark.parametrize("file", ["gptqmodel", "autoround", "llmcompressor_awq"])
def test_files_of_methods_that_move_codes_are_compensated(file, tmp_path):
    pair = excuses.make_pair(Bench(tmp_path), excuses.OWN_DECLARATIONS[file], file)

    origin = quanterr.compare(pair.original, pair.path, every_code=True, device="cpu").origin

    assert {"identical", "nearest", "compensated"} >= {tensor_origin.kind for tensor_origin in origin}
    assert any(tensor_origin.kind == "compensated" for tensor_origin in origin)
