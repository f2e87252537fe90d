"""The experts that routers choose, compared with plain transformers."""

import inspect

import pytest
import torch
from safetensors.torch import load_file
from support.small_models import auto_of, ids, save_model
from test_evaluate import CONTEXT, EXACTLY, candidate

import quanterr

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


def coarse(weight):
    """Return codes from -3 to 3 with a scale for each row, so that routers must disagree."""
    scale = weight.abs().amax(1, keepdim=True) / 3
    return (weight / scale).round().to(torch.int8), scale


def route(name, folder, chunks):
    """Return each router's logits and experts for all tokens, by a plain model."""
    model = auto_of(name).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    routing = {}
    for path, module in model.named_modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, __, output, path=path: routing.update({path: output}))
    with torch.inference_mode():
        model(input_ids=chunks, use_cache=False)
    return routing


def measure(folder, name, **options):
    original, tokens = save_model(name, folder / "original"), ids(folder, 8 * CONTEXT)
    quantized, values = candidate(original, coarse)
    evaluation = quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, **EXACTLY | options)
    return original, values, load_file(tokens)["ids"].view(-1, CONTEXT), evaluation


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "llama4"])
def test_router_agreement_equals_plain_transformers(name, tmp_path):
    """DeepSeek's router computes in float32, from inputs that differ by roundings of float64."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    if name == "deepseek_v3" and "return router_logits\n" in inspect.getsource(DeepseekV3TopkRouter.forward):
        pytest.skip("this transformers' router of DeepSeek does not return the experts that it chooses")
    original, values, chunks, evaluation = measure(tmp_path, name)
    x, y = (route(name, folder, chunks) for folder in (original, values))
    rows = {row.name: row for row in evaluation.candidates[0].routers}

    assert set(x) == set(rows)
    for router, row in rows.items():
        if name == "llama4":  # weights, zero except for the chosen expert, and logits
            logits = [side[router][1].double() for side in (x, y)]
            chosen = [side[router][0] > 0 for side in (x, y)]
        else:
            logits = [side[router][0].double() for side in (x, y)]
            chosen = [torch.zeros(logits[0].shape).scatter(1, side[router][2], 1) > 0 for side in (x, y)]
        log_p, log_q = (logit.log_softmax(-1) for logit in logits)

        assert row.same_experts == float((chosen[0] == chosen[1]).all(-1).double().mean())
        assert row.router_kld == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-5)
        assert (8 * CONTEXT, 4, 1 if name == "llama4" else 2) == (row.tokens, row.experts, row.chosen)
    assert min(row.same_experts for row in rows.values()) < 1


def test_every_output_has_routers_and_gates_hold(tmp_path):
    _, _, _, evaluation = measure(tmp_path, "mixtral", require=["min(same_experts) >= 0.999"])
    for ending in ("md", "csv", "json"):
        evaluation.save(tmp_path / f"e.{ending}")
    worst = min(evaluation.candidates[0].routers, key=lambda row: row.same_experts)

    assert f"routers,quantized,{worst.name},same_experts,{worst.same_experts!r}" in (tmp_path / "e.csv").read_text()
    assert evaluation.candidates == quanterr.read_document(str(tmp_path / "e.json")).candidates
    assert ("fail", worst.same_experts) == (evaluation.verdict, evaluation.candidates[0].gates[0].observed)


def test_batches_add_up_to_the_whole(tmp_path):
    _, _, _, whole = measure(tmp_path, "mixtral")
    tokens = tmp_path / "ids.safetensors"
    evaluation = quanterr.evaluate(
        tmp_path / "original", [tmp_path / "quantized"], tokens=tokens, context=CONTEXT, dtype="float64", batch=1
    )

    for row, other in zip(whole.candidates[0].routers, evaluation.candidates[0].routers, strict=True):
        assert (row.name, row.tokens, row.same_experts) == (other.name, other.tokens, other.same_experts)
        assert row.router_kld == pytest.approx(other.router_kld, rel=1e-9)


def test_dense_model_has_no_routers(tmp_path):
    _, _, _, evaluation = measure(tmp_path, "llama")

    assert [] == evaluation.candidates[0].routers
