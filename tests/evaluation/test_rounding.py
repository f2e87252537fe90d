"""Inputs, keys and values rounded as in a runtime, compared with plain transformers and hooks."""

import csv
import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import auto_of, ids, load_tensors, save_model, with_words
from torch.nn import functional

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.labels import Label
from quanterr.errors import UsageError
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.running.rounding import Rounded, RoundingMode, Watched
from quanterr.kernel.rotation import rotate
from quanterr.outputs.card import format_numbers
from quanterr.outputs.page.columns import make_columns
from quanterr.pairing.inputs import _read_comfy
from quanterr.recipes.inputs import INPUT_SCHEMES, StoredInputScale
from quanterr.views.evaluation.view import map_rows

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
CONTEXT = 32
E4M3 = torch.float8_e4m3fn
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Both sides compute in float64 and round in float32: inputs that differ by 2^-53 are the same float32, but for one in
# 2^28; what is float32 whatever the dtype (norms, rotary tables) has the same inputs too.
EXACTLY = {"dtype": "float64", "batch": 3}
KLD_TOLERANCE = 1e-6


def nearest(x, levels):
    """Return the nearest of some sorted numbers; on a tie, the one in the even place."""
    place = torch.bucketize(x.abs(), levels).clamp(max=len(levels) - 1)
    below = (place - 1).clamp(min=0)
    up, down = levels[place] - x.abs(), x.abs() - levels[below]
    take = torch.where((up < down) | ((up == down) & (place % 2 == 0)), place, below)
    return levels[take] * x.sign()


