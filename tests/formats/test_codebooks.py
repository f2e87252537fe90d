"""Codebook and rare layouts of language models: their tables, refusals, and the role of config.json."""

import gc
import hashlib
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.making import compare, label, open_pairing, read_whole, same_bits, store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.formats import exl3, quip_sharp
from quanterr.formats.shared import code_tiles, hadamard
from quanterr.formats.shared.config_checks import matches
from quanterr.pairing.model import Bucket
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")


def golden(case, weight="a"):
    """Return the stored tensors of one weight in a golden file, and its values."""
    path = GOLDEN / f"{case}.safetensors"
    stored = {name: t for name, t in load_file(path).items() if name.startswith(f"{weight}.")}
    return stored, load_file(path.with_suffix(".expected.safetensors"))[f"{weight}.weight"].float()


def files(folder, stored, values, config=None, metadata=None):
    """Write an original with these values and a quantized checkpoint."""
    original = store(folder / "original.safetensors", {"a.weight": values, "b.weight": torch.ones(2, 32)})
    quantized = {**stored, "b.weight": torch.ones(2, 32)}
    if config is None:
        return original, store(folder / "quantized.safetensors", quantized, metadata)
    return original, store(folder / "quantized", quantized, metadata, {"quantization_config": config})


def weight_of(folder, stored, values, config=None):
    """Return the quantized weight and its values."""
    with open_pairing(*files(folder, stored, values, config)) as plan:
        weight = next(pair.quantized for pair in plan.pairs if pair.name == "a.weight")
        return weight, read_whole(weight)


def refusal(folder, stored, values, config=None):
    """Return why the weight is not read; the original's tensor has the same reason."""
    with open_pairing(*files(folder, stored, values, config)) as plan:
        assert [pair.name for pair in plan.pairs] == ["b.weight"]
        leftovers = {left for left in plan.leftovers if left.side == "original"}
        assert [left.bucket in (Bucket.ERROR, Bucket.UNSUPPORTED) for left in leftovers] == [True]
        return leftovers.pop().reason


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


# of the tables in Cornell-RelaxML/quip-sharp 1d8f873e lib/utils/matmul_had.py, a byte an entry, 1 for +1 and 0 for -1
TABLES = {
    12: "c1be30fecbc13e7e",
    20: "cff143e84622972b",
    28: "90e9b61e93164eb5",
    36: "147097e41d5a3707",
    52: "9aa6bec96394cfca",
    60: "e0d3fe922af47d1e",
    108: "f2515b85a3163765",
    116: "54ed86047196455d",
    124: "d8b24cc196d0c5a6",
    140: "2b20c54cd8c49cdc",
    156: "1f9950c8e2e00ddc",
    172: "ac825f9b6bbb0ae4",
}


