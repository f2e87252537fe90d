"""Makes the golden folders of SDNQ, AMD Quark, ModelOpt and ModelSlim by the programs themselves.

    python tests/golden/make_producer_golden.py sdnq|quark|modelopt|modelslim|sinq
    python tests/golden/make_producer_golden.py w4afp8|paroquant|qqq FILES

Needs that program (sdnq, sinq, msmodelslim, or amd-quark or nvidia-modelopt and transformers) beside torch. Each
quantizes a small model in float32, writes it as its users do, and dequantizes it. No number comes from quanterr.
W4AFP8, ParoQuant and QQQ need files of programs that do not run without a GPU: see their functions.
"""

import ast
import importlib.metadata
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Optional

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
ROWS, MORE_ROWS, COLS = 4, 8, 128  # more for branches of rank 4


def put(case: str, stored: dict[str, Tensor], config: dict | None, values: dict[str, Tensor], origin: dict) -> None:
    """Write one case: a folder, or a single file where there is no configuration."""
    path = HERE / case
    path.parent.mkdir(exist_ok=True)
    if config is None:
        save_file(stored, path)
    else:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        save_file(stored, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1))
    save_file(values, path.with_suffix(".expected.safetensors"), {"origin": json.dumps(origin)})


def sdnq() -> None:
    """Write every coding of up to 8 bits, with groups, layouts of matrix products, branches and rotations."""
    from sdnq import SDNQConfig
    from sdnq.dequantizer import dequantize_sdnq_module
    from sdnq.quantizer import sdnq_post_load_quant

    version = importlib.metadata.version("sdnq")

    def quantize_sdnq(layers: dict[str, dict], rows: int, **settings: object) -> tuple[dict, dict, dict]:
        torch.manual_seed(0)
        model = nn.Module()
        for name in layers:
            setattr(model, name, nn.Linear(COLS, rows, bias=False))
        common = {"minimum_allowed_numel": 0, "minimum_allowed_channel_size": 0, "torch_dtype": torch.float32}
        config = SDNQConfig(
            modules_quant_config=layers, minimum_allowed_numel=0, minimum_allowed_channel_size=0, **settings
        )
        model = sdnq_post_load_quant(model, quantization_config=config, **common)
        stored = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
        plain = dequantize_sdnq_module(model).state_dict()
        return stored, config.to_dict(), {name: tensor.float().contiguous().clone() for name, tensor in plain.items()}

    def case(name: str, layers: dict[str, dict], single: bool = False, rows: int = ROWS, **settings: object) -> None:
        stored, config, values = quantize_sdnq(layers, rows, **settings)
        how = (
            f"sdnq_post_load_quant in float32, {len(layers)} layers {rows} × {COLS}, {settings}; dequantize_sdnq_module"
        )
        origin = {"producer": f"sdnq {version}", "how": how, "tolerance": 1e-6}
        if also := {f"{layer}.weight": row for layer in layers if (row := _plain(layer, stored, name, rows))}:
            origin["also"] = also
        put(f"sdnq/{name}", stored, None if single else config, values, origin)

    of = lambda names, **more: {f"{n}".replace(".", "_"): {"weights_dtype": n, **more} for n in names}  # noqa: E731
    integers = [f"{letter}int{bits}" for bits in (2, 3, 4, 5, 6, 7) for letter in ("", "u")] + ["uint8"]
    small = [f"float{1 + e + m}_e{e}m{m}fn" for e in (1, 2, 3, 4, 5) for m in range(7) if 2 <= 1 + e + m <= 7]
    eights = ["float8_e1m6fn", "float8_e2m5fn", "float8_e3m4fn", "float8_e4m3fn_sdnq", "float8_e5m2fn"]
    unsigned = [f"float{e + m}_e{e}m{m}fnu" for e in (1, 2, 3, 4, 5) for m in range(7) if 2 <= e + m <= 8]
    case("integers", of(integers))
    case("integers_alone.safetensors", of(integers), single=True)
    (HERE / "sdnq/integers_alone.expected.safetensors").unlink()  # the case before has these values
    case("floats", of([*small, *eights]))
    case("floats_unsigned", of(unsigned))
    case("short_names", of(["fp2", "fp3", "fp4", "fp5", "fp6", "fp7", "ufp4", "ufp6", "ufp8"]))
    plain = {
        "int8_rows": {"weights_dtype": "int8"},
        "e4m3_rows": {"weights_dtype": "float8_e4m3fn"},
        "e5m2_rows": {"weights_dtype": "float8_e5m2"},
        "int8_tensor": {"weights_dtype": "int8", "group_size": -2},
    }
    groups = {f"g{n}_{d}": {"weights_dtype": d, "group_size": n} for n in (32, 48) for d in ("int8", "uint8", "uint4")}
    whole = {f"t_{d}": {"weights_dtype": d, "group_size": -2} for d in ("uint4", "uint8")}
    case("groups", plain | groups | whole | {"g64_e4m3": {"weights_dtype": "float8_e4m3fn", "group_size": 64}})
    product = {"use_quantized_matmul": True}
    products = {f"mm_{d}": {"weights_dtype": d, **product} for d in ("int8", "uint8", "float8_e4m3fn")}
    branch = {"use_svd": True, "svd_rank": 4}
    branches = {f"svd_{d}": {"weights_dtype": d, **branch} for d in ("int8", "uint4", "float4_e2m1fn")}
    both = {f"mm_svd_{d}": {"weights_dtype": d, **product, **branch} for d in ("int8", "float8_e4m3fn")}
    case("products", products | branches | both, rows=MORE_ROWS)
    case("products_alone.safetensors", products | branches, single=True, rows=MORE_ROWS)
    turned = {"use_hadamard": True}
    rotated = {f"h{n}_{d}": {"weights_dtype": d, "hadamard_group_size": n} for n in (32, 64) for d in ("int4", "int8")}
    table = {"use_codebook": True}
    tables = {f"rows_{d}": {"weights_dtype": d, **table} for d in ("uint2", "uint4", "uint6")}
    tables |= {f"t_{d}": {"weights_dtype": d, "group_size": -2, **table} for d in ("uint4", "uint8")}
    tables["g32"] = {"weights_dtype": "uint5", "group_size": 32, **table}
    tables["svd"] = {"weights_dtype": "uint4", **branch, **table}
    case("codebooks", tables, rows=MORE_ROWS)
    case("codebooks_rotated", {"h": {"weights_dtype": "uint4", **table}}, **turned)
    case("rotated", rotated | {"mm": {"weights_dtype": "int8", **product}}, rows=MORE_ROWS, **turned)


