"""ONNX models are read as the weights that their nodes use; damaged ones are refused with the place."""

import json
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from support.onnx_bytes import FLOAT, INT32, INT64, STRING, UINT8, external, field, graph, model, node, tensor, varint
from support.stored import write

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
Q = "/model/layers.0/self_attn/q_proj/MatMul"


def save_model(path, nodes=(), tensors=()):
    path.write_bytes(model(nodes, tensors))
    return path


def floats(name, x):
    return tensor(name, FLOAT, x.shape, x.numpy().tobytes())


def names(path):
    with open_checkpoint(path) as checkpoint:
        return set(checkpoint.entries)


def list_leftovers(report):
    return {tensor.layer_name for tensor in report.not_compared}


@pytest.mark.parametrize(
    ("stored", "path", "expected"),
    [
        ("onnx::MatMul_12", Q, "model.layers.0.self_attn.q_proj.weight.onnx_inputs_first"),
        ("model.layers.0.attn.q_proj.MatMul.weight", Q, "model.layers.0.attn.q_proj.weight.onnx_inputs_first"),
        # stored in the order of the model, so no suffix is added
        ("h.0.attn.c_attn.weight", "/h.0/attn/c_attn/MatMul", "h.0.attn.c_attn.weight"),
        ("onnx::MatMul_12", "", "onnx::MatMul_12.onnx_inputs_first"),
    ],
)
def test_matrix_is_named_by_its_initializer_or_else_by_its_node(stored, path, expected, tmp_path):
    product = node("MatMul", ["x", stored], name=path)

    assert {expected} == names(save_model(tmp_path / "x.onnx", [product], [floats(stored, torch.randn(4, 3))]))


def test_matrix_is_named_by_the_scope_of_its_node(tmp_path):
    scope = field(1, "pkg.torch.onnx.name_scopes") + field(2, "['', 'model', 'model.layers.0.proj', 'linear']")
    product = node("MatMul", ["x", "val_12"], name="node_linear") + field(9, scope)
    path = save_model(tmp_path / "x.onnx", [product], [floats("val_12", torch.randn(4, 3))])

    assert {"model.layers.0.proj.weight.onnx_inputs_first"} == names(path)


def test_equal_parameters_that_are_stored_once_are_all_entries(tmp_path):
    nodes = [node("Identity", ["a.bias"], ["b.bias"]), node("Identity", ["b.bias"], ["c.bias"])]

    assert {"a.bias", "b.bias", "c.bias"} == names(
        save_model(tmp_path / "x.onnx", nodes, [floats("a.bias", torch.ones(3))])
    )


def test_two_matrices_of_a_module_have_the_names_of_their_nodes(tmp_path):
    nodes = [node("MatMul", ["x", f"onnx::MatMul_{n}"], name=f"/attn/MatMul_{n}") for n in (1, 2)]
    tensors = [floats(f"onnx::MatMul_{n}", torch.randn(4, 3)) for n in (1, 2)]
    expected = {f"attn.MatMul_{n}.onnx::MatMul_{n}.onnx_inputs_first" for n in (1, 2)}

    assert expected == names(save_model(tmp_path / "x.onnx", nodes, tensors))


def test_constants_of_the_graph_are_left_out(tmp_path):
    tensors = [
        floats("model.norm.weight", torch.randn(4)),
        floats("where", torch.randn(4)),
        floats("onnx::Add_3", torch.randn(4)),
        floats("cos_cache", torch.randn(4, 2)),
        floats("x_scale", torch.tensor(1.0)),
        tensor("axes", INT64, [1]),
        tensor("text", STRING, [1], None, field(6, b"text")),
    ]
    nodes = [node("RotaryEmbedding", ["x", "p", "cos_cache"]), node("QuantizeLinear", ["x", "x_scale"])]

    assert {"model.norm.weight"} == names(save_model(tmp_path / "x.onnx", nodes, tensors))


@pytest.mark.parametrize(
    ("operator", "place", "shape", "expected"),
    [
        ("LSTM", 1, (1, 64, 64), True),
        ("MatMul", 0, (64, 64), True),
        ("QuantizeLinear", 0, (64, 64), True),
        ("Where", 1, (64, 64), False),
        ("LSTM", 1, (8, 64), False),
        ("LSTM", 1, (4096,), False),
    ],
)
def test_matrix_of_an_unknown_operator_is_no_constant(operator, place, shape, expected, tmp_path):
    """A weight that both readers left out would never be compared."""
    inputs = ["x", "y", "z"]
    inputs[place] = "onnx::_7"
    tensors = [floats("a.bias", torch.randn(4)), floats("onnx::_7", torch.randn(shape))]

    assert expected == ("onnx::_7" in names(save_model(tmp_path / "x.onnx", [node(operator, inputs)], tensors)))


