"""The sensitivity of a denoiser's output to its weights, compared with plain autograd and with actual errors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import quanterr
from quanterr.errors import UsageError
from quanterr.evaluation.files.gauss_newton import SEED
from quanterr.evaluation.run import study

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

from support.denoisers import call, make_model, nest, write_calls  # noqa: E402 - it imports diffusers

pytestmark = pytest.mark.session

N_CALLS = 4
# Both compute in float64, in the same order but for sums: about n roundings of 2^-53, n below 1e5 terms.
FLOAT64 = 1e-9


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A small FLUX in both namings, recorded calls, and the sensitivity of each with five candidates."""
    folder = tmp_path_factory.mktemp("flux")
    model, tensors = make_model("FLUX.1", folder / "original")
    save_file(tensors, folder / "original.safetensors")
    inputs = write_calls("FLUX.1", folder / "calls.safetensors", N_CALLS)
    stored = load_file(next((folder / "original").glob("*.safetensors")))
    paths = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        changed = {
            key: value + 0.003 * value.std() * torch.randn(value.shape, generator=generator)
            if value.dim() > 1
            else value
            for key, value in stored.items()
        }
        paths.append(folder / f"{seed}.safetensors")
        save_file(changed, paths[-1])
    curvatures = {}
    for name, original, options in (
        ("folder", folder / "original", {}),
        ("file", folder / "original.safetensors", {"config": folder / "original"}),
    ):
        s = folder / f"{name}.json"
        curvatures[name] = quanterr.evaluate(
            original, paths, inputs=inputs, dtype="float64", sensitivity=s, sensitivity_chunks=N_CALLS, **options
        )
    return folder, model.double(), curvatures


def plain_squares(model, family, n_calls):
    """Return Σ over calls of the squared gradients of u · y / ‖y‖, by autograd through the whole model."""
    generator = torch.Generator().manual_seed(SEED)
    squares = {}
    for number in range(n_calls):
        arguments = {
            key: value.double() if value.is_floating_point() and value.dim() > 1 and not key.endswith("_ids") else value
            for key, value in call(family, number).items()
        }
        model.zero_grad()
        output = model(**nest(arguments), return_dict=False)[0]
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
        ((output * signs).sum() / output.detach().norm()).backward()
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                squares[key] = squares.get(key, 0) + parameter.grad.square()
    return squares


def alpha_of(squares, weight):
    """Return the cost of an error with an NMSE of 1 in each row, spread evenly."""
    return float((squares.flatten(1).mean(1) * weight.flatten(1).square().sum(1)).sum())


def alphas(path):
    document = json.loads(path.read_text())
    return {row["layer_name"]: row["alpha"] for row in document["weights"]}, document


def test_alpha_equals_plain_autograd(flux):
    folder, model, _ = flux
    squares = plain_squares(model, "FLUX.1", N_CALLS)
    computed, document = alphas(folder / "folder.json")
    weights = {key: weight.detach() for key, weight in model.named_parameters() if weight.dim() > 1}

    assert computed.keys() == weights.keys()
    for key, weight in weights.items():
        want = alpha_of(squares[key], weight) / N_CALLS
        assert computed[key] == pytest.approx(want, rel=FLOAT64), key
    assert ("output error", N_CALLS) == (document["cost"], document["tokens"]["scored"])


def test_prediction_weighs_each_element(flux):
    folder, model, curvatures = flux
    squares = plain_squares(model, "FLUX.1", N_CALLS)
    other = load_file(folder / "0.safetensors")
    weights = dict(model.named_parameters())
    for row in curvatures["folder"].candidates[0].weights:
        error = other[row.layer_name].double() - weights[row.layer_name].detach()
        want = float((error.square() * squares[row.layer_name]).sum()) / N_CALLS
        assert row.predicted_output_error == pytest.approx(want, rel=FLOAT64), row.layer_name


