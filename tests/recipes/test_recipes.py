"""Recipes compared with the libraries that they follow, and virtual candidates with files on disk."""

import hashlib
import json
import lzma
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from support.forked import call
from support.gguf_stored import Stored, write_gguf
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError, UsageError
from quanterr.recipes import Source, list_recipes, parse_recipe, parse_recipes
from quanterr.recipes.base import Piece
from quanterr.recipes.blocks import BlockEncoder
from quanterr.recipes.matrices import open_rows
from quanterr.recipes.quantized_file import PIECE_ELEMENTS, _count_bytes, choose_weights, mix_recipes
from quanterr.recipes.tensors import (
    calibrate,
    error_within_bounds,
    fake_quantize,
    quantize_tensor,
    theoretical_max_error,
)
from quanterr.selection import LayerSelection
from quanterr.tensors.workspace import Workspace

GOLDEN = Path(__file__).parents[1] / "golden_recipes"
WEIGHTS = load_file(GOLDEN / "weights.safetensors")
VALUES = json.loads((GOLDEN / "values.json").read_text())
EVERY = [
    *list_recipes(),
    "int4_g64:asym",
    "int3_g32",
    "int6_g32:asym",
    "mlx_q3_g32",
    "nf4:double",
    "fp4_g128",
    "int8_block64",
    "fp8_block1x64",
]


def candidate(original, recipe, chosen):
    return mix_recipes(original, dict.fromkeys(chosen, recipe), recipe.name)


def digest(values):
    return hashlib.sha256((values.float().contiguous() + 0.0).numpy().tobytes()).hexdigest()


def snr(x, y):
    return float(10 * torch.log10(x.square().sum() / (y - x).square().sum()))


def _type(ggml_type):
    return gguf.GGMLQuantizationType[ggml_type.upper()]


@pytest.mark.parametrize("case", VALUES)
def test_values_equal_the_library_bit_by_bit(case):
    recipe, _, _ = case.partition(" ")
    digests = {name: digest(fake_quantize(WEIGHTS[name], recipe)) for name in VALUES[case]}

    assert VALUES[case] == digests


class TestKTypes:
    """llama-quantize is no Python code; its files of a trained model have these SNRs without an importance matrix."""

    @pytest.mark.parametrize(
        ("recipe", "min_snr_db"), [("q6_k", 34.9), ("q5_k", 28.7), ("q4_k", 22.7), ("q3_k", 16.3), ("q2_k", 10.3)]
    )
    def test_search_reaches_its_usual_level(self, recipe, min_snr_db):
        x = torch.randn(32, 512, generator=torch.Generator().manual_seed(5))

        assert min_snr_db < snr(x, fake_quantize(x, f"gguf_{recipe}"))

    def test_search_comes_near_the_real_writer(self):
        """The golden file holds a weight's first rows before and after llama-quantize, without an importance matrix."""
        golden = load_file(GOLDEN / "q4_k.safetensors")
        theirs, ours = snr(golden["x"], golden["y"]), snr(golden["x"], fake_quantize(golden["x"], "gguf_q4_k"))

        assert abs(theirs - ours) < 0.01