def _plain(layer: str, stored: dict[str, Tensor], case: str, rows: int) -> str | None:
    """Return the format that reads codes of 8 bits with a scale for each row or for all."""
    codes, scale = stored[f"{layer}.weight"], stored[f"{layer}.scale"]
    dtype = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}.get(codes.dtype)
    if dtype is None or f"{layer}.svd_up" in stored or case == "rotated":
        return None
    return {(rows, 1): f"{dtype}_row", (1, 1): f"{dtype}_tensor"}.get(tuple(scale.shape))


def quark() -> None:
    """Write FP4 with E4M3 and E5M3 scales, MXFP6 and INT4 of FP8, two layers of a small Llama each."""
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
    from transformers import LlamaConfig, LlamaForCausalLM

    version = importlib.metadata.version("amd-quark")
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
    )
    kept = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")
    schemes = {
        "quark_fp4/amdfp4": "amdfp4",
        "quark_fp4/amdfp4_g32": "amdfp4_g32",
        "nvfp4/quark_nvfp4": "nvfp4",
        "mxfp6_e2m3/quark": "mxfp6_e2m3",
        "mxfp6_e3m2/quark": "mxfp6_e3m2",
        "quark_int4_fp8/quark": "int4_fp8",
    }
    for case, scheme in schemes.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(config).save_pretrained(f"{folder}/x")
            model = LlamaForCausalLM.from_pretrained(f"{folder}/x", dtype=torch.float32)
            recipe = LLMTemplate.get("llama").get_config(scheme=scheme, exclude_layers=["lm_head"])
            quantizer = ModelQuantizer(recipe)
            model = quantizer.freeze(quantizer.quantize_model(model, [torch.arange(32).view(1, -1)]))
            export_safetensors(model, f"{folder}/y")
            fresh = LlamaForCausalLM.from_pretrained(f"{folder}/x", dtype=torch.float32)
            modules = dict(import_model_from_safetensors(fresh, f"{folder}/y").named_modules())
            values = {}
            for name in kept:
                module = modules[name.removesuffix(".weight")]
                values[name] = module.weight_quantizer(module.weight).detach().float().contiguous().clone()
            stored = load_file(f"{folder}/y/model.safetensors")
            settings = json.loads(Path(f"{folder}/y/config.json").read_text())["quantization_config"]
        layers = tuple(name.removesuffix("weight") for name in kept)
        stored = {name: tensor for name, tensor in stored.items() if name.startswith(layers)}
        how = f"ModelQuantizer with {scheme}, export_safetensors; read by import_model_from_safetensors, in float32"
        put(case, stored, settings, values, {"producer": f"amd-quark {version}", "how": how})