def test_fused_weights_cost_the_sum_over_their_parts(flux):
    folder, _, curvatures = flux
    of_parts, _ = alphas(folder / "folder.json")
    fused, _ = alphas(folder / "file.json")
    block = "transformer_blocks.0.attn.to_"

    assert fused["double_blocks.0.img_attn.qkv.weight"] == pytest.approx(
        sum(of_parts[f"{block}{projection}.weight"] for projection in "qkv"), rel=FLOAT64
    )
    for a, b in zip(curvatures["folder"].candidates, curvatures["file"].candidates, strict=True):
        assert a.predicted_output_error == pytest.approx(b.predicted_output_error, rel=FLOAT64)


def test_prediction_agrees_with_independent_errors(flux):
    """For one draw the error is a sum of squares of a few dominant directions. For five draws and four probes the means
    agree within a factor of two.
    """
    _, _, curvatures = flux
    candidates = curvatures["folder"].candidates
    predicted, measured = (
        sum(values)
        for values in (
            [candidate.predicted_output_error for candidate in candidates],
            [candidate.outputs.output_error for candidate in candidates],
        )
    )

    assert 0.5 < predicted / measured < 2


class TestReaders:
    """compare, sweep and plan predict the output error with a sensitivity and mention it."""

    def test_compare_predicts_from_alpha(self, flux):
        folder, _, _ = flux
        path = next((folder / "original").glob("*.safetensors"))
        report = quanterr.compare(path, folder / "0.safetensors", sensitivity=folder / "folder.json", device="cpu")
        known, _ = alphas(folder / "folder.json")
        layers = {layer.layer_name: layer for layer in report.layers}
        a, b = (
            load_file(path_of_side)["proj_out.weight"].double() for path_of_side in (path, folder / "0.safetensors")
        )
        nmse = float((b - a).square().sum() / a.square().sum())

        assert layers["proj_out.weight"].predicted_output_error == pytest.approx(
            known["proj_out.weight"] * nmse, rel=1e-9
        )
        assert layers["proj_out.weight"].predicted_kld is None is report.aggregate.predicted_kld
        assert report.aggregate.predicted_output_error == pytest.approx(
            sum(layers[name].predicted_output_error for name in known), rel=1e-9
        )

    def test_sweep_and_plan_use_the_prediction(self, flux):
        folder, _, _ = flux
        asked = {"sensitivity": folder / "folder.json", "device": "cpu"}
        ranking = quanterr.sweep(folder / "original", ["int8_row", "int4_g32"], **asked)
        plan = quanterr.plan(folder / "original", bits=6.5, to=["int8_row,int4_g32"], **asked)
        cheapest = quanterr.plan(folder / "original", max_output_error=plan.cost, to=["int8_row,int4_g32"], **asked)
        plan.save(folder / "plan.md")
        ranking.save(folder / "ranking.md")
        text = (folder / "plan.md").read_text()

        predicted = [candidate.predicted_output_error for candidate in ranking.candidates]
        assert predicted == sorted(predicted)
        assert "predicted output error" in (folder / "ranking.md").read_text()
        assert ("predicted output error", True) == (plan.measure, plan.cost < max(predicted))
        assert "KLD" not in text
        assert cheapest.bytes <= plan.bytes
        assert cheapest.cost <= plan.cost
        assert cheapest.goal.startswith("--max-output-error")

    def test_limit_on_the_other_cost_is_refused(self, flux):
        with pytest.raises(
            UsageError, match=r"max_kld: .*folder.json gives a predicted output error, and no predicted KLD"
        ):
            quanterr.plan(flux[0] / "original", max_kld=0.1, sensitivity=flux[0] / "folder.json")


def test_convolution_kernels_have_a_sensitivity(tmp_path):
    model, _ = make_model("SD 1.5", tmp_path / "original")
    inputs = write_calls("SD 1.5", tmp_path / "calls.safetensors", 1)
    study(tmp_path / "original", inputs=inputs, dtype="float64", sensitivity=tmp_path / "s.json")
    computed, _ = alphas(tmp_path / "s.json")
    squares = plain_squares(model.double(), "SD 1.5", 1)
    kernel = dict(model.named_parameters())["conv_in.weight"].detach()
    want = alpha_of(squares["conv_in.weight"], kernel)

    assert computed["conv_in.weight"] == pytest.approx(want, rel=FLOAT64)
    assert computed.keys() == squares.keys()