def plain(report):
    """Return a report's content about weights, without paths."""
    return [report.aggregate, report.layers, report.lossless, report.not_compared, report.formats, report.verdict]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Yield a norm, an embedding and two matrices, one larger than a piece and with an odd number of rows."""
    tensors = {
        "model.embed_tokens.weight": numbers(10, 64),
        "model.layers.0.mlp.up_proj.weight": numbers(PIECE_ELEMENTS // 256 * 2 + 3, 256, seed=1),
        "model.layers.0.mlp.down_proj.weight": numbers(256, 512, seed=2).float(),
        "model.layers.0.input_layernorm.weight": numbers(64, seed=3),
    }
    path = store(tmp_path_factory.mktemp("original") / "x.safetensors", tensors)
    with open_checkpoint(path) as checkpoint:
        yield checkpoint, tensors


@pytest.mark.parametrize(("rows", "times"), [(8192, 2), (32768, 3)])
def test_small_weight_is_encoded_once(tmp_path, monkeypatch, rows, times):
    """A comparison reads it whole, here in two pieces, then samples rows twice; large weights are encoded again."""
    with open_checkpoint(store(tmp_path / "x.safetensors", {"a.weight": numbers(rows, 256)})) as checkpoint:
        virtual, _ = mix_recipes(checkpoint, {"a.weight": parse_recipe("gguf_q8_0")}, "gguf_q8_0")
        entry = virtual.entries["a.weight"]
        made, encode = [], BlockEncoder.encode
        monkeypatch.setattr(BlockEncoder, "encode", lambda *words: made.append(1) or encode(*words))
        piece, row = entry.nbytes // rows * (PIECE_ELEMENTS // 256), entry.nbytes // rows
        whole = [bytes(entry.file.read(entry.offset + n * piece, piece)) for n in range(2)]
        some = {bytes(entry.file.read(entry.offset + piece + 7 * row, 3 * row)) for _ in range(2)}

        assert times == len(made)
        assert {whole[1][7 * row : 10 * row]} == some


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q6_k"])
def test_most_values_equal_the_real_writer_with_importance(name):
    """The golden file holds a weight's first rows by llama-quantize --imatrix; its compiler may fuse operations."""
    golden = load(lzma.decompress((GOLDEN / "with_importance.safetensors.xz").read_bytes()))
    x, theirs, ggml_type = golden["x"].float(), golden[name], gguf.GGMLQuantizationType[name.upper()]
    encoder = parse_recipe(f"gguf_{name}").encoder
    [codes] = encoder.list_tensors(Source(*x.shape, "F32"))
    raw = torch.empty(_count_bytes(codes.dtype, codes.shape), dtype=torch.uint8)
    encoder.encode(x, 0, (), raw, golden["importance"])
    ours = torch.from_numpy(gguf.quants.dequantize(raw.view(len(x), -1).numpy(), ggml_type)).view(x.shape)

    assert (ours == theirs).float().mean() > 0.95
    assert abs(snr(x, theirs) - snr(x, ours)) < 0.01


