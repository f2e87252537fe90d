"""Input transforms by compressed-tensors: weights, errors and divergences, compared with its own computation."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import ids, load_tensors, save_model

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.documents.gate_results import exit_status
from quanterr.errors import CheckpointError, Status
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.formats.shared import hadamard
from quanterr.formats.shared.transform_matrix import _take_apart
from quanterr.kernel.library import KernelChoice
from quanterr.pairing.transforms import find_fused_transforms
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

FOLDER = Path(__file__).parents[1] / "golden_transforms"  # make.py in that folder documents the files
ORIGINAL, IDS, CONTEXT = FOLDER / "original", FOLDER / "ids.safetensors", 32
CASES = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.expected.safetensors"))
ULP = 2.0**-24  # relative error of one operation in float32
WIDEST = 48  # terms of a sum
DOWN, QUERY = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"


def expected_of(case):
    return load_file(FOLDER / f"{case}.expected.safetensors")


def condition(case):
    """Return how much the matrices of a case and their inverses increase errors: 1 for rotations."""
    stored = load_file(FOLDER / case / "model.safetensors")
    matrices = [matrix for name, matrix in stored.items() if name.endswith("_input.weight")]
    return max(float(torch.linalg.cond(matrix.double())) for matrix in matrices)


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_that_compressed_tensors_multiplies_by(case):
    expected = expected_of(case)
    del expected["logits"]
    with open_checkpoint(ORIGINAL) as original, open_checkpoint(FOLDER / case) as quantized:
        candidate = Candidate(OriginalWeights(original), quantized)
        assert 14 == len(expected)
        for name, weight in expected.items():
            # Two sums in float32 of at most WIDEST products, whose sizes add up to at most the length of the row.
            bound = 2 * WIDEST * ULP * condition(case) * weight.norm(dim=1, keepdim=True)
            assert bool(((candidate.get(name) - weight).abs() <= bound).all()), name


@pytest.mark.parametrize("has_kernel", [True, False], ids=["by default", "by torch"])
@pytest.mark.parametrize("case", ["hadamard_blocks", "random_hadamard_inverse"])
def test_every_part_equals_the_whole(monkeypatch, case, has_kernel):
    """Sums of a few numbers with eight bits or less are exact in float64, in any order."""
    if not has_kernel:
        monkeypatch.setattr(hadamard, "choose_kernel", lambda: KernelChoice(None))
    workspace = Workspace()
    with open_checkpoint(FOLDER / case) as quantized:
        weight = OriginalWeights(quantized).weights[f"{DOWN}.weight"]
        whole = weight.dequantize(Chunk(0, 32, 0, 48), workspace).weight.clone()
        for rows, cols in (((3, 9), (0, 48)), ((4, 5), (0, 16)), ((31, 32), (47, 48)), ((0, 1), (15, 17))):
            part = weight.dequantize(Chunk(*rows, *cols), workspace).weight
            assert torch.equal(whole[slice(*rows), slice(*cols)], part)


def test_inspect_does_not_list_transform_matrices_as_weights():
    inspection = quanterr.inspect(FOLDER / "random_hadamard")

    assert {weight.name for weight in inspection.weights} == set(load_file(ORIGINAL / "model.safetensors"))
    assert {"fp8_token": 14} == inspection.activations
    assert [] == inspection.findings


@pytest.mark.parametrize("case", CASES)
def test_errors_are_in_the_original_basis(case):
    report = quanterr.compare(ORIGINAL, FOLDER / case)
    original, expected = load_file(ORIGINAL / "model.safetensors"), expected_of(case)
    layers = {layer.layer_name: layer for layer in report.layers}

    assert ("pass", []) == (report.verdict, [finding.code for finding in report.findings])
    assert layers.keys() == expected.keys() - {"logits"}
    for name, layer in layers.items():
        x = original[name].double()
        error = (expected[name].double() - x).norm()
        # Float32 leaves this much of the expected weight open, in addition to the error.
        doubt = 2 * WIDEST * ULP * condition(case) * x.norm() / error
        assert 20 * math.log10(x.norm() / error) == pytest.approx(layer.snr_db, abs=20 * math.log10(1 + doubt))
    assert any("which is undone" in text for layer in layers.values() for text in layer.evidence)


def logits(values):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ORIGINAL, dtype=torch.float64).eval()
    model.load_state_dict({name: value.double() for name, value in values.items()}, strict=False)
    with torch.inference_mode():
        return model(input_ids=load_file(IDS)["ids"].view(-1, CONTEXT).long(), use_cache=False).logits


def kld(base, other):
    """Return the mean divergence over the second half of each chunk, as evaluate defines it."""
    base, other = (path.double()[:, CONTEXT // 2 : -1].log_softmax(-1) for path in (base, other))
    return float((base.exp() * (base - other)).sum(-1).mean())


def evaluate(path, **more):
    return quanterr.evaluate(ORIGINAL, [path], tokens=IDS, context=CONTEXT, dtype="float64", **more)


@pytest.mark.parametrize("case", CASES)
def test_divergences_equal_the_model_run_by_compressed_tensors(case):
    pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
    expected, base = expected_of(case), logits({})
    golden = expected.pop("logits")
    declared, alone = (evaluate(FOLDER / case, **how) for how in ({}, {"activations": "none"}))
    # A change of all logits by d changes a divergence by at most d · Σ|p - q|, and that is at most sqrt(2 · KLD).
    # The float32 sums of two blocks with seven products each leave d open.
    change = 14 * WIDEST * ULP * float(golden.abs().max()) * condition(case)
    as_run, by_weights = kld(base, golden), kld(base, logits(expected))
    close = [change * math.sqrt(2 * logits) for logits in (as_run, by_weights)]

    assert "pass" == declared.candidates[0].verdict == alone.candidates[0].verdict
    assert as_run == pytest.approx(declared.candidates[0].scores.kld_mean, abs=close[0])
    assert by_weights == pytest.approx(alone.candidates[0].scores.kld_mean, abs=close[1])
    if declared.candidates[0].activations:
        assert {"fp8_token": 14} == declared.candidates[0].activations
        assert abs(as_run - by_weights) > 2 * sum(close)


def test_named_scheme_rounds_the_rotated_inputs():
    pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
    declared, named = (evaluate(FOLDER / "random_hadamard", **how) for how in ({}, {"activations": "fp8_token"}))

    assert declared.candidates[0].scores.kld_mean == named.candidates[0].scores.kld_mean


def copy_changed(folder, case, tensors=None, transforms=None):
    """Copy a case; ``tensors`` and ``transforms`` change its tensors and the groups of its config in place."""
    shutil.copytree(FOLDER / case, folder)
    if tensors:
        stored = load_file(folder / "model.safetensors")
        tensors(stored)
        save_file(stored, folder / "model.safetensors")
    if transforms:
        config = json.loads((folder / "config.json").read_text())
        transforms(config["quantization_config"]["transform_config"]["config_groups"])
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(name, value):
    return lambda stored: stored.update({name: value(stored[name])})


MATRIX = f"{DOWN}.R4_input.weight"
OF_QUERY = f"{QUERY}.R4_input.weight"
PERM = f"{QUERY}.R4_input.perm"


def twice(groups):
    groups["R5"] = groups["R4"]


def of_r4(**fields):
    return lambda groups: groups["R4"].update(fields)


@pytest.mark.parametrize(
    ("case", "tensors", "transforms", "words"),
    [
        ("random_hadamard", lambda stored: stored.pop(MATRIX), None, "R4_input.weight, [48, 48], is not stored"),
        ("random_hadamard", put(MATRIX, lambda t: t[:32, :32].clone()), None, "should be floats of [48, 48]"),
        ("random_hadamard", put(MATRIX, lambda t: t.flatten()), None, "should be floats of [48, 48]"),
        ("random_hadamard", put(MATRIX, lambda t: t.to(torch.int8)), None, "should be floats of [48, 48]"),
        ("random_matrix", lambda stored: stored.pop(MATRIX), None, "R4_input.weight, [8, 8], is not stored"),
        ("hadamard_permuted", lambda stored: stored.pop(PERM), None, "R4_input.perm, I64 [32], is not stored"),
        ("hadamard_permuted", put(PERM, lambda t: t[:16].clone()), None, "is stored as"),
        ("hadamard_permuted", put(PERM, lambda t: t * 0), None, "each number from 0 to 31 once: "),
        ("hadamard_blocks", None, of_r4(head_dim=32), "head_dim 32, which does not divide its 48 columns"),
        ("hadamard_blocks", None, of_r4(head_dim=None), "should be floats of [48, 48]"),
        ("hadamard_blocks", None, of_r4(type="givens"), "as givens; known are hadamard, random-hadamard"),
        ("hadamard_blocks", None, twice, "several transforms of its inputs, R4, R5, and not in which order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_transform_is_not_compared(case, tensors, transforms, words, tmp_path):
    path = copy_changed(tmp_path / "quantized", case, tensors, transforms)
    report = quanterr.compare(ORIGINAL, path)
    reasons = {item.layer_name: item.reason for item in report.not_compared}

    assert Status.INCONCLUSIVE == exit_status(report)
    assert any(words in reason and "export the model again" in reason for reason in reasons.values()), reasons
    with open_checkpoint(ORIGINAL) as original, open_checkpoint(path) as quantized:
        assert (
            reasons.keys() & Candidate(OriginalWeights(original), quantized).not_found.keys()
        )  # evaluate refuses these weights


def test_known_matrix_need_not_be_stored(tmp_path):
    path = copy_changed(tmp_path / "quantized", "hadamard", lambda stored: stored.pop(f"{QUERY}.R1_input.weight"))
    stored, known = (quanterr.compare(ORIGINAL, path) for path in (FOLDER / "hadamard", path))

    assert [layer.snr_db for layer in stored.layers] == [layer.snr_db for layer in known.layers]
    assert "pass" == known.verdict


@pytest.mark.parametrize(
    ("case", "tensors", "words"),
    [
        ("random_hadamard", put(MATRIX, lambda t: t.index_fill(0, torch.tensor([3]), 1.0)), "orthogonal rows"),
        ("random_hadamard", put(MATRIX, lambda t: t / 48**0.5), "should hold 1 and -1"),
        ("random_hadamard", put(MATRIX, lambda t: t * math.nan), "should hold 1 and -1"),
        ("random_matrix", put(MATRIX, lambda t: t * 0 + 1), "has no inverse"),
    ],
    ids=["no rotation", "scaled", "nan", "singular"],
)
def test_damaged_matrix_is_refused_by_name(case, tensors, words, tmp_path):
    path = copy_changed(tmp_path / "quantized", case, tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        quanterr.compare(ORIGINAL, path)
    assert str(path / "model.safetensors") in str(caught.value)
    assert MATRIX in str(caught.value)


def unrotate(stored):
    """Put the codes of the weights that were never rotated into a file of FP8 rows."""
    for name, weight in load_file(ORIGINAL / "model.safetensors").items():
        if f"{name}_scale" in stored:
            scale = weight.abs().amax(1, keepdim=True) / 448
            stored[name], stored[f"{name}_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale


def flip(stored):
    stored[MATRIX] = -stored[MATRIX].flip(1)  # the declared rotation is not the one that the weights have


@pytest.mark.parametrize("case", [case for case in CASES if "permuted" not in case and "inverse" not in case])
def test_unrotated_weights_are_errors(case, tmp_path):
    report = quanterr.compare(ORIGINAL, copy_changed(tmp_path / "quantized", case, unrotate))

    assert Status.INCONCLUSIVE == exit_status(report)
    assert "implausible_error" in {finding.code for finding in report.findings}


def test_rotation_that_differs_from_the_weights_is_an_error(tmp_path):
    report = quanterr.compare(ORIGINAL, copy_changed(tmp_path / "quantized", "random_hadamard", flip))

    assert {f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)} == {
        finding.layer for finding in report.findings if finding.code == "implausible_error"
    }


def test_equal_bytes_with_transformed_inputs_are_not_an_equal_weight(tmp_path):
    """The original's own weight, under a declaration without its matrix, was once paired bit by bit."""

    def change(stored):
        del stored[MATRIX], stored[f"{DOWN}.weight_scale"]
        stored[f"{DOWN}.weight"] = load_file(ORIGINAL / "model.safetensors")[f"{DOWN}.weight"]

    report = quanterr.compare(ORIGINAL, copy_changed(tmp_path / "quantized", "random_hadamard", change))

    assert f"{DOWN}.weight" in {item.layer_name for item in report.not_compared}
    assert Status.INCONCLUSIVE == exit_status(report)


