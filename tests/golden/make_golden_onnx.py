"""Makes the golden files of ONNX: models that onnxruntime's quantizers write, and the values that onnxruntime decodes.

    python tests/golden/make_golden_onnx.py        needs onnx and onnxruntime (made with 1.23.2 and 1.32.0)

A weight's values are what the node itself returns for the rows of an identity matrix, or for all indices.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import _pybind_state
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from safetensors.numpy import save_file

HERE = Path(__file__).parent
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
RANDOM = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    """Return random weights."""
    return (0.1 * RANDOM.standard_normal(shape)).astype(dtype)


def model_of(nodes, tensors, inputs=(), outputs=()):
    """Return a model with these nodes and initializers."""
    inputs = [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in inputs]
    outputs = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10)


def linear_model(weights, operator="MatMul"):
    """Return a model that multiplies by each of these weights, [in, out], in nodes with the names of an exporter."""
    nodes, tensors, inputs, outputs = [], [], [], []
    for n, (path, weight) in enumerate(weights.items()):
        dtype = helper.np_dtype_to_tensor_dtype(weight.dtype)
        tensors.append(numpy_helper.from_array(weight, f"onnx::MatMul_{n}"))
        nodes.append(helper.make_node(operator, [f"x{n}", f"onnx::MatMul_{n}"], [f"y{n}"], name=f"/{path}/MatMul"))
        inputs.append((f"x{n}", dtype, ["n", weight.shape[0]]))
        outputs.append((f"y{n}", dtype))
    return model_of(nodes, tensors, inputs, outputs)


def run(nodes, tensors, output, feeds=None, dtype=TensorProto.FLOAT):
    """Return what nodes compute."""
    inputs = [(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in (feeds or {}).items()]
    model = model_of(nodes, tensors, inputs, [(output, dtype)])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run([output], feeds or {})[0]


def tensors_of(model, names):
    """Return initializers by their names."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    return [stored[name] for name in names if name]