class TestHadamardMatrices:
    def test_hadamard_tables_have_all_sizes(self):
        assert sorted(TABLES) == sorted(hadamard.SIZES)

    @pytest.mark.parametrize("size", TABLES)
    def test_hadamard_matrices_equal_the_library(self, size):
        table = hadamard.make_table(size)

        assert TABLES[size] == digest((table > 0).to(torch.uint8))
        assert torch.equal(size * torch.eye(size).double(), table @ table.t())

    @pytest.mark.parametrize("n", [1, 2, 8, 16, 64, 256, 12, 24, 320, 28 * 32])
    def test_hadamard_matrices_are_the_product_of_their_factors(self, n):
        size = next((size for size in sorted(TABLES, reverse=True) if n % size == 0), 1)
        table = hadamard.make_table(size) if size > 1 else torch.ones(1, 1).double()
        whole = torch.kron(table, hadamard.make_sylvester(n // size))
        unit_vector, unit = torch.ones(n).double(), torch.eye(n)
        left, right = (hadamard.multiply(unit, n, axis, (unit_vector, unit_vector), torch.float64) for axis in (0, 1))

        assert torch.equal(whole, left)
        assert torch.equal(whole.t(), right)

    @pytest.mark.parametrize("n", [3, 18, 44, 172 * 3, 100])
    def test_other_hadamard_sizes_are_refused(self, n):
        with pytest.raises(FormatMismatch, match=f"Hadamard matrix of {n}"):
            hadamard.check_size(n)


class TestCodebooks:
    """Digests of float32 tables of GPTQModel 7.7.0 (_codebook_lut) and of quip-sharp 1d8f873e."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("3inst", "7ecd67cf3673f439"), ("mcg", "8bcc8c8c4722f4bc"), ("mul1", "a8603f3f8e3e27b6")],
    )
    def test_exl3_codebooks_equal_the_library(self, name, expected):
        assert expected == digest(exl3.make_codebook(name, CPU))

    @pytest.mark.parametrize("name", exl3.GENERATORS)
    def test_exl3_codes_decode_the_same_by_table_and_by_formula(self, name):
        table, generator = exl3.make_codebook(name, CPU), exl3.GENERATORS[name]
        tiles = torch.arange(1 << 16).view(2, 128, 256).int()  # a code in each word
        layout = code_tiles.TileLayout(16, 16, torch.tensor([(n, 255 - n, 0) for n in range(256)], dtype=torch.int32))

        looked_up, computed = (code_tiles.look_up(tiles, layout, table, by) for by in (None, generator))

        assert same_bits(looked_up, computed)
        assert same_bits(looked_up.view(2, 16, 128, 16).transpose(1, 2).flatten(), table)

    def test_quip_sharp_codebooks_equal_the_library(self):
        assert "69038254fded6881" == digest(quip_sharp.make_e8p_vectors(CPU).float() / 4)
        assert "316d863757a0fe95" == digest(quip_sharp.make_e81b_vectors(CPU).float() / 4)


def replace_tensor(name, change):
    """Return a change that replaces a stored tensor or leaves it out."""

    def apply(stored):
        other = change(stored[name]) if name in stored else change(None)
        return {key: t for key, t in (stored | {name: other}).items() if t is not None}

    return apply


def twice_the_first(order):
    return torch.cat([order[:1], order[:1], order[2:]])


REFUSED = {
    "exl3: a trellis of 9 bits": (
        "exl3/handmade",
        replace_tensor("a.trellis", lambda t: torch.zeros(*t.shape[:2], 144, dtype=t.dtype)),
        "an EXL3 trellis is (cols / 16, rows / 16, 16 · bits) with 1 to 8 bits, not a.trellis (I16 [8, 8, 144])",
    ),
    "exl3: rows not divisible by 128": (
        "exl3/handmade",
        replace_tensor("a.trellis", lambda t: t[:, :7].contiguous()),
        "a.trellis (I16 [8, 7, 80]) holds 112 × 128 weights, which should be multiples of 128",
    ),
    "exl3: too few signs": (
        "exl3/handmade",
        replace_tensor("a.su", lambda t: t[:4]),
        "a.su (I16 [4]) should have a factor, or a sign bit, for each of 128 cols",
    ),
    "exl3: two codebooks": (
        "exl3/handmade",
        lambda stored: stored | dict.fromkeys(("a.mcg", "a.mul1"), torch.tensor(1, dtype=torch.int32)),
        "two codebooks are named: a.mcg (I32 []) and a.mul1 (I32 [])",
    ),
    "exl3: an unknown multiplier": (
        "exl3/handmade",
        replace_tensor("a.mcg", lambda _: torch.tensor(-2, dtype=torch.int32)),
        "a.mcg (I32 []) should hold 0xcbac1fed, not 0xfffffffe: an unknown codebook",
    ),
    "exl3: an unknown sibling": (
        "exl3/handmade",
        replace_tensor("a.scale", lambda _: torch.ones(1)),
        "stored as exl3 (I16), but unused: a.scale",
    ),
    "exl2: seven bits": (
        "exl2/handmade",
        replace_tensor("a.q_groups", lambda t: torch.tensor([7, *t[1:]], dtype=t.dtype)),
        "a.q_groups (I16 [6]) declares an impossible group: 7 bits in rows 0 to 2 of a.q_weight (I32 [11, 8])",
    ),
    "exl2: groups not in rising order": (
        "exl2/handmade",
        replace_tensor("a.q_groups", lambda t: torch.tensor([*t[:3], 9, *t[4:]], dtype=t.dtype)),
        "a.q_groups (I16 [6]) declares an impossible group: 6 bits in rows 9 to 8",
    ),
    "exl2: rows before the first group": (
        "exl2/handmade",
        replace_tensor("a.q_groups", lambda t: torch.tensor([t[0], 1, *t[2:]], dtype=t.dtype)),
        "a.q_groups (I16 [6]): no group starts at the first row of a.q_weight (I32 [11, 8])",
    ),
    "exl2: half a group": (
        "exl2/handmade",
        replace_tensor("a.q_groups", lambda t: t[:5]),
        "a.q_groups (I16 [5]) should hold pairs",
    ),
    "exl2: a column twice": (
        "exl2/handmade",
        replace_tensor("a.q_invperm", twice_the_first),
        "a.q_invperm (I16 [88]) should hold each number from 0 to 87 once",
    ),
    "exl2: columns without place": (
        "exl2/handmade",
        replace_tensor("a.q_invperm", lambda t: t[:80]),
        "a.q_invperm (I16 [80]) should have one number for each of the 88 columns in the groups of a.q_groups",
    ),
    "exl2: scales of fewer groups": (
        "exl2/handmade",
        replace_tensor("a.q_scale", lambda t: t[:2]),
        "its scale a.q_scale (I32 [2, 1]) should be [3, 1]",
    ),
    "exl2: fewer largest scales": (
        "exl2/handmade",
        replace_tensor("a.q_scale_max", lambda t: t[:2]),
        "a.q_scale_max (F16 [2]) should have one number for each of 3 groups",
    ),
    "aqlm: a codebook too many": (
        "aqlm/handmade",
        replace_tensor("a.codebooks", lambda t: t.repeat(2, 1, 1, 1)),
        "AQLM has codes (rows, cols, n) and codebooks (n, 2^bits, out, in), not a.codes (I8 [7, 9, 3])",
    ),
    "aqlm: an impossible size": (
        "aqlm/handmade",
        replace_tensor("a.codebooks", lambda t: t[:, :31].contiguous()),
        "a.codebooks (F16 [3, 31, 2, 4]) should hold a power of two of vectors",
    ),
    "aqlm: more vectors than codes": (
        "aqlm/handmade",
        replace_tensor("a.codebooks", lambda t: t.repeat(1, 16, 1, 1)),
        "no more than a.codes (I8 [7, 9, 3]) can index",
    ),
    "aqlm: scales of other groups": (
        "aqlm/handmade",
        replace_tensor("a.scales", lambda t: t[:5]),
        "its scale a.scales (F16 [5, 1, 1, 1]) should be [7, 1, 1, 1], or up to [7, 9, 2, 4]",
    ),
    "vptq: a permutation with a column twice": (
        "vptq/handmade",
        replace_tensor("a.perm", twice_the_first),
        "a.perm (I16 [40]) should hold each number from 0 to 39 once",
    ),
    "vptq: a scale without bias": (
        "vptq/handmade",
        replace_tensor("a.weight_scale", lambda _: torch.ones(40)),
        "a.weight_scale (F32 [40]) is stored without weight_bias",
    ),
    "vptq: outliers without codebook": (
        "vptq/handmade",
        replace_tensor("a.outlier_indices", lambda _: torch.zeros(1, 6, 2, dtype=torch.int16)),
        "a.outlier_indices (I16 [1, 6, 2]) is stored without outlier_centroids.weight",
    ),
    "vptq: residual indices with packed ones": (
        "vptq/handmade",
        replace_tensor("a.res_indices", lambda _: torch.zeros(1, 6, 40, dtype=torch.int16)),
        "residual indices should be a separate tensor for I16 indices",
    ),
    "vptq: indices of more bits": (
        "vptq/handmade",
        replace_tensor("a.indices", lambda t: torch.cat([t, t], 2)),
        "a.indices (I32 [1, 6, 26]): no length of vectors fits, for 21 rows",
    ),
    "vptq: another number of groups": (
        "vptq/handmade",
        replace_tensor("a.centroids.weight", lambda t: t.view(2, -1)),
        "a.centroids.weight (F16 [2, 128]) should have a row for each of 1 groups",
    ),
    "quip_sharp: an unknown codebook": (
        "quip_sharp/handmade_rvq4",
        replace_tensor("a.codebook_id", lambda _: torch.tensor(8)),
        "a.codebook_id (I64 []) does not name a supported codebook (7 (E8P12), 17 (E8P12RVQ4B), 18 (E8P12RVQ3B))",
    ),
    "quip_sharp: codes of other bits": (
        "quip_sharp/handmade_rvq4",
        replace_tensor("a.codebook_id", lambda _: torch.tensor(7)),
        "a.Qidxs (I64 [16, 8]) in 2 bits should be [16, 4], for the 16 rows of a.SV (F16 [16])",
    ),
    "quip_sharp: two global scales": (
        "quip_sharp/handmade_rvq4",
        replace_tensor("a.Wscale", lambda _: torch.ones(2)),
        "its global scale a.Wscale (F32 [2]) should be one number",
    ),
    "spqr: words of another shape": (
        "spqr/handmade",
        replace_tensor("a.dense_weights", lambda t: t[:-16]),
        "a.dense_weights (I64 [80]) should be [96]: tiles of 16 × 16 for 48 × 24",
    ),
    "spqr: offsets of other rows": (
        "spqr/handmade",
        replace_tensor("a.row_offsets", lambda t: t[:40]),
        "a.row_offsets (I32 [40]) should have 49 or 4 numbers for 48 rows",
    ),
    "spqr: offsets beyond the outliers": (
        "spqr/handmade",
        replace_tensor("a.row_offsets", lambda t: t + (torch.arange(49) == 48).int()),
        "a.row_offsets (I32 [49]) should rise from 0 to",
    ),
    "spqr: a column twice": (
        "spqr/handmade",
        replace_tensor("a.in_perm", twice_the_first),
        "a.in_perm (I32 [12]) should hold each number from 0 to 23 once",
    ),
    "spqr: an order of other columns": (
        "spqr/handmade",
        replace_tensor("a.in_perm", lambda t: t[:8]),
        "a.in_perm (I32 [8]) should have half as many numbers as there are columns, 24",
    ),
    "eetq: columns unsupported by kernels": (
        "eetq/handmade",
        replace_tensor("a.weight", lambda t: t[:48].contiguous()),
        "EETQ codes are (cols, rows), a multiple of 64 and an even number, not a.weight (I8 [48, 2])",
    ),
    "eetq: scales of other rows": (
        "eetq/handmade",
        replace_tensor("a.weight_scales", lambda t: t.repeat(2)),
        "its scale a.weight_scales (F16 [4]) should have one number for each of the 2 rows of a.weight (I8 [64, 2])",
    ),
    "bitnet: other rows": (
        "bitnet/handmade",
        replace_tensor("a.weight", lambda t: t.repeat(2, 1)),
        "a.weight (U8 [4, 40]) with one scale is a BitNet weight of 16 × 40, not [7, 40]",
    ),
    "gemma_embedding: other columns": (
        "gemma_embedding/handmade",
        replace_tensor("a.embedding_quantized", lambda t: t[:, :12].contiguous()),
        "a.embedding_quantized (U8 [11, 12]) with a.embedding_scale (F32 [11, 1]): "
        "neither 2-, 4- nor 8-bit codes for [11, 33]",
    ),
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(("case", "change", "says"), REFUSED.values(), ids=REFUSED)
    def test_changed_layout_is_refused(self, tmp_path, case, change, says):
        stored, values = golden(case)

        assert says in refusal(tmp_path, change(stored), values)

    @pytest.mark.parametrize("case", ["exl3/handmade", "aqlm/handmade", "eetq/handmade", "bitnet/handmade"])
    def test_label_for_another_layout_is_refused(self, tmp_path, case):
        stored, values = golden(case)
        stored["a.comfy_quant"] = label(format="float8_e4m3fn")

        assert "comfy_quant tensor declares float8_e4m3fn, but its tensors have the layout of" in refusal(
            tmp_path, stored, values
        )

    def test_size_without_a_hadamard_matrix_is_refused(self, tmp_path):
        stored, _ = golden("quip_sharp/handmade_rvq4")
        stored |= {"a.Qidxs": torch.zeros(720, 8, dtype=torch.int64), "a.SV": torch.ones(720).half()}

        assert "rotated by a Hadamard matrix of 720" in refusal(tmp_path, stored, torch.ones(720, 128))

    def test_spqr_with_other_tiles_is_refused(self, tmp_path):
        reason = refusal(tmp_path, *golden("spqr/handmade"), {"quant_method": "spqr", "bits": 3, "beta1": 32})

        assert "config.json declares beta1 32, but only SpQR with 16 is supported" in reason

    @pytest.mark.parametrize(("name", "value", "read"), [("norm_dim", 1, 0), ("vector_quant_dim", "in", "out")])
    def test_vptq_along_the_other_axis_is_refused(self, tmp_path, name, value, read):
        config = {"quant_method": "vptq", "config_for_layers": {"a": {name: value}}}
        reason = refusal(tmp_path, *golden("vptq/handmade"), config)

        assert f"config.json declares {name} {value}, but only VPTQ with {read} is supported" in reason

    @pytest.mark.parametrize("missing", ["a.suh", "a.svh"])
    def test_incomplete_layout_is_refused(self, tmp_path, missing):
        stored, values = golden("exl3/handmade", "b")
        stored = {name.replace("b.", "a."): t for name, t in stored.items()}
        stored.pop(missing)

        assert "a layout that this version does not support" in refusal(tmp_path, stored, values)


class TestConfiguration:
    @pytest.mark.parametrize(
        "case",
        ["exl3/handmade", "exl2/handmade", "aqlm/handmade", "vptq/handmade", "spqr/handmade", "eetq/handmade"],
    )
    def test_configuration_for_another_method_is_a_doubt(self, tmp_path, case):
        stored, values = golden(case)
        weight, read = weight_of(tmp_path, stored, values, {"quant_method": "gptq"})
        method = case.partition("/")[0]

        assert f"config.json declares quant_method gptq, but its tensors have the layout of {method}" in weight.warnings
        assert bool(((read - values).abs() <= 1e-6 * values.abs().max()).all())

    def test_aqlm_configuration_contradicted_by_shapes_is_a_doubt(self, tmp_path):
        config = {"quant_method": "aqlm", "num_codebooks": 3, "nbits_per_codebook": 8, "in_group_size": 8}
        weight, _ = weight_of(tmp_path, *golden("aqlm/handmade"), config)

        assert weight.warnings == (
            "config.json declares nbits_per_codebook 8 for 5, in_group_size 8 for 4, but the shapes decide",
        )

    @pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
    def test_bitnet_configuration_decides_on_division(self, tmp_path, linear_class):
        stored, values = golden("bitnet/handmade")
        scale = stored["a.weight_scale"]
        expected = values if linear_class == "bitlinear" else (values * scale).round() * scale
        config = {"quant_method": "bitnet", "linear_class": linear_class}
        weight, read = weight_of(tmp_path, stored, expected, config)

        assert same_bits(expected + 0.0, read)
        assert weight.warnings == ()

    def test_bitnet_configuration_contradicted_by_the_original_is_an_error(self, tmp_path):
        stored, values = golden("bitnet/handmade")
        config = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
        with open_pairing(*files(tmp_path, stored, values, config)) as plan:
            pair = next(pair for pair in plan.pairs if pair.name == "a.weight")
            read = read_whole(pair.quantized)

        assert not same_bits(values, read)  # a runtime would load the wrong values, too
        assert "BitNet, ternary codes times a.weight_scale" in pair.contradiction.prescribed
        assert "BitNet, ternary codes divided by a.weight_scale" in pair.contradiction.other
        assert 0 == pair.contradiction.other_error < pair.contradiction.prescribed_error

    @pytest.mark.parametrize(
        ("config", "doubts"),
        [
            ({"num_bits": 4}, 0),
            ({"num_bits": 2}, 1),
            ({"num_bits": 2, "module_quant_configs": {"x": {"num_bits": 8}, "^a$": {"num_bits": 4}}}, 0),
            ({"num_bits": 4, "module_quant_configs": {"a": {"num_bits": 2}}}, 1),
        ],
    )
    def test_gemma_configuration_contradicted_by_the_original_is_a_doubt(self, tmp_path, config, doubts):
        stored, values = golden("gemma_embedding/handmade")
        weight, read = weight_of(tmp_path, stored, values, {"quant_method": "gemma", **config})

        assert weight.code_bits == 4
        assert len(weight.warnings) == doubts
        assert same_bits(values, read)

    @pytest.mark.parametrize(
        ("lost", "config", "says"),
        [
            ((), {"enable_perm": False}, "config.json declares enable_perm False, but perm is stored"),
            ((), {"enable_norm": True}, "config.json declares enable_norm True, but weight_scale is missing"),
            (("perm",), {"enable_perm": True}, "config.json declares enable_perm True, but perm is missing"),
            ((), {"outlier_size": 8}, "config.json declares outlier_size 8, but outlier_indices is missing"),
            (("res_",), {"num_res_centroids": [-1, 16]}, "num_res_centroids [-1, 16], but res_centroids.weight is"),
        ],
    )
    def test_vptq_configuration_names_the_necessary_parts(self, tmp_path, lost, config, says):
        stored, values = golden("vptq/handmade")
        stored = {name: part for name, part in stored.items() if not any(word in name for word in lost)}
        reason = refusal(tmp_path, stored, values, {"quant_method": "vptq", "config_for_layers": {"a": config}})

        assert says in reason

    def test_quip_sharp_has_a_factor_for_each_fused_layer(self, tmp_path):
        stored, values = golden("quip_sharp/handmade_rvq4")
        fused = {name.replace("a.", "mlp.upgate_proj."): part for name, part in stored.items()}
        fused["mlp.upgate_proj.fuse_scales"] = torch.tensor([0.5, 3.0])
        up, gate = values.split(8)
        apart = compare(tmp_path, {"mlp.up_proj.weight": 0.5 * up, "mlp.gate_proj.weight": 3 * gate}, fused)
        (tmp_path / "fused").mkdir()
        together = compare(tmp_path / "fused", {"mlp.upgate_proj.weight": values}, fused)

        assert "pass" == apart.verdict
        assert [] == [layer for layer in apart.layers if layer.relative_error > 1e-6]
        assert "inconclusive" == together.verdict
        assert "the rows of its fuse_scales are known only" in together.reasons[0]

    def test_quip_sharp_configuration_decides_on_column_rescaling(self, tmp_path):
        reason = refusal(tmp_path, *golden("quip_sharp/handmade_rvq4"), {"rescale_WH": True})

        assert "config.json declares rescale_WH true, but scaleWH is missing" in reason

    @pytest.mark.parametrize("said", [{"quip_params": {}}, {"quip_params": {}, "quantization_config": {"bits": 4}}])
    def test_quip_sharp_configuration_may_override_the_residual_scale(self, tmp_path, said):
        stored, values = golden("quip_sharp/handmade_rvq4")
        original = store(tmp_path / "original.safetensors", {"a.weight": values})
        read = {}
        for number in (3.45, 1, 2.0, 1e9, -1):
            config = {**said, "quip_params": {"resid_scale_override": number}}
            with open_pairing(original, store(tmp_path / str(number), stored, config=config)) as plan:
                read[number] = read_whole(plan.pairs[0].quantized)

        assert same_bits(read[-1], read[3.45])
        assert torch.allclose(read[2.0], (read[1] + read[1e9]) / 2, rtol=0, atol=1e-5)
        assert not torch.allclose(read[1], read[2.0], rtol=0, atol=1e-2)

    @pytest.mark.parametrize("place", ["config_for_layers", "shared_layer_config"])
    def test_vptq_configuration_gives_an_ambiguous_vector_length(self, tmp_path, place):
        generator = torch.Generator().manual_seed(0)
        book = torch.randn(16, 4, generator=generator).half()
        indices = torch.randint(0, 8, (1, 1, 8), generator=generator)
        stored = {"a.indices": indices.to(torch.int16), "a.centroids.weight": book.view(1, -1)}
        expected = {
            v: book.view(-1, v)[indices.view(-1) % len(book.view(-1, v))].t()[:3].float().contiguous() for v in (4, 8)
        }
        config = {"quant_method": "vptq", place: {"a": {"vector_lens": [-1, 8]}}}

        assert "vectors of 4 and 8 and 16 and 32 rows fit, for 3 rows" in refusal(tmp_path, stored, expected[8])
        (tmp_path / "told").mkdir()
        assert same_bits(expected[8], weight_of(tmp_path / "told", stored, expected[8], config)[1])

    @pytest.mark.parametrize(
        ("pattern", "module", "is_match"),
        [
            ("layers\\.0\\.", "model.layers.0.up", True),
            ("layers\\.0\\.", "model.layers.10.up", False),
            ("(", "model", False),
            ("(a+)+$", "a" * 100 + "b", False),
            (".*.*.*.*x", "x", False),
        ],
    )
    def test_module_patterns_are_matched_only_where_that_is_quick(self, pattern, module, is_match):
        assert is_match == matches(pattern, module)


WITHOUT_ORIGINAL = {
    "exl3/handmade": [128, 128],
    "exl2/handmade": [8, 88],
    "aqlm/handmade": [14, 36],
    "vptq/handmade": "without an original, config.json must declare out_features and in_features",
    "quip_sharp/handmade_rvq4": [16, 128],
    "spqr/handmade": [48, 24],
    "eetq/handmade": [2, 64],
    "bitnet/handmade": [8, 40],
    "gemma_embedding/handmade": "and config.json does not declare the bits",
}


class TestWithoutOriginal:
    @pytest.mark.parametrize(("case", "expected"), WITHOUT_ORIGINAL.items())
    def test_shape_is_derived_without_an_original(self, tmp_path, case, expected):
        stored, _ = golden(case)
        weights = quanterr.inspect(store(tmp_path / "quantized.safetensors", stored)).weights
        weight = next(weight for weight in weights if weight.name == "a.weight")

        assert expected == weight.shape if isinstance(expected, list) else expected in weight.reason

    @pytest.mark.parametrize(
        ("case", "config", "expected"),
        [
            ("gemma_embedding/handmade", {"num_bits": 4}, [11, 34]),
            ("vptq/handmade", {"shared_layer_config": {"a": {"out_features": 21, "in_features": 40}}}, [21, 40]),
        ],
    )
    def test_config_json_may_give_the_shape(self, tmp_path, case, config, expected):
        stored, _ = golden(case)
        path = store(tmp_path / "quantized", stored, config={"quantization_config": config})
        weight = next(weight for weight in quanterr.inspect(path).weights if weight.name == "a.weight")

        assert expected == weight.shape


class TestDamaged:
    def test_indices_beyond_a_codebook_are_an_error(self, tmp_path):
        stored, values = golden("vptq/handmade", "c")
        stored = {name.replace("c.", "a."): t for name, t in stored.items()}
        stored["a.indices"][0, 0, 0] = 32

        with pytest.raises(CheckpointError, match=r"an index is 32, but a\.centroids\.weight .* has 32 vectors"):
            weight_of(tmp_path, stored, values)

    def test_outliers_beyond_the_columns_are_an_error(self, tmp_path):
        stored, values = golden("spqr/handmade")
        stored["a.col_vals"][3] = 24

        with pytest.raises(CheckpointError, match="an outlier in column 24"):
            weight_of(tmp_path, stored, values)


class TestWorkspaces:
    def test_workspace_reads_again_after_another_weight_overwrote_it(self, tmp_path):
        """Weights of several formats take turns, and their parts and buffers have the same names."""
        cases = ["exl2/handmade", "exl3/handmade", "aqlm/handmade", "vptq/handmade", "quip_sharp/handmade_rvq4"]
        cases += ["spqr/handmade", "eetq/handmade", "bitnet/handmade", "gemma_embedding/handmade"]
        original, quantized = {}, {}
        for n, case in enumerate(cases):
            stored, values = golden(case)
            original[f"{n}.weight"] = values
            quantized |= {f"{n}.{name.removeprefix('a.')}": tensor for name, tensor in stored.items()}
        workspace = Workspace()
        with (
            open_pairing(
                store(tmp_path / "original.safetensors", original), store(tmp_path / "quantized.safetensors", quantized)
            ) as plan,
            torch.inference_mode(),
        ):
            weights = [pair.quantized for pair in plan.pairs]
            alone = [read_whole(weight) for weight in weights]
            for row in range(2):
                for expected, weight in zip(alone, weights, strict=True):
                    chunk = Chunk(row, row + 1, 0, weight.matrix[1])

                    assert same_bits(expected[row : row + 1], weight.dequantize(chunk, workspace).weight), weight.format

    @pytest.mark.session
    def test_workspaces_share_large_tensors_and_release_them(self, tmp_path):
        path = store(tmp_path / "a.safetensors", {"a": torch.ones(3), "b": torch.ones(3)})
        made = []

        def make():
            made.append(torch.ones(3))
            return made[-1]

        with open_checkpoint(path) as checkpoint:
            workspace, other = Workspace(), Workspace()
            a, b = checkpoint.entries["a"], checkpoint.entries["b"]
            first = workspace.share("key", a, make)

            assert other.share("key", a, make) is first
            assert workspace.share("key", a, make) is first
            assert len(made) == 1
            alive = weakref.ref(first)
            del first
            made.clear()
            workspace.share("key", b, make)
            gc.collect()
            assert alive() is not None
            other.share("key", b, make)
            gc.collect()
            assert alive() is None
            assert len(made) == 1

    def test_workspaces_divide_shared_pieces(self, tmp_path):
        """The thread of the first piece waits until another thread has filled all other pieces."""
        path = store(tmp_path / "a.safetensors", {"a": torch.ones(3)})
        begun, others, by = threading.Event(), threading.Event(), {}

        def fill(tensor, piece):
            if piece == 0:
                begun.set()
                assert others.wait(10)
            tensor[piece] = piece
            by[piece] = threading.get_ident()
            if piece == 2:
                others.set()

        with open_checkpoint(path) as checkpoint, ThreadPoolExecutor(1) as pool:
            make = partial(torch.zeros, 3)
            first = pool.submit(Workspace().share, "key", checkpoint.entries["a"], make, fill, 3)
            assert begun.wait(10)
            shared = Workspace().share("key", checkpoint.entries["a"], make, fill, 3)

            assert shared is first.result()
            assert [0, 1, 2] == shared.tolist()
            assert by[0] != by[1] == by[2]

    def test_workspaces_retry_a_failed_piece(self, tmp_path):
        path = store(tmp_path / "a.safetensors", {"a": torch.ones(3)})
        filled = []

        def fill(tensor, piece):
            filled.append(piece)
            if len(filled) == 2:
                raise CheckpointError("unreadable")

        with open_checkpoint(path) as checkpoint:
            first, other = Workspace(), Workspace()
            share = ("key", checkpoint.entries["a"], partial(torch.zeros, 3), fill, 3)
            with pytest.raises(CheckpointError, match="unreadable"):
                first.share(*share)
            other.share(*share)

        assert [0, 1, 1, 2] == filled