def fp8_rows(tensor):
    scale = tensor.abs().amax(1, keepdim=True) / 448
    codes = (tensor / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def int8_rows(tensor):
    scale = tensor.abs().amax(1, keepdim=True) / 127
    codes = (tensor / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def nvfp4(tensor):
    factor = 448 * 6 / tensor.abs().max()
    blocks = tensor.reshape(len(tensor), -1, 16)
    scale = (factor * blocks.abs().amax(-1, keepdim=True) / 6).to(E4M3)
    values = nearest(blocks / (scale.float() / factor), LEVELS)
    codes = torch.bucketize(values.abs(), LEVELS) + 8 * (values < 0)
    flat = codes.reshape(tensor.shape).to(torch.uint8)
    packed = flat[:, ::2] | flat[:, 1::2] << 4
    stored_as = {
        "weight_packed": packed,
        "weight_scale": scale.reshape(len(tensor), -1),
        "weight_global_scale": factor.view(1),
        "input_global_scale": torch.tensor([500.0]),
    }
    return stored_as, (values * (scale.float() / factor)).reshape(tensor.shape)


def round_fp8_token(x):
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def round_int8_token(x):
    largest = x.abs().amax(-1, keepdim=True)
    return (x * (127 / largest)).round().clamp(-128, 127) * (largest / 127)


def round_fp8_static(x):
    return (x * (1 / torch.tensor(0.01))).clamp(-448, 448).to(E4M3).float() * torch.tensor(0.01)


def round_nvfp4(x):
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scale = (500.0 * (blocks.abs().amax(-1, keepdim=True) / 6)).clamp(max=448).to(E4M3).float()
    factor = torch.where(scale == 0, 0, 500.0 / scale)
    return (nearest((blocks * factor).clamp(-6, 6), LEVELS) * (scale / 500.0)).reshape(x.shape)


def arguments(bits, number_type, **more):
    return {"num_bits": bits, "type": number_type, "symmetric": True, **more}


TOKEN = {"strategy": "token", "dynamic": True}
FP8 = arguments(8, "float", strategy="channel")
GROUP = {"strategy": "tensor_group", "group_size": 16}
# Name → storage of weights, declarations in config.json for weights and inputs, effect on inputs, format.
CASES = {
    "fp8_token": (fp8_rows, FP8, arguments(8, "float", **TOKEN), round_fp8_token, "float-quantized"),
    "int8_token": (
        int8_rows, arguments(8, "int", strategy="channel"), arguments(8, "int", **TOKEN), round_int8_token,
        "int-quantized",
    ),
    "fp8_static": (
        fp8_rows, FP8, arguments(8, "float", strategy="tensor", dynamic=False), round_fp8_static, "float-quantized"
    ),
    "nvfp4": (
        nvfp4, arguments(4, "float", **GROUP), arguments(4, "float", dynamic="local", **GROUP), round_nvfp4,
        "nvfp4-pack-quantized",
    ),
}  # fmt: skip


def hadamard_signs():
    """Return a matrix of 16 rows as compressed-tensors stores it, and the rotation it stands for."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    four = torch.kron(two, two)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)[:, None] * torch.kron(four, four)
    return signs, signs.double() / 4


def turn(x, matrix):
    """Rotate each 16 columns in float64."""
    return (x.double().reshape(*x.shape[:-1], -1, 16) @ matrix).view(x.shape)


def quantize(
    folder: Path, original: Path, name: str, inputs: object = True, cache: bool = False, transformed: bool = False
):
    """Write a checkpoint in compressed-tensors' layout and return the values of its weights."""
    signs, rotation = hadamard_signs()
    store, of_weights, of_inputs, _, form = CASES[name]
    written, values = {}, {}
    for key, tensor in load_tensors(original).items():
        values[key] = written[key] = tensor
        if tensor.dim() == 2 and "proj" in key:
            module = key.removesuffix(".weight")
            parts, values[key] = store(turn(tensor, rotation).float() if transformed else tensor)
            if transformed:
                values[key] = turn(values[key], rotation.T)
            del written[key]
            written |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
            if name == "fp8_static":
                written[f"{module}.input_scale"] = torch.tensor([0.01])
            if cache and key.endswith("k_proj.weight"):
                attention = module.removesuffix(".k_proj")
                written[f"{attention}.k_scale"] = torch.tensor([0.02])
                written[f"{attention}.v_scale"] = torch.tensor([0.01])
    places = [
        {"targets": ["Linear"], "ignore": ["lm_head"], "location": place, "inverse": place != "input"}
        for place in ("input", "weight_input")
    ]
    transform = {"type": "random-hadamard", "head_dim": 16, "apply": places}
    if transformed:
        written["model.layers.0.self_attn.q_proj.R_input.weight"] = signs
    folder.mkdir()
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    group = {"weights": of_weights, "input_activations": of_inputs if inputs is True else inputs, "targets": ["Linear"]}
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "transform_config": {"config_groups": {"R": transform}} if transformed else {},
        "kv_cache_scheme": arguments(8, "float", strategy="tensor", dynamic=False) if cache else None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounding")
    path = save_model("llama", folder / "original")
    ids(folder)
    return path


def logits(original, values, chunks, rounded=None, cache=None):
    """Return the logits of a plain model with these weights, whose linear layers except the head get rounded inputs."""
    model = auto_of("llama").from_pretrained(original, dtype=torch.float64).eval()
    model.load_state_dict(values)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and rounded is not None and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0].float()).double(), *args[1:]))
    plain = functional.scaled_dot_product_attention
    if cache is not None:

        def attention(query, key, value, *args, **kwargs):
            def round_cache(x, stored):  # x has its heads repeated, once for each head of queries
                scale = torch.as_tensor(stored).reshape(-1)
                scale = scale.repeat_interleave(x.shape[1] // len(scale)).view(1, -1, 1, 1)
                return ((x.float() / scale).clamp(-448, 448).to(E4M3).float() * scale).double()

            return plain(query, round_cache(key, cache[0]), round_cache(value, cache[1]), *args, **kwargs)

        functional.scaled_dot_product_attention = attention
    try:
        with torch.inference_mode():
            return model(input_ids=chunks, use_cache=False).logits
    finally:
        functional.scaled_dot_product_attention = plain


def kld(original, values, chunks, **how):
    """Return the mean divergence over the second half of each chunk, as evaluate defines it."""
    half = chunks.shape[1] // 2
    base, other = (
        logits(original, values_of_side, chunks, **more)[:, half:-1].double().log_softmax(-1)
        for values_of_side, more in ((load_tensors(original), {}), (values, how))
    )
    return float((base.exp() * (base - other)).sum(-1).mean())


def evaluate(original, path, **more):
    return quanterr.evaluate(
        original, [path], tokens=original.parent / "ids.safetensors", context=CONTEXT, **EXACTLY, **more
    )


def chunks_of(original):
    raw = next(iter(load_file(original.parent / "ids.safetensors").values())).flatten()
    return raw[: len(raw) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()


@pytest.mark.parametrize("name", CASES)
def test_declared_activations_equal_a_plain_emulation(original, tmp_path, name):
    path, values = quantize(tmp_path / "quantized", original, name)
    declared, alone = evaluate(original, path), evaluate(original, path, activations="none")
    chunks = chunks_of(original)

    assert {name: 14} == declared.candidates[0].activations
    assert {} == alone.candidates[0].activations
    assert kld(original, values, chunks) == pytest.approx(alone.candidates[0].scores.kld_mean, rel=KLD_TOLERANCE)
    expected = kld(original, values, chunks, rounded=CASES[name][3])
    assert expected == pytest.approx(declared.candidates[0].scores.kld_mean, rel=KLD_TOLERANCE)
    assert not math.isclose(expected, alone.candidates[0].scores.kld_mean, rel_tol=5 * KLD_TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_transformed_inputs_are_rounded_as_the_product_sees_them(original, tmp_path, name):
    path, values = quantize(tmp_path / "quantized", original, name, transformed=True)
    candidate = evaluate(original, path).candidates[0]
    _, rotation = hadamard_signs()

    def round_inputs(x):
        return turn(CASES[name][3](turn(x, rotation).float()), rotation.T)

    expected = kld(original, values, chunks_of(original), rounded=round_inputs)
    unrotated = kld(original, values, chunks_of(original), rounded=CASES[name][3])
    # Each product's inputs and weights are rounded to float32 once more: 2^-24 of their size, where codes lose 2^-8 at
    # least. So the divergence changes by 2 · sqrt(2) · 2^-16 of itself, for each of seven products in two blocks.
    assert expected == pytest.approx(candidate.scores.kld_mean, rel=14 * 2**1.5 * 2**-16)
    assert expected != pytest.approx(unrotated, rel=10 * 14 * 2**1.5 * 2**-16)


def test_output_errors_with_rounded_inputs_equal_plain_hooks(original, tmp_path):
    path, values = quantize(tmp_path / "quantized", original, "int8_token")
    weights = {weight.layer_name: weight for weight in evaluate(original, path).candidates[0].weights}
    name, sums = "model.layers.0.self_attn.v_proj", []  # inputs to the first block are the original's
    model = auto_of("llama").from_pretrained(original, dtype=torch.float64).eval()

    def look(module, args):
        x = args[0]
        changed = (round_int8_token(x.float()).double() - x) @ values[f"{name}.weight"].double().T
        sums.append((float(changed.square().sum()), float((x @ module.weight.T).square().sum())))

    model.get_submodule(name).register_forward_pre_hook(look)
    with torch.inference_mode():
        model(input_ids=chunks_of(original), use_cache=False)

    assert sums[0][0] / sums[0][1] == pytest.approx(weights[f"{name}.weight"].input_error, rel=KLD_TOLERANCE)
    assert weights["lm_head.weight"].input_error is None
    of_both = weights[f"{name}.weight"].input_error + weights[f"{name}.weight"].output_error
    assert weights[f"{name}.weight"].input_error / of_both == pytest.approx(weights[f"{name}.weight"].share_of_inputs)


def test_every_output_shows_the_share_from_rounded_inputs(original, tmp_path):
    path, _ = quantize(tmp_path / "quantized", original, "int8_token")
    evaluation = evaluate(original, path)
    paths = [tmp_path / f"evaluation.{suffix}" for suffix in ("json", "csv")]
    for file in paths:
        evaluation.save(file)
    rows = {row["name"]: row for row in csv.DictReader(paths[1].read_text().splitlines()) if row["list"] == "weights"}
    weights = {weight["layer_name"]: weight for weight in json.loads(paths[0].read_text())["candidates"][0]["weights"]}
    name = "model.layers.0.self_attn.v_proj.weight"

    assert 0 < weights[name]["share_of_inputs"] < 1
    for column in ("input_error", "share_of_inputs"):
        assert weights[name][column] == pytest.approx(float(rows[name][column]))
        assert weights["lm_head.weight"][column] is None
        assert rows["lm_head.weight"][column] == ""
    assert "share of inputs" in format_numbers(evaluation)
    of_both = dict(zip(weights, make_columns(map_rows(evaluation))["columns"]["of_both_0"], strict=True))
    assert weights[name]["share_of_inputs"] == pytest.approx(of_both[name], rel=5e-3)  # the page rounds to three digits


def test_declared_cache_is_rounded_after_the_rotary_embedding(original, tmp_path):
    path, values = quantize(tmp_path / "quantized", original, "fp8_token", None, cache=True)
    candidate = evaluate(original, path).candidates[0]

    assert ("fp8", {}) == (candidate.kv, candidate.activations)
    expected = kld(original, values, chunks_of(original), cache=(0.02, 0.01))
    assert expected == pytest.approx(candidate.scores.kld_mean, rel=KLD_TOLERANCE)


def test_single_scale_serves_keys_and_values_as_in_vllm(original, tmp_path):
    path, values = quantize(tmp_path / "quantized", original, "fp8_token", None, cache=True)
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace(".k_scale", ".kv_scale"): x for name, x in tensors.items() if ".v_scale" not in name}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    expected = kld(original, values, chunks_of(original), cache=(0.02, 0.02))

    assert expected == pytest.approx(evaluate(original, path).candidates[0].scores.kld_mean, rel=KLD_TOLERANCE)


def test_unsupported_scheme_is_inconclusive(original, tmp_path):
    unknown = arguments(8, "int", strategy="group", group_size=16, dynamic=True)
    path, _ = quantize(tmp_path / "quantized", original, "int8_token", unknown)
    declared, alone = evaluate(original, path), evaluate(original, path, activations="none")

    assert ("inconclusive", "pass") == (declared.verdict, alone.verdict)
    assert ["not_emulated"] == [
        finding.code for finding in declared.candidates[0].findings if finding.severity != "info"
    ]
    assert "by group, are not emulated" in declared.reasons[0]


def test_scheme_may_be_requested_and_split_from_the_weights(original, tmp_path):
    path, values = quantize(tmp_path / "quantized", original, "fp8_token", None)
    both = evaluate(original, path, activations="int8_token", kv="fp8", split=True)

    assert ["quantized", "quantized, weights alone"] == [candidate.name for candidate in both.candidates]
    assert [({"int8_token": 14}, "fp8"), ({}, None)] == [
        (candidate.activations, candidate.kv) for candidate in both.candidates
    ]
    expected = kld(original, values, chunks_of(original), rounded=round_int8_token, cache=(1.0, 1.0))
    assert expected == pytest.approx(both.candidates[0].scores.kld_mean, rel=KLD_TOLERANCE)


def fp8_experts(folder: Path, original: Path):
    """Quantize only experts to FP8, with a static input scale for each matrix; return values and these scales."""
    written, values, scales = {}, {}, {}
    for key, tensor in load_tensors(original).items():
        values[key] = written[key] = tensor
        if ".experts." in key:
            module = key.removesuffix(".weight")
            parts, values[key] = fp8_rows(tensor)
            scales[module] = torch.tensor(2.0 ** -(4 + len(scales) % 3) / 3)  # neighbours, and gate and up, have others
            del written[key]
            written |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
            written[f"{module}.input_scale"] = scales[module]
    folder.mkdir()
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    static = arguments(8, "float", strategy="tensor", dynamic=False)
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"weights": FP8, "input_activations": static, "targets": ["re:.*experts.*"]}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return values, scales


def test_each_expert_has_its_own_static_scale(tmp_path, monkeypatch):
    """A model holds its experts in two stacks; the file has a scale for each matrix, with gate and up apart."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    path = save_model("qwen3_moe", tmp_path / "original", num_hidden_layers=1)
    tokens = ids(tmp_path)
    values, scales = fp8_experts(tmp_path / "quantized", path)
    candidate = quanterr.evaluate(path, [tmp_path / "quantized"], tokens=tokens, context=CONTEXT, **EXACTLY).candidates[
        0
    ]

    def multiply(x, module):
        scale = scales[f"model.layers.0.mlp.experts.{module}"]
        rounded = (x.float() * (1 / scale)).clamp(-448, 448).to(E4M3).float() * scale
        return rounded.double() @ values[f"model.layers.0.mlp.experts.{module}.weight"].double().T

    def forward(self, hidden, chosen, shares):
        out = torch.zeros_like(hidden)
        for token, (experts, weights) in enumerate(zip(chosen.tolist(), shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                x = hidden[token]
                inner = functional.silu(multiply(x, f"{expert}.gate_proj")) * multiply(x, f"{expert}.up_proj")
                out[token] += weight * multiply(inner, f"{expert}.down_proj")
        return out

    chunks = load_file(tokens)["ids"].view(-1, CONTEXT).long()
    results = []
    for rounded in (False, True):
        if rounded:
            monkeypatch.setattr(Qwen3MoeExperts, "forward", forward)
        how = {"dtype": torch.float64, "experts_implementation": "eager"}
        model = auto_of("qwen3_moe").from_pretrained(path, **how).eval()
        with torch.inference_mode():
            results.append(model(input_ids=chunks, use_cache=False).logits[:, CONTEXT // 2 : -1].log_softmax(-1))
    base, other = results
    expected = float((base.exp() * (base - other)).sum(-1).mean())

    assert {"fp8_static": 12} == candidate.activations
    assert "pass" == candidate.verdict, candidate.reasons
    assert expected == pytest.approx(candidate.scores.kld_mean, rel=KLD_TOLERANCE)


@pytest.mark.parametrize("several", [False, True])
def test_key_scale_with_several_numbers_is_not_emulated(original, tmp_path, several):
    path, _ = quantize(tmp_path / "quantized", original, "fp8_token", None, cache=True)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.k_scale"
    tensors[name] = torch.full((4,), 0.02) if several else tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    reasons = evaluate(original, path).candidates[0].reasons

    assert several == (f"keys and values were rounded with a scale of 1: {name} holds 4 numbers" in reasons)


def test_inputs_for_rotated_weights_are_rotated_rounded_and_rotated_back():
    """comfy-kitchen rounds rotated inputs; its matrix brings them back in float64."""
    golden = load_file(Path(__file__).parents[1] / "golden_inputs" / "comfy_kitchen.safetensors")
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    h = torch.kron(torch.kron(h4, h4), h4) / 8
    way = Rounded(INPUT_SCHEMES["int8_token"], StoredInputScale(), None, partial(rotate, size=64))
    expected = (golden["int8_token_rotated_64"].double().view(1, 8, 4, 64) @ h).view(1, 8, 256)
    rounded = way(golden["x"])
    # comfy-kitchen rotates in float32 with 64 additions; we round once before and once after
    allowed = 66 * 2.0**-24 * golden["x"].double().norm(dim=-1, keepdim=True)

    assert bool(((rounded - expected).abs() <= allowed).all())
    assert not torch.allclose(INPUT_SCHEMES["int8_token"](golden["x"], StoredInputScale()).double(), expected)


SVDQUANT = ("svdquant_w4a4_kitchen", "svdquant_w4a4_kitchen_smooth_defect", "svdquant_w4a4_tilepacked_awq_w4a16")
BRANCHES = [
    *(("comfy_kitchen_branches", name, f"svdquant_w4a4/{name}", ".safetensors") for name in SVDQUANT),
    ("sdnq_branches", "mm_svd_int8", "sdnq/products", ""),
]


@pytest.mark.parametrize(("producer", "name", "file", "suffix"), BRANCHES)
def test_low_rank_branch_gets_unrounded_inputs(producer, name, file, suffix, tmp_path):
    """The producer's own forward multiplies codes by rounded inputs, and the branch by the inputs themselves."""
    folder = Path(__file__).parents[1]
    golden, path = load_file(folder / "golden_inputs" / f"{producer}.safetensors"), folder / f"golden/{file}{suffix}"
    if not suffix:  # The folder's config.json makes SDNQ multiply in floats.
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] |= {"use_quantized_matmul": True, "modules_to_not_use_matmul": []}
        path = Path(shutil.copytree(path, tmp_path / "quantized"))
        (path / "config.json").write_text(json.dumps(config))
    with (
        open_checkpoint(folder / f"golden/{file}.expected.safetensors") as original,
        open_checkpoint(path) as candidate,
    ):
        made = Candidate(OriginalWeights(original), candidate, "declared", "none")
        key = next((key for key in made.names if key.startswith(name)), next(iter(made.names)))
        way, weight = made.rounding.inputs[key], made.get(key)
    layout = list(zip(weight.shape, weight.stride(), strict=True))
    watched = {weight.untyped_storage().data_ptr(): Watched(key, [key], [way], layout, None)}
    x = golden["x"][..., : weight.shape[1]]
    with RoundingMode(watched, None, made.rounding):
        product = functional.linear(x, weight)

    up, down = way.branch
    # Sums of that many float32 products of codes and of the branch, which we add to the weight and subtract again.
    terms = way(x).abs() @ weight.abs().T + 3 * (x.abs() @ down.abs().T @ up.abs().T)
    allowed = (sum(weight.shape) + len(down)) * 2.0**-24 * terms
    of_uint8 = "inputs of 1 weight were not rounded: mm_uint8.weight: products of SDNQ in uint8 are not emulated"
    assert made.rounding.reasons() == ([of_uint8] if producer == "sdnq_branches" else [])
    assert bool(((product - golden[name]).abs() <= allowed).all())
    assert not bool(((functional.linear(way(x), weight) - golden[name]).abs() <= allowed).all())