def decode(model, node):
    """Return the weight, [out, in], that a node of a model multiplies by."""
    if node.op_type == "GatherBlockQuantized":
        data = tensors_of(model, node.input[:1])[0]
        feeds = {node.input[1]: np.arange(data.dims[0])}
        return run([node], tensors_of(model, [node.input[0], *node.input[2:]]), node.output[0], feeds)
    kind = helper.get_node_attr_value(node, "K") if node.op_type == "MatMulNBits" else None
    tensors = tensors_of(model, node.input[1:])
    rows = kind or tensors[0].dims[0]
    x = np.eye(rows, dtype=np.float32 if node.op_type == "MatMulNBits" else numpy_helper.to_array(tensors[0]).dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    return run([node], tensors, node.output[0], {node.input[0]: x}, kind).astype(np.float32).T.copy()


def dequantize(tensors, **attributes):
    """Return what DequantizeLinear returns."""
    node = helper.make_node("DequantizeLinear", [tensor.name for tensor in tensors], ["y"], **attributes)
    return run([node], tensors, "y")


def quantize(weights, bits, block, symmetric, layout=QuantFormat.QOperator, operators=("MatMul",), model=None):
    """Return a model as MatMulNBitsQuantizer writes it."""
    config = DefaultWeightOnlyQuantConfig(
        block_size=block,
        is_symmetric=symmetric,
        bits=bits,
        quant_format=layout,
        op_types_to_quantize=operators,
        quant_axes=(("MatMul", 0), ("Gather", 1)),
    )
    quantizer = MatMulNBitsQuantizer(model or linear_model(weights), algo_config=config)
    quantizer.process()
    return quantizer.model.model


def merge(models):
    """Return one model with the nodes and initializers of several, whose anonymous names are made unique."""
    nodes, tensors = [], []
    for n, model in enumerate(models):
        for tensor in model.graph.initializer:
            tensor.name = tensor.name.replace("onnx::MatMul_", f"onnx::MatMul_{n}0")
            tensors.append(tensor)
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [name.replace("onnx::MatMul_", f"onnx::MatMul_{n}0") for name in names]
            nodes.append(node)
    return model_of(nodes, tensors)


def write(folder, model, expected, how):
    """Write a model and its values."""
    path = HERE / folder / "onnxruntime.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model.SerializeToString())
    origin = {"producer": "onnxruntime 1.32.0", "how": f"tests/golden/make_golden_onnx.py: {how}"}
    origin["zeros"] = "sums of MatMul have no negative zero; nor has any value here"
    values = {name: np.ascontiguousarray(x) + np.float32(0) for name, x in expected.items()}
    save_file(values, path.with_suffix(".expected.safetensors"), {"origin": json.dumps(origin)})


def name_of(node):
    return node.name.strip("/").replace("/", ".").rpartition(".")[0] + ".weight"


def make_nbits():
    """Write weights of MatMulNBits, GatherBlockQuantized and QMoE."""
    models, expected = [], {}
    for name, bits, block, symmetric, cols in (
        ("four", 4, 16, True, 32),
        ("ragged", 4, 16, False, 40),
        ("eight", 8, 16, False, 32),
        ("two", 2, 16, False, 80),
    ):
        models.append(quantize({f"model/{name}": normal(cols, 6)}, bits, block, symmetric))
    codes = RANDOM.integers(0, 256, (6, 2, 8), np.uint8)
    scales = normal(6, 2).astype(np.float16).astype(np.float32)  # so that no order of operations rounds
    zeros = 8 + RANDOM.integers(-8, 8, (6, 2)).astype(np.float32) / 2
    names = ["onnx::MatMul_1", "onnx::MatMul_2", "onnx::MatMul_3"]
    tensors = [numpy_helper.from_array(x, name) for x, name in zip((codes, scales, zeros), names, strict=True)]
    attributes = {"domain": "com.microsoft", "K": 32, "N": 6, "bits": 4, "block_size": 16}
    nodes = [helper.make_node("MatMulNBits", ["x", *names], ["y"], "/model/fractions/MatMul_Q4", **attributes)]
    models.append(model_of(nodes, tensors))
    for symmetric in (True, False):
        name = "embed" if symmetric else "embed_zeros"
        node = helper.make_node("Gather", [f"{name}.weight", "i"], ["y"], f"/{name}/Gather")
        table = numpy_helper.from_array(normal(6, 32), f"{name}.weight")
        gather = model_of([node], [table], [("i", TensorProto.INT64, ["n"])], [("y", TensorProto.FLOAT)])
        models.append(quantize({}, 4, 16, symmetric, operators=("Gather",), model=gather))
    tensors = [
        numpy_helper.from_array(RANDOM.integers(0, 256, (6, 16), np.uint8), "bytes.weight_Q4"),
        numpy_helper.from_array(normal(6, 2), "bytes.weight_scales"),
    ]
    names = [tensors[0].name, "i", tensors[1].name]
    attributes = {"domain": "com.microsoft", "bits": 4, "block_size": 16}
    models.append(model_of([helper.make_node("GatherBlockQuantized", names, ["y"], "/bytes/G", **attributes)], tensors))
    for model in models:
        for node in model.graph.node:
            expected[name_of(node)] = decode(model, node)
    experts, values = make_experts()
    write("onnx_nbits", merge([*models, experts]), expected | values, "MatMulNBitsQuantizer; experts: quantize_matmul")


def make_experts():
    """Return a QMoE with the codes of quantize_matmul_4bits, and its experts as MatMulNBits decodes them."""
    tensors, expected, names = [], {}, ["x", "p"]
    for name, rows, cols in (("gate_up_proj", 4, 32), ("down_proj", 3, 64)):
        codes, scales = np.zeros((2, rows, cols // 32, 16), np.uint8), np.zeros((2, rows, cols // 32), np.float32)
        zeros, values = np.zeros((2, rows, -(-cols // 64)), np.uint8), []
        for e in range(2):
            _pybind_state.quantize_matmul_4bits(
                codes[e], normal(cols, rows), scales[e], zeros[e], 32, rows, cols, False
            )
            parts = [numpy_helper.from_array(x[e], f"p{k}") for k, x in enumerate((codes, scales, zeros))]
            attributes = {"domain": "com.microsoft", "K": cols, "N": rows, "bits": 4, "block_size": 32}
            node = helper.make_node("MatMulNBits", ["x", "p0", "p1", "p2"], ["y"], **attributes)
            values.append(run([node], parts, "y", {"x": np.eye(cols, dtype=np.float32)}).T)
        prefix = f"model.layers.0.moe.experts.{name}"
        expected[f"{prefix}.weight"] = np.stack(values)
        parts = codes.reshape(2, rows, cols // 2), scales, zeros
        for end, x in zip(("qweight", "scales", "zero_points"), parts, strict=True):
            tensors.append(numpy_helper.from_array(x, f"{prefix}.{end}"))
        names += [f"{prefix}.qweight", f"{prefix}.scales", ""]
    names += ["", "", "", *(f"model.layers.0.moe.experts.{name}.zero_points" for name in ("gate_up_proj", "down_proj"))]
    attributes = {"domain": "com.microsoft", "expert_weight_bits": 4, "block_size": 32, "k": 1}
    return model_of(
        [helper.make_node("QMoE", names, ["y"], "/model/layers.0/moe/QMoE", **attributes)], tensors
    ), expected


def make_linear():
    """Write weights of DequantizeLinear and of the dynamic quantizer."""
    expected, nodes, tensors = {}, [], []
    codes = RANDOM.integers(-128, 128, (16, 6)).astype(np.int8)
    kinds = {
        "tensor": (codes, normal(), np.int8(3), {}),
        "outputs": (codes, normal(6), None, {"axis": 1}),
        "inputs": (codes.view(np.uint8), normal(16), np.arange(16, dtype=np.uint8), {"axis": 0}),
        "blocks": (codes.view(np.uint8), normal(2, 6), None, {"axis": 0, "block_size": 8}),
        "across": (
            codes.view(np.uint8),
            normal(16, 3),
            np.arange(48, dtype=np.uint8).reshape(16, 3),
            {"axis": 1, "block_size": 2},
        ),
        "float8": (codes.view(np.uint8) & 0xF7, normal(6), None, {"axis": 1}),
    }
    for name, (x, scale, zero, attributes) in kinds.items():
        parts = [numpy_helper.from_array(np.asarray(x), f"onnx::{name}_quantized")]
        if name == "float8":
            raw = x.tobytes()
            parts = [helper.make_tensor(f"onnx::{name}_quantized", TensorProto.FLOAT8E4M3FN, x.shape, raw, raw=True)]
        parts.append(numpy_helper.from_array(np.asarray(scale), f"onnx::{name}_scale"))
        parts += [numpy_helper.from_array(np.asarray(zero), f"onnx::{name}_zero_point")] if zero is not None else []
        expected[f"model.{name}.weight"] = dequantize(parts, **attributes).T
        names = [part.name for part in parts]
        nodes.append(helper.make_node("DequantizeLinear", names, [f"{name}_dq"], f"/model/{name}/DQ", **attributes))
        nodes.append(helper.make_node("MatMul", ["x", f"{name}_dq"], ["y"], f"/model/{name}/MatMul"))
        tensors += parts
    models = [model_of(nodes, tensors)]
    for name, symmetric in (("int4", True), ("uint4", False)):
        model = quantize({f"model/{name}": normal(32, 6)}, 4, 16, symmetric, QuantFormat.QDQ)
        node = next(node for node in model.graph.node if node.op_type == "DequantizeLinear")
        expected[f"model.{name}.weight"] = dequantize(tensors_of(model, node.input), axis=0, block_size=16).T
        models.append(model)
    for per_channel in (False, True):
        dynamic, values = make_dynamic("rows" if per_channel else "one", per_channel)
        models.append(dynamic)
        expected |= values
    write("onnx_linear", merge(models), expected, "DequantizeLinear, MatMulNBitsQuantizer (QDQ), quantize_dynamic")


def make_dynamic(prefix, per_channel):
    """Return a model as quantize_dynamic writes it, and its weights as DequantizeLinear decodes them."""
    weights = {
        f"{prefix}.embed.weight": normal(8, 12),
        "onnx::MatMul_1": normal(12, 10),
        f"{prefix}.head.weight": normal(6, 10),
        f"{prefix}.square.weight": normal(6, 6),
    }
    table, matrix, head, square = weights
    nodes = [
        helper.make_node("Gather", [table, "i"], ["e"], f"/{prefix}/embed/Gather"),
        helper.make_node("MatMul", ["e", matrix], ["h"], f"/{prefix}/dense/MatMul"),
        helper.make_node("Gemm", ["h", head], ["z"], f"/{prefix}/head/Gemm", transB=1),
        helper.make_node("Gemm", ["z", square], ["y"], f"/{prefix}/square/Gemm", transB=1),
    ]
    tensors = [numpy_helper.from_array(x, name) for name, x in weights.items()]
    given = model_of(nodes, tensors, [("i", TensorProto.INT64, [4])], [("y", TensorProto.FLOAT)])
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(given, f"{folder}/x.onnx")
        quant_type = QuantType.QInt8 if per_channel else QuantType.QUInt8
        quantize_dynamic(f"{folder}/x.onnx", f"{folder}/y.onnx", per_channel=per_channel, weight_type=quant_type)
        model = onnx.load(f"{folder}/y.onnx")
    expected, stored = {}, [tensor.name for tensor in model.graph.initializer]
    for name in stored:
        if not name.endswith("_quantized"):
            continue
        base = name.removesuffix("_quantized")
        parts = tensors_of(model, [name, f"{base}_scale", f"{base}_zero_point"])
        is_turned = name.startswith("onnx::") or "_Transposed" in name
        values = dequantize(parts, axis=1 if is_turned else 0)
        weight_name = f"{prefix}.dense.weight" if name.startswith("onnx::") else base.removesuffix("_Transposed")
        expected[weight_name] = values.T if is_turned else values
    return model, expected


def make_float():
    """Write floats that MatMul stores as [in, out]."""
    model = linear_model({"model/half": normal(16, 6, dtype=np.float16), "model/whole": normal(12, 6)})
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "model.half.MatMul.weight"
    write("onnx_float", model, {name_of(node): decode(model, node) for node in model.graph.node}, "MatMul")


if __name__ == "__main__":
    make_nbits()
    make_linear()
    make_float()