def modelopt() -> None:
    """Write INT8 with scaled inputs: two layers of a small Llama."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    version = importlib.metadata.version("nvidia-modelopt")
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, architectures=["LlamaForCausalLM"]))
    tokens = torch.arange(32).view(1, -1)
    model = mtq.quantize(model, mtq.INT8_SMOOTHQUANT_CFG, lambda m: m(tokens))
    kept = ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj")
    values = {}
    for name, module in model.named_modules():
        if name in kept:
            factors = module.input_quantizer._pre_quant_scale.detach()
            values[f"{name}.weight"] = (module.weight_quantizer(module.weight).detach() * factors).contiguous()
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        stored = load_file(f"{folder}/model.safetensors")
        settings = json.loads(Path(f"{folder}/config.json").read_text())["quantization_config"]
    stored = {name: tensor for name, tensor in stored.items() if name.startswith(kept)}
    how = "INT8_SMOOTHQUANT_CFG, export_hf_checkpoint; weight_quantizer(weight) times _pre_quant_scale, in float32"
    origin = {"producer": f"nvidia-modelopt {version}", "how": how, "tolerance": 3e-7}
    put("int8_row/modelopt_smoothquant", stored, settings, values, origin)


def modelslim() -> None:
    """Write every type of Ascend's files. Rows have 64 columns, as the saver cuts them into 16 parts for its biases."""
    from unittest.mock import patch

    import msmodelslim.ir as qir
    from msmodelslim.core.quant_service.modelslim_v1.save.ascendv1 import AscendV1Config, AscendV1Saver
    from msmodelslim.core.quant_service.modelslim_v1.save.interface import AscendV1GlobalModelDtypeInterface
    from msmodelslim.core.quant_service.modelslim_v1.save.utils.deqscale import deqscale2int64
    from msmodelslim.core.quantizer.base import QConfig
    from msmodelslim.core.quantizer.linear import LinearQConfig, LinearQuantizer
    from msmodelslim.ir.api import dequantize
    from msmodelslim.ir.qal import QParam, QScheme, QStorage
    from msmodelslim.model import IModel
    from msmodelslim.pytorch.llm_ptq.llm_ptq_tools.calibrator.calibrator_classes import fake_quantize
    from msmodelslim.pytorch.llm_ptq.llm_ptq_tools.save import complex_quantifier as first

    class Source(IModel, AscendV1GlobalModelDtypeInterface):
        """The two things that the saver asks a model for: the folder with its configuration, and its dtype."""

        bfloat16 = False

        def __init__(self, folder: str) -> None:
            self.folder = Path(folder)

        model_type = "llama"
        model_path = property(lambda self: self.folder)
        trust_remote_code = False

        def get_global_model_torch_dtype(self) -> torch.dtype:
            return torch.bfloat16 if self.bfloat16 else torch.float16

    def deploy(inputs: QScheme, weights: QScheme, shape: tuple[int, int], bias: bool, **ext: object) -> nn.Module:
        def config(scheme: QScheme, method: str, ext: dict) -> QConfig:
            return QConfig(dtype=scheme.dtype, scope=scheme.scope, symmetric=scheme.symmetric, method=method, ext=ext)

        method = "dualscale" if weights == qir.mxfp4_dual_scale_sym else "minmax"
        of_weights = "gptq" if not weights.symmetric or "group_size" in ext else method
        if unknown := inputs == qir.int4_per_token_sym:  # only the layer knows it: it rounds its inputs itself
            inputs = qir.float_per_tensor_sym
        of_inputs = "none" if inputs == qir.float_per_tensor_sym else method
        linear = nn.Linear(shape[1], shape[0], bias=bias)
        layer = LinearQuantizer(
            LinearQConfig(act=config(inputs, of_inputs, ext), weight=config(weights, of_weights, ext))
        )
        layer.setup(linear)
        if "dual_block_size" not in ext:  # its forward fails; it needs no samples of inputs
            layer(torch.randn(4, shape[1]) + 0.5)
        if not unknown:
            return layer.deploy()
        quantizer = layer.weight_quantizer
        inputs = QParam(scheme=qir.int4_per_token_sym)
        return qir.AutoFakeQuantLinear.create(inputs, quantizer.get_q_param(), quantizer.get_q_storage(), layer.bias)

    def value_of(module: nn.Module) -> Tensor:
        """Return the weight that the producer's own layer multiplies by, with codes as they are saved."""
        if type(module) is qir.W8A8StaticFakeQuantLinear and not Source.bfloat16:
            reader = fake_quantize.w8a8_fakequantizer.FakeLinearQuantizerOfW8A8()
            deq_scale = deqscale2int64(module.input_scale * module.weight_scale)
            stored = {"quant_weight": module.weight.data, "deq_scale": deq_scale}
            reader.set_param(nn.Linear(1, 1), input_scale=module.input_scale.data, **stored)
            return reader.weight
        if isinstance(module, qir.WFP8AFP8DynamicPerChannelFakeQuantLinear):  # only the saver rounds
            module.weight.data = module.weight.data.to(torch.float8_e4m3fn).float()
        if hasattr(module, "group_size"):  # the layers take groups of rows for groups of columns, but for one
            ext = {"scale": module.weight_scale, "offset": module.weight_offset, "group_size": module.group_size}
            codes = QStorage(module.w_scheme.dtype, module.weight).T
            return dequantize(codes, QParam(scheme=module.w_scheme, ext=ext)).T.value.contiguous()
        with patch.object(nn.functional, "linear", wraps=nn.functional.linear) as product:
            module(torch.randn(4, module.weight.shape[1]))
        return product.call_args.args[1].detach().float().contiguous().clone()

    q, dual = qir, {"axes": -1, "dual_block_size": 512}
    groups = {"group_size": 16}
    tokens = q.int8_per_token_sym, q.int4_per_token_sym
    cases = {
        "modelslim_int/static": {"w8a8": (q.int8_per_tensor_asym, q.int8_per_channel_sym, (8, 64), True, {})},
        "modelslim_int/static_bfloat16": {"w8a8": (q.int8_per_tensor_asym, q.int8_per_channel_sym, (8, 64), True, {})},
        "modelslim_int/modelslim": {
            "w8a8_mix": (q.int8_pd_mix_asym, q.int8_per_channel_sym, (8, 64), False, {}),
            "w8a8_dynamic": (tokens[0], q.int8_per_channel_sym, (8, 64), True, {}),
            "w8a8_dynamic_groups": (tokens[0], q.int8_per_group_sym, (8, 64), False, groups),
            "w8a16": (q.float_per_tensor_sym, q.int8_per_channel_asym, (8, 64), False, {}),
            "w4a4_dynamic": (tokens[1], q.int4_per_channel_sym, (8, 64), False, {}),
            "w4a4_dynamic_offsets": (tokens[1], q.int4_per_channel_asym, (8, 64), False, {}),
            "w4a4_dynamic_groups": (tokens[1], q.int4_per_group_asym, (8, 64), False, groups),
        },
        "modelslim_int4/modelslim": {
            "up_proj": (tokens[0], q.int4_per_channel_sym, (8, 64), False, {}),
            "down_proj": (tokens[0], q.int4_per_channel_sym, (8, 64), True, {}),
        },
        "modelslim_fp8/modelslim": {"fp8": (q.fp8_e4m3_per_token_sym, q.fp8_e4m3_per_channel_sym, (8, 64), True, {})},
        "modelslim_mxfp4_dual/modelslim": {
            "dual": (q.mxfp4_dual_scale_sym, q.mxfp4_dual_scale_sym, (3, 1024), True, dual)
        },
        "mxfp8/modelslim": {"w8a8": (q.mxfp8_per_block_sym, q.mxfp8_per_block_sym, (8, 64), True, {"axes": -1})},
        "mxfp4/modelslim": {
            "w4a8": (q.mxfp8_per_block_sym, q.mxfp4_per_block_sym, (8, 64), False, {"axes": -1}),
            "w4a4": (q.mxfp4_per_block_sym, q.mxfp4_per_block_sym, (8, 64), False, {"axes": -1}),
        },
    }
    version = importlib.metadata.version("msmodelslim")
    torch.manual_seed(0)
    weight, name = torch.randn(8, 64), "down_proj.weight"
    scales = [weight.abs().amax(1, keepdim=True) / 127]
    eights = first.fake_quantize_save(weight, scales[0], torch.zeros(8, 1), bit=8)[0]
    scales.append(eights.reshape(-1, 16).abs().amax(1, keepdim=True) / 7)
    fours = first.fake_quantize_save(eights, scales[1], torch.zeros(32, 1), bit=4, group_size=16)[0].to(torch.int8)
    value = (fours.reshape(-1, 16) * scales[1]).reshape(8, 64) * scales[0]
    stored = {name: first._w4a8_pack_int4(fours), f"{name}_scale": scales[0]}
    stored |= {f"{name}_scale_second": scales[1].view(8, 4), f"{name}_offset": torch.zeros(8, 1)}
    stored |= {f"{name}_offset_second": torch.zeros(8, 4)}
    stored["down_proj.scale_bias"] = first.process_scale("down_proj", value, 16)
    how = "fake_quantize_save twice, _w4a8_pack_int4, process_scale; the product before it, in float32"
    put("modelslim_int4/stages", stored, {}, {name: value}, {"producer": f"msmodelslim {version}", "how": how})
    described = dict.fromkeys(stored, "W4A8_DYNAMIC") | {"model_quant_type": "W4A8_DYNAMIC", "group_size": 16}
    (HERE / "modelslim_int4/stages/quant_model_description.json").write_text(json.dumps(described))
    for case, layers in cases.items():
        torch.manual_seed(0)
        Source.bfloat16 = case.endswith("bfloat16")
        model = nn.Module()
        for name, (inputs, weights, shape, bias, ext) in layers.items():
            setattr(model, name, deploy(inputs, weights, shape, bias, **ext))
        values = {f"{name}.weight": value_of(module) for name, module in model.named_children()}
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as source:
            saver = AscendV1Saver(model, AscendV1Config(save_directory=folder, part_file_size=0), Source(source))
            saver.post_run()
            stored = load_file(f"{folder}/quant_model_weights.safetensors")
            description = Path(f"{folder}/quant_model_description.json").read_text()
        stored = {name: tensor for name, tensor in stored.items() if not name.endswith(".bias")}
        how = f"LinearQuantizer, AscendV1Saver: {', '.join(layers)}; the weights by which the quantized layers multiply"
        origin = {"producer": f"msmodelslim {version}", "how": how}
        if Source.bfloat16:  # a product, a quotient and another product, each rounded to float32
            origin["tolerance"] = 3 * 2**-24
        put(case, stored, {}, values, origin)
        (HERE / case / "quant_model_description.json").write_text(description)