def test_input_factors_apply_before_rounding():
    factors = torch.tensor([1.0, 0.5, 0.0, 4.0])
    way = Rounded(INPUT_SCHEMES["int8_static"], StoredInputScale(torch.tensor(1.0)), factors)

    assert [3.0, 4.0, 0.0, 0.5] == way(torch.tensor([3.4, 3.2, 7.0, 0.45])).tolist()


def test_weight_used_in_another_way_is_not_called_rounded(original, tmp_path):
    path, _ = quantize(tmp_path / "quantized", original, "fp8_token")
    with quanterr.open_checkpoint(original) as first, quanterr.open_checkpoint(path) as second:
        rounding = Candidate(OriginalWeights(first), second, "declared", "declared").rounding
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.randn(4, 4)
    watched = Watched(name, [name], [rounding.inputs[name]], [(4, 4), (4, 1)], None)
    with RoundingMode({weight.untyped_storage().data_ptr(): watched}, None, rounding):
        weight.t().view(4, 4)
        functional.linear(torch.randn(2, 4), weight)
        known = rounding.reasons()
        torch.einsum("ij,kj->ik", torch.randn(2, 4), weight)

    assert [] == known
    assert ["inputs of 1 weight were not rounded: " + name] == [why.rsplit(": ", 1)[0] for why in rounding.reasons()]