@pytest.mark.parametrize("name", [*EVERY, "int4_g32:scales=mse", "int4_g32:asym:scales=p99", "fp8_row:scales=mse"])
def test_rows_are_measured_and_encoded_unchanged(name):
    """Other recipes share the same rows."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    rows, encoder, source = x.clone(), parse_recipe(name).encoder, Source(128, 256, "F32")
    settled = encoder.settle(encoder.measure(Piece(rows), torch.ones(256)), source)
    encoder.encode(rows, 0, settled, torch.empty(_count_bytes(*encoder.list_tensors(source)[0][1:]), dtype=torch.uint8))

    assert torch.equal(x, rows)


def test_reading_a_weight_with_nan_is_an_error_every_time(tmp_path):
    x = torch.ones(64, 64)
    x[63, 63] = torch.nan
    with open_checkpoint(store(tmp_path / "x.safetensors", {"a.weight": x})) as checkpoint:
        virtual, _ = mix_recipes(checkpoint, {"a.weight": parse_recipe("int8_row")}, "int8_row")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="holds NaN or infinity"):
                virtual.entries["a.weight"].read()


def test_failed_rows_are_read_again(tmp_path, monkeypatch):
    def cut(*_):
        raise CheckpointError("the connection was cut")

    path = store(tmp_path / "x.safetensors", {"a.weight": torch.full((8, 64), 3.0), "b.weight": torch.ones(8, 64)})
    with open_checkpoint(path) as checkpoint:
        a, b = (checkpoint.entries[name] for name in ("a.weight", "b.weight"))
        open_rows(b)(0, 8)
        with monkeypatch.context() as patched:
            patched.setattr(Workspace, "read", cut)
            with pytest.raises(CheckpointError):
                open_rows(a)(0, 8)

        assert torch.equal(torch.full((8, 64), 3.0), open_rows(a)(0, 8))


def test_partial_blocks_have_the_recipe_block_size():
    """400 rows are 4 blocks of 128 or of 100, and the stored scales do not show which."""
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(1))

    assert snr(x, fake_quantize(x, "fp8_block128")) > 31


def test_column_scale_comes_from_its_largest_magnitude():
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 97)
    scale = x.abs().amax(0) / 127

    assert torch.equal((x / scale).round() * scale, fake_quantize(x, "int8_column"))


@pytest.mark.parametrize(("name", "high", "wide"), [("block1x32", 1, 32), ("block64x16", 64, 16), ("block64", 64, 64)])
def test_blocks_have_the_edges_in_the_recipe_name(name, high, wide):
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    blocks = x.view(128 // high, high, 128 // wide, wide)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 127

    assert torch.equal(((blocks / scale).round() * scale).view(128, 128), fake_quantize(x, f"int8_{name}"))


class TestCandidate:
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow if name.endswith("_k") else ()) for name in EVERY]
    )
    def test_candidate_report_equals_the_report_on_disk(self, original, tmp_path, name):
        checkpoint, tensors = original
        chosen, _ = choose_weights(checkpoint, LayerSelection())
        virtual, left = candidate(checkpoint, parse_recipe(name), chosen)
        report = quanterr.compare(checkpoint, virtual, device="cpu")

        assert ([], "pass") == (left, report.verdict), report.reasons
        assert {layer.layer_name for layer in report.layers} == {name for name in tensors if "proj" in name}
        if name.startswith("gguf"):  # a safetensors file cannot hold these
            parts = [
                Stored(key, virtual.entries[key].dtype, tuple(tensor.shape), virtual.entries[key].read())
                for key, tensor in tensors.items()
            ]
            path = write_gguf(tmp_path / "model.gguf", parts)
            assert plain(report) == plain(quanterr.compare(checkpoint, path, device="cpu"))
            return
        written = {key: tensor for key, tensor in tensors.items() if "proj" not in key}
        for key in chosen:
            parts = quantize_tensor(tensors[key], name)
            written |= {key.removesuffix("weight") + part: tensor.clone() for part, tensor in parts.items()}
        save_file(written, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(
            json.dumps({"quantization_config": dict(parse_recipe(name).encoder.config)})
        )
        assert plain(report) == plain(quanterr.compare(checkpoint, tmp_path, device="cpu"))

    @pytest.mark.slow
    def test_candidate_bytes_are_the_same_in_any_cut(self, original):
        checkpoint, _ = original
        for name in ("fp8_block128", "int4_g32:asym", "nf4:double", "gguf_q4_k"):
            virtual, _ = candidate(checkpoint, parse_recipe(name), ["model.layers.0.mlp.up_proj.weight"])
            for entry in virtual.entries.values():
                whole = entry.read()
                for begin, n in ((0, 1), (len(whole) // 3, 1000), (len(whole) - 7, 7)):
                    n = min(n, len(whole) - begin)
                    assert whole[begin : begin + n] == entry.file.read(entry.offset + begin, n)

    def test_weight_that_a_recipe_cannot_store_stays(self, tmp_path):
        path = store(tmp_path / "x.safetensors", {"a.weight": numbers(8, 40), "b.weight": numbers(8, 64, seed=1)})
        with open_checkpoint(path) as checkpoint:
            virtual, left = candidate(checkpoint, parse_recipe("int4_g32"), ["a.weight", "b.weight"])

            assert [("a.weight", "int4_g32: its 40 columns are not a multiple of 32")] == left
            assert virtual.entries["a.weight"] is checkpoint.entries["a.weight"]
            assert ["b.weight"] == [layer.layer_name for layer in quanterr.compare(checkpoint, virtual).layers]

    def test_norms_heads_routers_and_convolutions_stay_with_a_reason(self, tmp_path):
        tensors = {
            "lm_head.weight": numbers(4, 8),
            "a.conv1d.weight": numbers(4, 1, 8, seed=1),
            "b.weight": numbers(4, 8, seed=2).to(torch.float8_e4m3fn),
            "c.weight": numbers(4, 8, seed=3),
        }
        with open_checkpoint(store(tmp_path / "x.safetensors", tensors)) as checkpoint:
            chosen, left = choose_weights(checkpoint, LayerSelection())

        assert ["c.weight"] == chosen
        assert {"lm_head.weight", "a.conv1d.weight", "b.weight"} == {skipped.name for skipped in left}

    @pytest.mark.parametrize(
        ("patterns", "chosen"),
        [
            ((), ["c.weight"]),
            (("!c",), []),
            (("c", "embed"), ["c.weight", "model.embed_tokens.weight"]),
            (("head",), ["lm_head.weight"]),
            (("*",), ["c.weight", "lm_head.weight", "model.embed_tokens.weight"]),
            (("*", "!head"), ["c.weight", "model.embed_tokens.weight"]),
        ],
    )
    def test_embeddings_and_heads_are_quantized_where_a_pattern_names_them(self, tmp_path, patterns, chosen):
        names = ["model.embed_tokens.weight", "lm_head.weight", "c.weight", "mlp.router.weight", "final_norm.weight"]
        tensors = {name: numbers(4, 8, seed=n) for n, name in enumerate(names)}
        with open_checkpoint(store(tmp_path / "x.safetensors", tensors)) as checkpoint:
            assert sorted(choose_weights(checkpoint, LayerSelection(patterns))[0]) == chosen

    def test_weight_with_nan_is_named(self, tmp_path):
        x = numbers(8, 64).float()
        x[3, 5] = torch.nan
        with open_checkpoint(store(tmp_path / "x.safetensors", {"a.weight": x})) as checkpoint:
            virtual, _ = candidate(checkpoint, parse_recipe("fp8_row"), ["a.weight"])
            with pytest.raises(CheckpointError, match=r"a\.weight: holds NaN or infinity"):
                quanterr.compare(checkpoint, virtual, device="cpu")


LATE = {"nf4:double", "gguf_q8_0", "gguf_q4_0", "gguf_q4_1", "gguf_q5_0", "gguf_q5_1"}  # scales are rounded after codes


@pytest.mark.parametrize("recipe", ["fp8_row", "nvfp4", "int4_g64:asym", "mlx_q4_g64", "nf4", "gguf_q4_k"])
def test_float64_original_is_quantized_like_its_values_in_float32(tmp_path, recipe):
    values, errors = numbers(64, 256, dtype=torch.float32), []
    for dtype in (torch.float64, torch.float32):
        original = store(tmp_path / f"{dtype}.safetensors", {"a.weight": values.to(dtype)})
        errors.append(quanterr.sweep(original, [recipe], device="cpu").candidates[0].snr_db)

    assert errors[0] == pytest.approx(errors[1], abs=1e-4)  # sums in float32 are accurate to 1e-5 of a sum


class TestBounds:
    @pytest.mark.parametrize("recipe", [name for name in EVERY if name not in LATE and not name.endswith("2_k")])
    def test_nearest_rounding_is_within_bounds_and_the_next_code_is_not(self, recipe):
        x = WEIGHTS["heavy"].float()
        y, bound = fake_quantize(x, recipe), theoretical_max_error(x, recipe)
        place = int((bound / x.abs()).view(-1).argmin())  # the element with the smallest bound, relative to its value
        worse = y.clone()
        worse.view(-1)[place] += 2.1 * bound.view(-1)[place]

        assert error_within_bounds(x, y, recipe)
        assert not error_within_bounds(x, worse, recipe)
        assert not error_within_bounds(x, y * torch.nan, recipe)

    def test_bounds_are_half_a_step(self):
        x = torch.tensor([[127.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-254.0, 3.0, 100.0]])

        assert torch.equal(torch.tensor([[0.5] * 3, [0.5] * 3, [1.0] * 3]), theoretical_max_error(x, "int8_row"))
        x = torch.tensor([[448.0, 1.0, 1.9, 0.0]])
        assert torch.equal(torch.tensor([[16.0, 1 / 16, 1 / 16, 2.0**-10]]), theoretical_max_error(x, "fp8_row"))

    def test_bounds_for_clipped_values_reach_to_the_last_code(self):
        x = torch.ones(1, 1000)
        x[0, 0] = 100.0
        bound = theoretical_max_error(x, "int8_row:scales=p99")

        assert pytest.approx(99.0, abs=0.01) == float(bound[0, 0])
        assert error_within_bounds(x, fake_quantize(x, "int8_row:scales=p99"), "int8_row:scales=p99")

    def test_different_shapes_are_refused(self):
        with pytest.raises(UsageError, match="shapes differ"):
            error_within_bounds(torch.ones(2, 32), torch.ones(32, 2), "int8_row")


class TestCalibration:
    def test_calibration_gives_all_stored_tensors_except_the_codes(self):
        x = WEIGHTS["gaussian"]
        whole, scales = quantize_tensor(x, "int4_g32:asym"), calibrate(x, "int4_g32:asym")

        assert ["weight_scale", "weight_zero_point", "weight_shape"] == list(scales)
        assert all(torch.equal(whole[name], tensor) for name, tensor in scales.items())
        assert {} == calibrate(x, "gguf_q8_0")

    def test_mse_never_has_more_error_and_percentiles_clip(self):
        x = WEIGHTS["heavy"]
        for recipe in ("int4_g32", "int4_g32:asym", "int4_channel", "fp8_row", "int8_tensor"):
            assert snr(x, fake_quantize(x, recipe)) <= snr(x, fake_quantize(x, f"{recipe}:scales=mse")) + 1e-9
        clipped = fake_quantize(x, "int8_row:scales=p99")
        assert clipped.abs().amax() < 0.8 * x.abs().amax()

    def test_average_is_taken_over_tensor_pieces(self):
        x = torch.ones(4 * PIECE_ELEMENTS // 256, 256)
        x[: PIECE_ELEMENTS // 256] = 2.0

        expected = 2.0 * 0.9**3 + (1 - 0.9**3)
        assert pytest.approx(expected, rel=1e-6) == float(fake_quantize(x, "int8_tensor:scales=ema").amax())


class TestNames:
    def test_braces_and_scales_multiply(self):
        names = [recipe.name for recipe in parse_recipes(["int4_g{32,64},fp8_row"], "absmax,mse")]

        assert [
            "int4_g32:scales=absmax", "int4_g32:scales=mse", "int4_g64:scales=absmax", "int4_g64:scales=mse",
            "fp8_row:scales=absmax", "fp8_row:scales=mse",
        ] == names  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fp8_rows", "did you mean fp8_row"),
            ("int9_g32", "is not a recipe"),
            ("fp8_row:asym", "unknown option :asym; it has none"),
            ("nf4:asym", "unknown option :asym; there is :double"),
            ("int4_g32:scales=median", "choose one of absmax"),
            ("nf4:scales=mse", "nf4 has no scales=mse"),
            ("fp8_row:scales=ema", "fp8_row has no scales=ema"),
            ("fp8_row,fp8_row", "fp8_row is given twice"),
            ("", "no recipe is given"),
            ("fp8_row:bits=3", "unknown option bits"),
        ],
    )
    def test_invalid_recipe_name_is_an_error(self, name, message):
        with pytest.raises(UsageError, match=message):
            parse_recipes([name])


class TestTensors:
    def test_gradients_go_straight_through(self):
        x = WEIGHTS["gaussian"].clone().requires_grad_()
        (fake_quantize(x, "int4_g128:asym") * 3).sum().backward()

        assert torch.equal(torch.full_like(x, 3), x.grad)

    def test_dtype_is_kept_and_unsuitable_tensors_are_refused(self):
        assert torch.bfloat16 == fake_quantize(WEIGHTS["gaussian"].bfloat16(), "nf4").dtype
        for tensor, recipe in (
            (torch.ones(3), "fp8_row"),
            (torch.ones(2, 30), "int4_g32"),
            (torch.ones(2, 2).int(), "nf4"),
        ):
            with pytest.raises(UsageError):
                fake_quantize(tensor, recipe)
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            fake_quantize(torch.full((2, 64), torch.inf), "nf4")


class TestSweep:
    def test_sweep_ranks_recipes_with_the_gain_from_each_choice(self, original):
        checkpoint, _ = original
        ranking = quanterr.sweep(checkpoint, ["int{4,8}_g64,int4_g32,fp8_row"], device="cpu")

        assert ["int8_g64", "fp8_row", "int4_g32", "int4_g64"] == [candidate.name for candidate in ranking.candidates]
        gains = {(gain.what, gain.instead_of, gain.candidate): gain.snr_gain_db for gain in ranking.gains}
        assert {("bits", "int4_g64", "int8_g64"), ("finer scales", "int4_g64", "int4_g32")} == gains.keys()
        assert 23 < gains["bits", "int4_g64", "int8_g64"] < 26  # 6.02 dB a bit in theory
        assert 0.3 < gains["finer scales", "int4_g64", "int4_g32"] < 2

    def test_sweep_ranks_recipes_with_files(self, original, tmp_path):
        checkpoint, tensors = original
        values = {
            name: fake_quantize(tensor, "int8_row") if "proj" in name else tensor for name, tensor in tensors.items()
        }
        path = store(tmp_path / "mine.safetensors", values)
        ranking = quanterr.rank(checkpoint, [path], against=["int8_row", "int4_g128"], device="cpu")

        mine, row, *_ = sorted(ranking.candidates, key=lambda candidate: -candidate.snr_db)
        assert {"mine.safetensors", "int8_row"} == {mine.name, row.name}
        assert abs(mine.snr_db - row.snr_db) < 0.2  # one of the two is rounded to bfloat16

    def test_sweep_quantizes_only_selected_weights_and_reports_the_rest(self, tmp_path):
        path = store(
            tmp_path / "x.safetensors", {"a.up_proj.weight": numbers(8, 40), "a.down_proj.weight": numbers(8, 64)}
        )
        ranking = quanterr.sweep(path, ["int4_g8"], layers=["up_proj"], device="cpu")
        assert ["a.up_proj.weight"] == [layer.layer_name for layer in ranking.layers]

        some = quanterr.sweep(path, ["int4_g32"], device="cpu").candidates[0]
        assert ["left_unquantized"] == [finding.code for finding in some.findings]
        planned = quanterr.plan(path, to=["int4_g32", "int4_g8"], bits=6)
        assert "int4_g32: 1 weight cannot be stored and stays: a.up_proj.weight" in planned.notes[-1]
        assert (
            "1 weight cannot be stored and stays: a.up_proj.weight (int4_g32: its 40 columns"
            in some.findings[0].message
        )

        with pytest.raises(UsageError, match=r"no selected weight can be quantized: a\.up_proj\.weight"):
            quanterr.sweep(path, ["int4_g32"], layers=["up_proj"], device="cpu")

    @pytest.mark.parametrize(
        ("ggml_type", "fallback"),
        [("q6_k", "Q8_0"), ("q5_k", "Q5_1"), ("q4_k", "Q5_0"), ("q3_k", "Q4_0"), ("q2_k", "Q4_0")],
    )
    def test_k_type_falls_back_as_llama_quantize_does(self, ggml_type, fallback, tmp_path):
        """Rows of 256 fill its blocks; rows of 96 get the values that gguf writes for the other type."""
        x = {"a.up_proj.weight": numbers(8, 256).float(), "a.down_proj.weight": numbers(8, 96, seed=1).float()}
        path, recipe = store(tmp_path / "x.safetensors", x), f"gguf_{ggml_type}"
        ranking, left = (quanterr.sweep(path, [name], device="cpu") for name in (recipe, f"{recipe}:strict"))
        [falling], [strict] = ranking.candidates, left.candidates
        choices = {layer.layer_name: layer.choices[0] for layer in ranking.layers}
        whole, other = choices["a.up_proj.weight"], choices["a.down_proj.weight"]

        quants, values = getattr(gguf.GGMLQuantizationType, fallback), x["a.down_proj.weight"].numpy()
        theirs = gguf.quants.dequantize(gguf.quants.quantize(values, quants), quants)
        error = float(((torch.from_numpy(theirs) - x["a.down_proj.weight"]).double() ** 2).sum())
        assert other.squared_error == pytest.approx(error, rel=1e-6)  # float32 of x, summed in float64
        assert {recipe: 1, f"gguf_{fallback.lower()}": 1} == falling.formats
        assert ["fallback_recipe"] == [finding.code for finding in falling.findings]
        assert f"stored as gguf_{fallback.lower()}" in falling.findings[0].message
        assert falling.findings[0].message in " ".join(map(str, ranking.view(0).summary))
        assert ["left_unquantized"] == [finding.code for finding in strict.findings]
        assert whole.bytes == x["a.up_proj.weight"].numel() * gguf.GGML_QUANT_SIZES[_type(ggml_type)][1] // 256

    def test_only_rows_in_whole_blocks_fall_back_and_tensors_never(self, tmp_path):
        path = store(tmp_path / "x.safetensors", {"a.up_proj.weight": numbers(8, 40)})
        with pytest.raises(UsageError, match="its 40 columns are not a multiple of 32"):
            quanterr.sweep(path, ["gguf_q4_k"], device="cpu")
        with pytest.raises(UsageError, match="96 columns do not fill its blocks; gguf_q5_0 stores them"):
            fake_quantize(numbers(8, 96), "gguf_q4_k")
        with pytest.raises(UsageError, match="unknown option :strict; it has none"):
            parse_recipe("gguf_q5_0:strict")

    def test_plan_names_the_recipe_that_stores_a_layer(self, tmp_path):
        x = {"a.up_proj.weight": numbers(8, 256), "b.up_proj.weight": numbers(8, 96, seed=1)}
        path = store(tmp_path / "x.safetensors", x)
        planned = quanterr.plan(path, to=["gguf_q4_k"], bits=6)

        assert ["gguf_q4_k", "gguf_q5_0"] == [layer.recipe for layer in planned.layers]
        assert "gguf_q4_k: 1 weight is stored as gguf_q5_0, as llama-quantize does" in planned.notes[-1]
        assert (4.5 * 8 * 256 + 5.5 * 8 * 96) / 8 == sum(layer.bytes for layer in planned.layers)

    def test_sweep_command_writes_shows_and_lists(self, original, tmp_path):
        checkpoint, _ = original
        done = call(
            "sweep",
            "-v",
            checkpoint.path,
            "--to",
            "int4_g{32,64}",
            "-o",
            tmp_path / "s.json",
            "--require",
            "snr_db >= 15",
        )
        listed = call("formats", "--recipes")

        assert (0, 0) == (done.returncode, listed.returncode), done.stderr
        assert "Gain of each choice" in done.stdout
        assert "PASS (exit 0): more bytes buy less error: int4_g32 (" in done.stdout
        assert ["int4_g32", "int4_g64"] == [
            c["name"] for c in json.loads((tmp_path / "s.json").read_text())["candidates"]
        ]
        assert all(name in listed.stdout for name in list_recipes())
        assert 2 == call("sweep", checkpoint.path, "--to", "int4_g{32").returncode