def load(path: str, *names: str, **given: object) -> dict:
    """Return constants, functions and classes of a file whose imports are missing here."""
    tree = ast.parse(Path(path).read_text())
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple))
    ]
    exec(compile(tree, path, "exec"), namespace := {"torch": torch, **given})
    return namespace


def w4afp8(quantizer: str, packer: str) -> None:
    """Write rows of two experts with TensorRT-LLM's quantizer and the packing of SGLang's tests."""

    quantize = load(quantizer, "quantize_fp8_block_scale_to_int4")["quantize_fp8_block_scale_to_int4"]
    pack = load(packer, "pack_int4_values_to_int8")["pack_int4_values_to_int8"]
    stored, values = {}, {}
    for n in range(2):
        torch.manual_seed(n)
        codes, scale = quantize((100 * torch.randn(128, 384)).to(torch.float8_e4m3fn), torch.rand(1, 3) / 1000)
        name, codes, scale = f"mlp.experts.{n}.down_proj.weight", codes[:6], scale[:6].contiguous()
        stored |= {name: pack(codes), f"{name}_scale_inv": scale}
        values[name] = codes.float() * scale.repeat_interleave(128, 1)
    config = {"quant_method": "w4afp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    how = (
        "quantize_fp8_block_scale_to_int4 of NVIDIA/TensorRT-LLM@2376c67c examples/quantization/"
        "quantize_mixed_precision_moe.py, pack_int4_values_to_int8 of sgl-project/sglang@8b2add0f sgl-kernel/tests/"
        "test_cutlass_w4a8_moe_mm.py; the first 6 rows of each expert; codes times scales in float32, before packing"
    )
    put("w4afp8/experts", stored, config, values, {"producer": "TensorRT-LLM and SGLang", "how": how})