def test_harness_rounds_inputs_too(original, tmp_path):
    from quanterr.lm_eval import StreamedModel

    path, values = quantize(tmp_path / "quantized", original, "int8_token")
    folder = tmp_path / "original"
    shutil.copytree(original, folder)
    with_words(folder)
    (likelihood,) = StreamedModel(folder, path, dtype="float64").loglikelihood(
        [SimpleNamespace(args=("w1 w2 w3", " w4"))]
    )
    ((*_, last, _),) = logits(original, values, torch.tensor([[1, 2, 3, 4]]), rounded=round_int8_token)

    assert likelihood[0] == pytest.approx(float(last.log_softmax(-1)[4]), rel=KLD_TOLERANCE)


def test_unknown_scheme_is_refused_before_anything_is_read(original):
    with pytest.raises(UsageError, match="activations fp8: choose one of declared, none, fp8_token"):
        evaluate(original, original, activations="fp8")


def test_baseline_with_other_activations_is_refused(original, tmp_path):
    path, _ = quantize(tmp_path / "quantized", original, "fp8_token")
    declared, alone = evaluate(original, path), evaluate(original, path, activations="none")

    with pytest.raises(UsageError, match="rounding of activations"):
        quanterr.judge(declared, baseline=alone)


def test_inspection_lists_the_declared_schemes(original, tmp_path):
    path, _ = quantize(tmp_path / "quantized", original, "nvfp4", cache=True)
    inspection = quanterr.inspect(path)

    assert ({"nvfp4": 14}, "fp8") == (inspection.activations, inspection.kv)
    assert {"nvfp4"} == {weight.activations for weight in inspection.weights if "proj" in weight.name}
    assert {None} == {weight.activations for weight in inspection.weights if "proj" not in weight.name}