def test_weights_in_both_branches_of_a_node_are_read(tmp_path):
    product = graph([node("MatMul", ["x", "onnx::MatMul_1"], name="/proj/MatMul")])
    branches = field(5, field(1, "then_branch") + field(6, product)) + field(5, field(1, "else") + field(6, product))
    nodes = [field(4, "If") + branches, node("MatMul", ["x", "w"], name="/other/MatMul")]
    constant = field(2, "w") + field(4, "Constant") + field(5, field(1, "value") + field(5, tensor("", FLOAT, [2, 3])))
    path = save_model(tmp_path / "x.onnx", [*nodes, constant], [floats("onnx::MatMul_1", torch.randn(4, 3))])

    assert {"proj.weight.onnx_inputs_first", "other.weight.onnx_inputs_first"} == names(path)


def test_numbers_stored_one_by_one_are_those_of_their_type(tmp_path):
    numbers = {
        "a.i": (INT32, [2], (field(5, varint(7) + varint(-2)),)),
        "a.b": (UINT8, [2], (field(5, 7), field(5, 255))),
        "a.f": (FLOAT, [2], (field(4, struct.pack("<2f", 0.5, -2)),)),
        "a.e": (FLOAT, [2], tuple(varint(4 << 3 | 5) + struct.pack("<f", x) for x in (0.5, -2))),
        "a.l": (INT64, [1], (field(7, -3),)),
    }
    path = save_model(
        tmp_path / "x.onnx", [], [tensor(name, dtype, s, None, *m) for name, (dtype, s, m) in numbers.items()]
    )
    with open_checkpoint(path) as checkpoint:
        values = {name: entry.read() for name, entry in checkpoint.entries.items()}

    floating = struct.pack("<2f", 0.5, -2)
    assert values == {
        "a.i": struct.pack("<2i", 7, -2),
        "a.b": b"\x07\xff",
        "a.f": floating,
        "a.e": floating,
        "a.l": struct.pack("<q", -3),
    }


def test_external_data_are_read_from_below_the_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").write_bytes(bytes(8) + struct.pack("<4f", 1, 2, 3, 4))
    at = external(location="data/x.bin", offset=8, length=16)
    path = save_model(tmp_path / "x.onnx", [], [tensor("a.weight", FLOAT, [4], None, *at)])
    report = quanterr.compare(write(tmp_path / "x.safetensors", {"a.weight": torch.arange(1.0, 5)}), path, device="cpu")

    assert report.verdict == "pass"
    assert ["x.onnx", "x.bin"] == [file.name for file in report.quantized.files]


def test_fused_projections_are_compared_with_those_of_the_model(tmp_path):
    torch.manual_seed(0)
    rows = {"q": 64, "k": 32, "v": 32}
    original = {f"model.layers.0.self_attn.{n}_proj.weight": torch.randn(r, 64) for n, r in rows.items()}
    fused = torch.cat(list(original.values())).t().contiguous()
    original |= {"model.layers.0.self_attn.o_proj.weight": torch.randn(64, 64), "model.norm.weight": torch.ones(64)}
    of_genai = {f"model.layers.0.attn.{name}.MatMul.weight": x for name, x in (("qkv_proj", fused),)}
    of_genai["model.layers.0.attn.o_proj.MatMul.weight"] = original["model.layers.0.self_attn.o_proj.weight"].t()
    nodes = [node("MatMul", ["x", name], name="/" + name.replace(".", "/")) for name in of_genai]
    tensors = [floats(name, x.contiguous()) for name, x in of_genai.items()]
    norm = floats("model.layers.1.final_norm_layernorm.weight", original["model.norm.weight"])
    path = save_model(tmp_path / "x.onnx", nodes, [*tensors, norm])
    report = quanterr.compare(write(tmp_path / "x.safetensors", original), path, device="cpu")

    assert (set(), 5) == (list_leftovers(report), len(report.lossless))