def paroquant(convert: str, rotation: str, packing: str) -> None:
    """Write two layers with paroquant's cli/convert.py and utils/paroquant.py, and GPTQModel's packing_utils.py."""
    from unittest.mock import Mock, patch

    rotate = load(rotation, "_normalize_group_size", "apply_paroquant_rotation_reference", Optional=Optional)
    rotate = rotate["apply_paroquant_rotation_reference"]
    made = load(convert, "_pack_awq", "_quantize_rotated_weight", "_to_awq_buffers")
    read = load(packing, "_unpack_columnwise", "unpack_awq", "reverse_awq_order", "dequantize_gemm")["dequantize_gemm"]
    modules = {"paroquant": Mock(), "paroquant.kernels": Mock()}
    modules["paroquant.kernels.cuda"] = Mock(scaled_pairwise_rotation=rotate)
    precise = {"cos": lambda t: t.double().cos(), "sin": lambda t: t.double().sin()}
    stored, values = {}, {}
    for name, rows, blocks, size, rotations in (("a", 16, 2, 64, 8), ("b", 8, 3, 32, 3)):
        torch.manual_seed(rows)
        cols = blocks * size
        factors = torch.rand(1, cols).add(0.5).half()
        pairs = torch.stack(
            [torch.cat([torch.randperm(size) for _ in range(blocks)]) for _ in range(rotations)]
        ).short()
        theta = torch.randn(rotations, cols // 2).half()
        scales = torch.rand(rows * blocks, 1).add(0.5).div(100).half().float()
        with patch.dict("sys.modules", modules):
            coded = made["_quantize_rotated_weight"](
                weight=0.02 * torch.randn(rows, cols), pairs=pairs, theta=theta, channel_scales=1 / factors.float(),
                scales_flat=scales, zp_flat=-torch.randint(5, 11, (rows * blocks, 1)), bits=4, group_size=size,
                device="cpu",
            )  # fmt: skip
        parts = made["_to_awq_buffers"](*coded)
        stored |= {f"{name}.{key}": part for key, part in parts.items()}
        stored |= {f"{name}.theta": theta, f"{name}.pairs": pairs, f"{name}.channel_scales": factors}
        weight = read(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, size)
        with patch.multiple(torch, **precise):
            turned = rotate(torch.eye(cols, dtype=torch.float64), pairs, theta, factors, size)
        values[f"{name}.weight"] = (turned @ weight.double()).t().float().contiguous()
    config = {"quant_method": "paroquant", "bits": 4, "group_size": 64, "krot": 8}
    how = (
        "quantized and packed by paroquant/cli/convert.py of paroquant 0.1.16, with the rotation of "
        "ModelCloud/GPTQModel@f4c327a1 gptqmodel/utils/paroquant.py apply_paroquant_rotation_reference; that rotation "
        "of an identity matrix, in float64, times dequantize_gemm of gptqmodel/quantization/awq/utils/"
        "packing_utils.py"
    )
    origin = {"producer": "paroquant 0.1.16 and GPTQModel", "how": how, "tolerance": 2**-23}
    put("paroquant/layers", stored, config, values, origin)


def qqq(layers: str) -> None:
    """Write layers with one group and with several, with GPTQModel's nn_modules/qlinear/qqq.py."""
    from unittest.mock import MagicMock

    import numpy

    class Base(nn.Module):
        """The attributes that QQQLinear needs from its own base class."""

        def __init__(self, bits: int, group_size: int, in_features: int, out_features: int, **_: object) -> None:
            super().__init__()
            self.bits, self.in_features, self.out_features = bits, in_features, out_features
            self.group_size = in_features if group_size < 0 else group_size

    missing = (
        "BACKEND",
        "METHOD",
        "FORMAT",
        "DEVICE",
        "PLATFORM",
        "Adapter",
        "Lora",
        "log",
        "Optional",
        "Tuple",
        "List",
    )
    given = {name: MagicMock() for name in missing} | {"np": numpy, "GroupedQuantLinear": Base, "CPU": "cpu"}
    wanted_names = ("_invert_permutation", "_unpack_uint4", "QQQLinear", "QQQTorchLinear")
    layer_class = load(layers, *wanted_names, **given)["QQQTorchLinear"]
    stored, values = {}, {}
    for name, rows, cols, size in (("channel", 128, 32, -1), ("groups", 64, 64, 32)):
        torch.manual_seed(rows)
        layer = layer_class(4, size, False, True, cols, rows, register_buffers=False)
        linear = nn.Linear(cols, rows, bias=False)
        grouped = linear.weight.data.view(rows, -1, size if size > 0 else cols)
        scales = grouped.abs().amax(2) / 7
        extra = grouped.abs().amax((1, 2)) / 127
        layer.pack(linear, scales, extra if size > 0 else None)
        stored |= {f"{name}.{key}": part for key, part in layer.state_dict().items()}
        weight, channel = layer._dequantize_weight_for_torch()
        values[f"{name}.weight"] = (weight * channel).t().contiguous()
    config = {"quant_method": "qqq", "bits": 4, "group_size": 32}
    how = "pack and _dequantize_weight_for_torch of gptqmodel/nn_modules/qlinear/qqq.py QQQTorchLinear, times s_channel"
    put("qqq/layers", stored, config, values, {"producer": "ModelCloud/GPTQModel@f4c327a1", "how": how})


def sinq() -> None:
    """Write every supported packing, both tables, and one zero point for all; scales are read in float32."""
    from sinq.patch_model import AutoSINQHFModel
    from sinq.quantizer import Quantizer
    from sinq.sinqlinear_hf import SINQLinear, sinq_base_quant_config

    def widen(value: object) -> object:
        if isinstance(value, dict):
            return {key: widen(part) for key, part in value.items()}
        return value.float() if torch.is_tensor(value) else value

    layers, values = {}, {}
    methods = {"uint8": (8, "sinq"), "uint4": (4, "sinq"), "uint3": (3, "sinq"), "uint2": (2, "sinq")}
    methods |= {"nf4": (4, "sinq_nf4"), "nf3": (3, "sinq_nf3"), "noz": (4, "sinq_noz")}
    for name, (bits, method) in methods.items():
        torch.manual_seed(bits)
        settings = {"nbits": bits, "group_size": 32, "axis": 1, "tiling_mode": "1D", "method": method}
        off = {"quant_zero": False, "quant_scale": False, "view_as_float": False}
        config = sinq_base_quant_config(**settings, **off)
        layer = SINQLinear(64, 16, bias=False, quant_config=config, compute_dtype=torch.float32, device="cpu")
        layer.quantize(torch.randn(16, 64) * 0.02)
        layers[name] = layer.state_dict()
        meta = widen(layers[name]["meta"])
        values[f"{name}.weight"] = Quantizer.dequantize(layer.W_q, meta).contiguous()
    with tempfile.TemporaryDirectory() as folder:
        AutoSINQHFModel.save_weights_safetensors(layers, folder)
        stored = load_file(f"{folder}/model-00001-of-00001.safetensors")
        beside = Path(f"{folder}/model.safetensors.index.json.meta.json").read_text()
    how = "SINQLinear.quantize, save_weights_safetensors; Quantizer.dequantize with everything in float32"
    origin = {"producer": f"sinq {importlib.metadata.version('sinq')}", "how": how}
    put("sinq/layers", stored, {"quant_method": "sinq"}, values, origin)
    (HERE / "sinq/layers/model.safetensors.index.json.meta.json").write_text(beside)


if __name__ == "__main__":
    makers = (sdnq, quark, modelopt, modelslim, w4afp8, paroquant, qqq, sinq)
    {make.__name__: make for make in makers}[sys.argv[1]](*sys.argv[2:])