class TestFindings:
    @pytest.mark.parametrize(
        ("ratio", "expected"), [(1.0, []), (1.1, ["info"]), (1.4, ["warning"]), (4.0, ["warning"])]
    )
    def test_scales_in_fused_weights_must_agree(self, original, tmp_path, ratio, expected):
        path, values = quantize(tmp_path / "quantized", original, "nvfp4", None)
        tensors = load_file(path / "model.safetensors")
        shared = {}
        for name in [name for name in tensors if name.endswith(".weight_global_scale")]:
            key = name.removesuffix("_global_scale")
            of_one = max(
                float(values[key].abs().max()), 1.2
            )  # the same range for all, so that they have the same scale
            factor = torch.tensor([448 * 6 / of_one])
            shared[key] = factor / (ratio if "layers.1.self_attn.k_proj" in key else 1)
        for key, factor in shared.items():
            parts, values[key] = with_factor(load_tensors(original)[key], factor)
            tensors |= {f"{key}{part}": value.contiguous() for part, value in parts.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        report = quanterr.compare(original, path)
        findings = [finding for finding in report.findings if finding.code == "sibling_scales"]

        assert expected == [finding.severity for finding in findings]
        for finding in findings:
            (key, x) = (
                "model.layers.1.self_attn.k_proj.weight",
                load_tensors(original)["model.layers.1.self_attn.k_proj.weight"],
            )
            fused = values[key].double() / ratio
            snr_db = 10 * math.log10(float(x.double().square().sum() / (fused - x.double()).square().sum()))
            assert [key] == finding.evidence["layers"]
            assert snr_db == pytest.approx(finding.evidence["as_fused_db"], abs=1e-6)

    @pytest.mark.parametrize(("name", "part"), [("fp8_static", "input_scale"), ("nvfp4", "input_global_scale")])
    def test_input_scales_in_fused_weights_must_agree(self, original, tmp_path, name, part):
        path, _ = quantize(tmp_path / "quantized", original, name)
        tensors = load_file(path / "model.safetensors")
        sound = quanterr.compare(original, path)
        tensors[f"model.layers.1.self_attn.k_proj.{part}"] /= 8
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        broken = quanterr.compare(original, path)
        before, after = (
            [after for after in scales.findings if after.code == "sibling_scales" and "of inputs" in after.message]
            for scales in (sound, broken)
        )

        assert [] == before
        assert ["warning"] == [after.severity for after in after]
        assert (pytest.approx(8), ["model.layers.1.self_attn.k_proj.weight"]) == (
            after[0].evidence["ratio"],
            after[0].evidence["layers"],
        )
        assert ("its range" in after[0].message) == (name == "nvfp4")  # here the stored scale is a divisor

    def test_static_scheme_without_any_scale_is_not_emulated(self, original, tmp_path):
        path, _ = quantize(tmp_path / "quantized", original, "nvfp4")
        tensors = load_file(path / "model.safetensors")
        kept = {key: value for key, value in tensors.items() if not key.endswith("input_global_scale")}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        for document in (quanterr.compare(original, path), quanterr.inspect(path)):
            messages = [finding.message for finding in document.findings if finding.code == "missing_input_scale"]

            assert len(messages) == 1
            assert "W4A16 for W4A4" in messages[0]

    @pytest.mark.parametrize(
        ("form", "rounded"),
        [
            ("int4_tensorwise", True),
            ("hybrid_mxfp8", True),
            ("awq_w4a16", False),
            ("bnb_nf4", False),
        ],
    )
    def test_unsupported_comfyui_label_does_not_mean_weights_only(self, form, rounded):
        inputs = _read_comfy("a", Label("tensor", {"format": form}), {})

        assert rounded == (inputs is not None)
        assert inputs is None or (inputs.scheme == "" and form in inputs.why_not)

    def test_comfyui_fp8_without_an_input_scale_is_noted(self, tmp_path):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        scale = x.abs().max() / 448
        label = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
        tensors = {"a.weight": (x / scale).to(E4M3), "a.weight_scale": scale, "a.comfy_quant": label}
        save_file({"a.weight": x}, tmp_path / "x.safetensors")
        for name, more in (("without", {}), ("with", {"a.input_scale": torch.tensor(0.1)})):
            save_file(tensors | more, tmp_path / f"{name}.safetensors")
        codes = [
            [
                finding.code
                for finding in quanterr.compare(tmp_path / "x.safetensors", tmp_path / f"{name}.safetensors").findings
            ]
            for name in ("without", "with")
        ]

        assert [True, False] == ["no_input_scale" in finding for finding in codes]


def with_factor(tensor, factor):
    """Return NVFP4 with that factor, a divisor."""
    blocks = tensor.reshape(len(tensor), -1, 16)
    scale = (factor * blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(E4M3)
    values = nearest(blocks / (scale.float() / factor), LEVELS)
    codes = (torch.bucketize(values.abs(), LEVELS) + 8 * (values < 0)).reshape(tensor.shape).to(torch.uint8)
    parts = {
        "_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "_scale": scale.reshape(len(tensor), -1),
        "_global_scale": factor,
    }
    return parts, (values * (scale.float() / factor)).reshape(tensor.shape)
