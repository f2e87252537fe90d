"""Every family takes made-up calls, and gates do not pass on them unless asked."""

import pytest
from safetensors.torch import save_file

import quanterr
from quanterr.errors import UsageError

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

pytestmark = [pytest.mark.session, pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")]

import torch  # noqa: E402
from support.denoisers import FAMILIES  # noqa: E402 - it imports diffusers

from quanterr.evaluation.denoisers.gaussian import make_calls  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_gaussian_calls(family):
    name, config, *_ = FAMILIES[family]
    torch.manual_seed(1)
    model = getattr(diffusers, name)(**config).eval()
    calls = make_calls("gaussian:2", model)
    calls.check(model)
    for call in calls.calls:
        with torch.no_grad():
            outputs = model(**call.arguments, return_dict=False)[0]
        assert all(output.isfinite().all() for output in outputs)
    assert [call.name for call in calls.calls] == ["0000", "0001"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gaussian") / "original"
    name, config, *_ = FAMILIES["FLUX.1"]
    torch.manual_seed(1)
    getattr(diffusers, name)(**config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("allowed", "verdict"), [(False, "inconclusive"), (True, "pass")])
def test_gates_on_gaussian_calls_must_be_allowed(allowed, verdict, original, tmp_path):
    evaluation = quanterr.evaluate(
        original, against=["int8_row"], inputs="gaussian:2", require=["output_snr_db >= 1"], allow_gaussian=allowed
    )
    evaluation.save(tmp_path / "e.md")

    assert (verdict, True) == (evaluation.verdict, evaluation.made_up)
    assert "Latents and conditionings were made up" in (tmp_path / "e.md").read_text()


def test_unknown_model_family_is_refused(original, tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="gaussian:1: quanterr cannot make up calls of DiTTransformer2DModel"):
        quanterr.evaluate(tmp_path, [tmp_path], inputs="gaussian:1")


@pytest.mark.parametrize("inputs", ["gaussian:0", "gaussian:-3", "gaussian:", "gaussian:many"])
def test_number_of_calls_is_checked(original, inputs):
    with pytest.raises(UsageError, match=f"inputs '?{inputs}'?: give a number of calls from 1 to 9999"):
        quanterr.evaluate(original, against=["int8_row"], inputs=inputs)