def test_norms_of_gemma_have_one_added_by_genai(tmp_path):
    norms = {f"model.layers.0.{name}_layernorm.weight": torch.randn(64) for name in ("input", "post_attention")}
    norms["model.norm.weight"] = torch.randn(64)
    path = write(tmp_path / "x" / "model.safetensors", norms).parent
    (path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    stored = {name.replace("model.norm", "model.layers.1.final_norm_layernorm"): x + 1 for name, x in norms.items()}
    report = quanterr.compare(
        path, save_model(tmp_path / "x.onnx", [], [floats(*item) for item in stored.items()]), device="cpu"
    )

    assert (set(), 3) == (list_leftovers(report), len(report.lossless))


def test_floats_are_written_in_the_order_of_the_model(tmp_path):
    x = torch.randn(6, 6)
    path = save_model(
        tmp_path / "x.onnx", [node("MatMul", ["x", "onnx::MatMul_1"], name="/a/MatMul")], [floats("onnx::MatMul_1", x)]
    )
    quanterr.dequantize(path, tmp_path / "y.safetensors")
    report = quanterr.compare(
        write(tmp_path / "x.safetensors", {"a.weight": x.t().contiguous()}), tmp_path / "y.safetensors", device="cpu"
    )

    assert (set(), 1) == (list_leftovers(report), len(report.lossless))


def test_bias_of_32_bit_codes_is_compared(tmp_path):
    codes, scale = torch.tensor([3, -70_000, 0, 2**20], dtype=torch.int32), torch.tensor(2.0**-10)
    tensors = [
        tensor("a.bias_quantized", INT32, [4], codes.numpy().tobytes()),
        floats("a.bias_quantized_scale", scale),
        tensor("a.bias_quantized_zero_point", INT32, []),
    ]
    nodes = [node("DequantizeLinear", [f"a.bias_quantized{end}" for end in ("", "_scale", "_zero_point")], ["b"])]
    original = write(tmp_path / "x.safetensors", {"a.bias": codes * scale})
    report = quanterr.compare(original, save_model(tmp_path / "y.onnx", nodes, tensors), device="cpu")

    assert (set(), 1) == (list_leftovers(report), len(report.lossless))


def test_model_in_a_folder_is_found(tmp_path):
    save_model(tmp_path / "model.onnx", [], [floats("a.weight", torch.randn(3))])
    (tmp_path / "genai_config.json").write_text("{}")

    assert {"a.weight"} == names(tmp_path)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"K": 32, "N": 4, "bits": 4, "block_size": 32, "weight_prepacked": 1}, "prepacked for one device"),
        ({"K": 32, "N": 4, "bits": 1 << 62, "block_size": 32}, "states 4611686018427387904 bits"),
        ({"K": 32, "N": 4, "bits": 4, "block_size": 0}, "in blocks of 0 columns"),
        ({"K": 1 << 40, "N": 4, "bits": 4, "block_size": 32}, "does not hold"),
        ({"K": 32, "N": -4, "bits": 4, "block_size": 32}, "does not hold"),
    ],
)
def test_codes_that_do_not_fit_their_node_are_not_compared(attributes, says, tmp_path):
    product = node("MatMulNBits", ["x", "c", "s"], name="/a/MatMul", **attributes)
    path = save_model(tmp_path / "y.onnx", [product], [tensor("c", UINT8, [4, 1, 16]), tensor("s", FLOAT, [4, 1])])
    report = quanterr.compare(write(tmp_path / "x.safetensors", {"a.weight": torch.randn(4, 32)}), path, device="cpu")

    assert {"a.weight"} == list_leftovers(report)
    assert says in report.not_compared[0].reason


# What is refused

OUTSIDE = [
    "../secret", "/etc/passwd", "a/../../b", "C:\\x", "a\\b", "", ".", "..", "a//b", "a/", "x\0",
]  # fmt: skip
WEIGHT = floats("a.weight", torch.ones(3))