def test_transform_is_also_undone_for_an_unquantized_weight(tmp_path):
    """Rows that were multiplied by the matrix in float64 and rounded to float32 are rounded a second time."""
    x = load_file(ORIGINAL / "model.safetensors")[f"{DOWN}.weight"]

    def change(stored):
        rotation = stored[MATRIX].double() / 48**0.5
        stored[f"{DOWN}.weight"] = (x.double() @ rotation).float()
        del stored[f"{DOWN}.weight_scale"]

    path = copy_changed(tmp_path / "quantized", "random_hadamard", change)
    with open_checkpoint(ORIGINAL) as original, open_checkpoint(path) as quantized:
        y = Candidate(OriginalWeights(original), quantized).get(f"{DOWN}.weight")

    assert bool(((y - x).abs() <= 2 * ULP * x.norm(dim=1, keepdim=True)).all())


@pytest.mark.parametrize("location", ["output", "q_attn", "k_cache"])
def test_other_runtime_transforms_are_refused_by_name(location, tmp_path):
    pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')

    def store(stored):
        stored[f"{DOWN}.R3_{location}.weight"] = torch.ones(16, 16)

    def declare(groups):
        groups["R3"] = groups["R4"] | {"apply": [{"targets": ["re:.*self_attn$"], "location": location}]}

    path = copy_changed(tmp_path / "quantized", "hadamard_blocks", store, declare)
    report = quanterr.compare(ORIGINAL, path)
    (left,) = report.not_compared

    assert f"a runtime applies at {location}" in left.reason
    assert Status.INCONCLUSIVE == exit_status(report)
    candidate = evaluate(path).candidates[0]
    assert "inconclusive" == candidate.verdict
    assert any(f"R3 ({location})" in reason for reason in candidate.reasons)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("weight_input", "re:.*down_proj$"), ("input", "re:.*down_proj$")], []),
        ([("weight_input", "re:.*_proj$"), ("input", "re:.*down_proj$")], ["R4"]),
        ([("weight_input", "re:.*down_proj$"), ("input", "re:.*up_proj$")], ["R4"]),
        ([("weight_input", "Linear"), ("input", "Linear"), ("weight_output", "re:.*q_proj$")], ["R4"]),
    ],
)
def test_rotation_is_fused_where_inputs_do_not_undo_it(places, expected):
    apply = [{"targets": [target], "location": place} for place, target in places]
    config = {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}}
    with open_checkpoint(ORIGINAL) as original:
        weights = list(OriginalWeights(original).weights.values())

    assert expected == [find_fused_transform.group for find_fused_transform in find_fused_transforms(config, weights)]


@pytest.mark.parametrize(("size", "middle"), [(1, 1), (2, 1), (64, 1), (12, 12), (48, 12), (56, 28), (40, 20)])
def test_hadamard_matrices_are_factored_as_far_as_possible(size, middle):
    """The matrices are compressed-tensors' own, scipy's Paley matrices and Sylvester's."""
    from quanterr.formats.shared import hadamard

    base = hadamard.make_table(middle) if middle > 1 else torch.ones(1, 1, dtype=torch.float64)
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)).double() * 2 - 1
    matrix = signs[:, None] * torch.kron(base, hadamard.make_sylvester(size // middle))
    found_signs, factors = _take_apart(matrix.clone())

    assert len(factors) <= middle
    assert torch.equal(
        matrix, found_signs[:, None] * torch.kron(factors, hadamard.make_sylvester(size // len(factors)))
    )


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts; in transformers 5 its routers and experts are not instances of Linear."""
    pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
    folder = tmp_path_factory.mktemp("experts")
    path = save_model("qwen3_moe", folder / "original", num_hidden_layers=1)
    ids(folder)
    return path


def rotate(folder, original, *endings):
    """Store all weights with these endings rotated in blocks of four columns, as compressed-tensors does."""
    matrix = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])[[0, 2, 1, 3]].double()
    tensors = {
        name: (x.double().view(len(x), -1, 4) @ matrix / 2).view(x.shape).float() if name.endswith(endings) else x
        for name, x in load_tensors(original).items()
    }
    tensors["model.layers.0.self_attn.q_proj.v_input.weight"] = matrix.float()
    apply = [
        {"targets": ["Linear"], "ignore": ["lm_head"], "location": place, "inverse": place != "input"}
        for place in ("input", "weight_input")
    ]
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "transform_config": {"config_groups": {"v": {"type": "random-hadamard", "head_dim": 4, "apply": apply}}},
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_values_decide_whether_routers_and_experts_are_linear(experts, tmp_path):
    path = rotate(tmp_path / "quantized", experts, *(f"{letter}_proj.weight" for letter in "qkvo"))
    report = quanterr.compare(experts, path)
    doubts = [finding for finding in report.findings if finding.code == "ambiguous_layout"]
    doubted = {name for finding in doubts for name in finding.evidence["tensors"]}
    tokens = experts.parent / "ids.safetensors"
    (candidate,) = quanterr.evaluate(experts, [path], tokens=tokens, context=CONTEXT, dtype="float64").candidates

    # Rounding a weight to float32 twice changes logits by less than 2^-20, and a divergence by its square.
    assert 0 <= candidate.scores.kld_mean < 2.0**-40
    assert "model.layers.0.mlp.gate.weight" in doubted
    assert all(".mlp." in name for name in doubted)
    assert "implausible_error" not in {finding.code for finding in report.findings}


def test_quantized_or_rotated_router_is_linear(experts, tmp_path):
    mixed = rotate(tmp_path / "quantized", experts, "_proj.weight", "gate.weight")
    report = quanterr.compare(experts, mixed)

    assert not {"ambiguous_layout", "implausible_error"} & {finding.code for finding in report.findings}


def test_unrotated_attention_is_an_error(experts, tmp_path):
    report = quanterr.compare(experts, rotate(tmp_path / "quantized", experts, "k_proj.weight"))
    wrong = {finding.layer for finding in report.findings if finding.code == "implausible_error"}

    assert {f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qvo"} == wrong
    assert Status.INCONCLUSIVE == exit_status(report)


def test_inputs_to_stacked_transformed_experts_are_not_rounded_unrotated(tmp_path):
    """The original holds the experts in one tensor and the file separately, so no rotation belongs to the stack."""
    place, x = "model.layers.0.mlp.experts", torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    save_file({f"{place}.down_proj": x}, tmp_path / "original.safetensors")
    tensors = {}
    for number, expert in enumerate(x):
        scale = expert.abs().amax(1, keepdim=True) / 448
        codes = {"weight": (expert / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        tensors |= {f"{place}.{number}.down_proj.{part}": tensor for part, tensor in codes.items()}
    config = json.loads((FOLDER / "random_hadamard" / "config.json").read_text())
    config["quantization_config"]["transform_config"]["config_groups"]["R4"] |= {"type": "hadamard"}
    rounded = {}
    for name, kept in (("transformed", config["quantization_config"]["transform_config"]), ("plain", {})):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        config["quantization_config"]["transform_config"] = kept
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with (
            open_checkpoint(tmp_path / "original.safetensors") as original,
            open_checkpoint(tmp_path / name) as candidate_file,
        ):
            rounding = Candidate(OriginalWeights(original), candidate_file, "declared", "none").rounding
            rounded[name] = list(rounding.inputs), rounding.why_not

    assert ([f"{place}.down_proj"], {}) == rounded["plain"]
    assert [] == rounded["transformed"][0]
    assert "declares a transform of its inputs" in rounded["transformed"][1][f"{place}.down_proj"]