@pytest.mark.parametrize("location", OUTSIDE)
def test_external_data_outside_of_the_folder_are_refused(location, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    path = save_model(folder / "x.onnx", [], [tensor("a.weight", FLOAT, [4], None, *external(location=location))])

    with pytest.raises(
        CheckpointError, match=r"x\.onnx: a\.weight: its data are in .*, which is not a file in the fold"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 graphs"),
        (b"\x08", "byte 1: a number in the model does not end"),
        (field(1, 10), "0 graphs"),
        (model() + field(7, graph()), "2 graphs"),
        (model(), "an ONNX model without weights"),
        (field(1, 10) + b"\x3a\xff\xff\xff\xff\x7f", "should have 34359738367 bytes at byte 8"),
        (field(1, 10) + b"\x3a" + b"\xff" * 11, "does not end"),
        (field(1, 10) + b"\x3b\x00", "no field of the model begins with 59"),
        (field(1, 10) + b"\x02\x00", "no field of the model begins with 2"),
        (model([], [WEIGHT])[:-5], "truncated or damaged"),
        (model([], [WEIGHT, WEIGHT]), "a.weight appears twice"),
        (model([], [floats("", torch.ones(3))]), "has no name"),
        (model([], [tensor("a.weight", FLOAT, [3], bytes(8))]), r"F32 \[3\] needs 12 bytes, but 8 are stored"),
        (model([], [tensor("a.weight", FLOAT, [-3], bytes(8))]), "impossible shape"),
        (model([], [tensor("a.weight", FLOAT, [1 << 39, 1 << 39], bytes(8))]), "needs .* bytes, but 8 are stored"),
        (model([], [tensor("a.weight", FLOAT, [1] * 33)]), "impossible shape"),
        (model([], [tensor("a.weight", 8, [1], b"")]), "has type 8 of ONNX, which is not read"),
        (model([], [tensor("a.weight", INT64, [1], None, field(7, b"\x80"))]), "does not end"),
        (model([], [tensor("a.weight", INT32, [3], None, field(5, 1))]), "needs 12 bytes, but 4 are stored"),
        (model([], [tensor("a.weight", INT32, [3], None, field(5, bytes(5 << 20)))]), "numbers stored one by"),
        (model([], [tensor("a" * 70_000, FLOAT, [3])]), "has 70000 bytes; the limit is"),
        (model([], [tensor("a.weight", FLOAT, [4], None, *external(location="none.bin"))]), "none.bin: no such file"),
        (model([], [tensor("a.weight", FLOAT, [4], None, *external(location="x.onnx", offset=99))]), "truncated"),
        (model([], [tensor("a.weight", FLOAT, [4], None, *external(location="x.onnx", offset=-1))]), "expected"),
        (model([], [tensor("a.weight", FLOAT, [4], None, *external(location="x.onnx", length=8))]), "needs 16 bytes"),
        (field(7, graph() + field(15, b"")), "a sparse initializer"),
        (model([node("MatMulNBits", ["x", "a.weight", "made"])], [tensor("a.weight", UINT8, [1, 1, 8])]), "computes"),
    ],
)  # fmt: skip
def test_damaged_model_is_refused_with_its_place(content, says, tmp_path):
    (tmp_path / "x.onnx").write_bytes(content)
    original = write(tmp_path / "x.safetensors", {"a.weight": torch.ones(3)})

    with pytest.raises(CheckpointError, match=says):
        quanterr.compare(original, tmp_path / "x.onnx", device="cpu")


def test_graphs_in_graphs_without_end_are_refused(tmp_path):
    inner = b""
    for _ in range(40):
        inner = graph([field(4, "If") + field(5, field(1, "then_branch") + field(6, inner))])
    (tmp_path / "x.onnx").write_bytes(field(7, inner))

    with pytest.raises(CheckpointError, match=r"x\.onnx: byte \d+: more than 16 graphs in each other"):
        open_checkpoint(tmp_path / "x.onnx")


def test_tensors_that_follow_from_each_other_in_a_circle_end(tmp_path):
    nodes = [node("Cast", ["b"], ["a"]), node("Cast", ["a"], ["b"]), node("DequantizeLinear", ["a", "s"], ["c"])]

    assert {"a.weight"} == names(save_model(tmp_path / "x.onnx", nodes, [WEIGHT]))


@pytest.mark.parametrize("case", ["nbits", "linear"])
def test_changed_bytes_never_end_in_another_error(case, tmp_path):
    """The fuzzer changes many more bytes than this."""
    given = (GOLDEN / f"onnx_{case}" / "onnxruntime.onnx").read_bytes()
    random, path = Random(7), tmp_path / "y.onnx"
    for _ in range(25):
        raw = bytearray(given)
        for _ in range(random.randint(1, 3)):
            raw[random.randrange(len(raw))] = random.randrange(256)
        path.write_bytes(raw[: random.choice([len(raw), random.randrange(len(raw))])])
        try:
            with open_checkpoint(path) as checkpoint:
                assert all(len(entry.read()) == entry.nbytes for entry in checkpoint.entries.values())
                json.dumps(checkpoint.metadata)
        except CheckpointError:
            pass
