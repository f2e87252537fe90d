"""Rollouts of denoisers, compared with diffusers' own scheduler and forward."""

import json
import runpy
from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.float32 import of_squared_error
from support.simulated_device import NAME, UNKNOWN, simulate

import quanterr
from quanterr.errors import UsageError

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

from support.denoisers import call, make_model, nest  # noqa: E402 - it imports diffusers

pytestmark = pytest.mark.session

SIGMAS = [1.0, 0.7, 0.4]
SCALE = 3.0


@pytest.fixture(params=["SD3", "Z-Image"])
def family(request):
    return request.param


def path_of(model, family, seed, guided):
    """Return the final latents by diffusers' scheduler, and the arguments of each call of the model."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=SIGMAS)
    is_list = family == "Z-Image"
    name, sign = ("x.0", -1) if is_list else ("hidden_states", 1)
    branches = [call(family, seed), call(family, seed + 50)][: 1 + guided]
    latents, calls, steps = branches[0][name], [], []
    for timestep in scheduler.timesteps:
        outputs = []
        for arguments in branches:
            given = arguments | {name: latents}
            calls.append(given)
            with torch.no_grad():
                model_output = model(**nest(given), return_dict=False)[0]
            outputs.append(sign * (model_output[0] if is_list else model_output))
        velocity = outputs[-1] + SCALE * (outputs[0] - outputs[-1]) if guided else outputs[0]
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        steps.append(latents)
    return steps, calls


def write(family, path, groups, guided):
    tensors, described = {}, {}
    for group, calls in enumerate(groups):
        for n, arguments in enumerate(calls):
            step, branch = divmod(n, 1 + guided)
            key = f"{group}-{n:02}"
            tensors |= {f"{key}/{name}": value.clone() for name, value in arguments.items()}
            described[key] = {"group": f"seed {group}", "step": step, "sigma": SIGMAS[step]}
            if guided:
                branches = {"branch": ("conditional", "unconditional")[branch], "guidance_scale": SCALE}
                described[key] |= branches
    save_file(tensors, path, {"quanterr.inputs": json.dumps({"version": 1, "calls": described})})
    return path


@pytest.mark.parametrize("guided", [False, True])
def test_both_sides_follow_the_path_from_diffusers_scheduler(family, guided, tmp_path):
    model, _ = make_model(family, tmp_path / "original")
    base = [path_of(model, family, seed, guided) for seed in range(2)]
    inputs = write(family, tmp_path / "calls.safetensors", [calls for _, calls in base], guided)
    stored = load_file(next((tmp_path / "original").glob("*.safetensors")))
    rounded = {key: value.bfloat16() for key, value in stored.items()}
    save_file(rounded, tmp_path / "bf16.safetensors")
    model.load_state_dict({key: value.float() for key, value in rounded.items()})
    other = [path_of(model, family, seed, guided) for seed in range(2)]
    evaluation = quanterr.evaluate(tmp_path / "original", [tmp_path / "bf16.safetensors"], inputs=inputs, rollout=True)
    rollout = evaluation.candidates[0].rollout

    pairs = [
        [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
        for (a, _), (b, _) in zip(base, other, strict=True)
    ]
    errors = [[float((y - x).square().sum() / x.square().sum()) for x, y in steps] for steps in pairs]
    finals = [steps[-1] for steps in pairs]
    psnr = [10 * torch.log10((x.max() - x.min()) ** 2 / (y - x).square().mean()).item() for x, y in finals]
    cosines = [float((x * y).sum() / (x.norm() * y.norm())) for x, y in finals]

    mean = sum(steps[-1] for steps in errors) / 2
    relative = of_squared_error(mean) * len(SIGMAS)  # the model is called once for each step
    assert mean == pytest.approx(rollout.rollout_error, rel=relative)
    assert sum(psnr) / 2 == pytest.approx(rollout.rollout_psnr_db, abs=10 * relative / log(10))
    assert sum(cosines) / 2 == pytest.approx(rollout.rollout_cosine, abs=mean * relative)
    growth = [sum(steps[n] for steps in errors) / 2 for n in range(3)]
    for n, (step_errors, step) in enumerate(zip(growth, rollout.steps, strict=True), 1):
        assert step_errors == pytest.approx(step.output_error, rel=of_squared_error(step_errors) * n)
    assert abs(errors[0][-1] - errors[1][-1]) / 2 == pytest.approx(rollout.rollout_error_se, abs=mean * relative)
    assert [(0, 2), (1, 2), (2, 2)] == [(step.step, step.calls) for step in rollout.steps]


@UNKNOWN
def test_rollout_on_a_device_agrees_with_the_cpu(tmp_path):
    model, _ = make_model("SD3", tmp_path / "original")
    inputs = write("SD3", tmp_path / "calls.safetensors", [path_of(model, "SD3", 0, False)[1]], False)
    stored = load_file(next((tmp_path / "original").glob("*.safetensors")))
    save_file({key: value.bfloat16() for key, value in stored.items()}, tmp_path / "bf16.safetensors")

    def errors(device):
        sides = tmp_path / "original", [tmp_path / "bf16.safetensors"]
        [candidate] = quanterr.evaluate(*sides, inputs=inputs, rollout=True, device=device).candidates
        return [step.output_error for step in candidate.rollout.steps]

    here = errors("cpu")
    with simulate():
        on_device = errors(NAME)

    for n, (x, y) in enumerate(zip(here, on_device, strict=True), 1):
        assert x == pytest.approx(y, rel=n * of_squared_error(x))


def test_page_shows_the_rollout_and_rules_may_name_it(tmp_path):
    model, _ = make_model("SD3", tmp_path / "original")
    _, calls = path_of(model, "SD3", 0, False)
    inputs = write("SD3", tmp_path / "calls.safetensors", [calls], False)
    evaluation = quanterr.evaluate(
        tmp_path / "original", against=["int8_row"], inputs=inputs, rollout=True, require=["rollout_psnr_db >= 10"]
    )
    for suffix in ("md", "html", "csv", "json", "xml"):
        evaluation.save(tmp_path / f"e.{suffix}")

    assert "rollout_psnr_db &gt;= 10" in (tmp_path / "e.xml").read_text()
    assert ("pass", None) == (evaluation.verdict, evaluation.candidates[0].rollout.rollout_error_se)


class TestRefused:
    @pytest.fixture
    def evaluation(self, tmp_path):
        make_model("SD3", tmp_path / "original")

        def evaluate(described, n_calls=2, **changed):
            tensors = {}
            for n in range(n_calls):
                arguments = call("SD3", n) | changed
                tensors |= {f"{n}/{name}": value.contiguous() for name, value in arguments.items()}
            metadata = {"version": 1, "calls": {str(n): description for n, description in enumerate(described)}}
            save_file(tensors, tmp_path / "calls.sft", {"quanterr.inputs": json.dumps(metadata)})
            return quanterr.evaluate(
                tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "calls.sft", rollout=True
            )

        return evaluate

    @pytest.mark.parametrize(
        ("described", "says"),
        [
            ([{"group": "a", "step": 0}], "call 0 has no step and sigma in the metadata"),
            (
                [{"group": "a", "step": 0, "sigma": 0.5}, {"group": "a", "step": 1, "sigma": 0.5}],
                "group a: sigma does not fall from step to step",
            ),
            (
                [{"group": "a", "step": 0, "sigma": 0.5}, {"group": "a", "step": 0, "sigma": 0.5}],
                'group a, step 0: 2 calls; a step has one, or two whose "branch"',
            ),
            (
                [
                    {"group": "a", "step": 0, "sigma": 0.5, "branch": "conditional"},
                    {"group": "a", "step": 0, "sigma": 0.5, "branch": "unconditional"},
                ],
                "group a, step 0: two branches without a guidance_scale",
            ),
        ],
    )
    def test_calls_that_form_no_path_are_refused(self, evaluation, described, says):
        with pytest.raises(UsageError, match=says):
            evaluation(described)

    def test_text_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
        save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match="rollout: works only with denoisers, on recorded calls"):
            quanterr.evaluate(tmp_path, [tmp_path], text="a.txt", rollout=True)

    def test_model_that_predicts_noise_is_refused(self, tmp_path):
        make_model("SD 1.5", tmp_path / "original")
        tensors = {f"0/{name}": value for name, value in call("SD 1.5", 0).items()}
        save_file(tensors, tmp_path / "calls.sft")
        with pytest.raises(UsageError, match="rollout: works only with denoisers of flow matching"):
            quanterr.evaluate(
                tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "calls.sft", rollout=True
            )


def test_example_records_sigmas_and_branches(tmp_path):
    model, _ = make_model("SD3", tmp_path / "original")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "capture_inputs.py"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=SIGMAS)
    recorder = example["Recorder"](model, scheduler=scheduler, guidance_scale=SCALE)
    with recorder, recorder.group("a"):
        steps, _ = path_of(model, "SD3", 0, True)
    recorder.save(tmp_path / "calls.safetensors")
    evaluation = quanterr.evaluate(
        tmp_path / "original", against=["int8_row"], inputs=tmp_path / "calls.safetensors", rollout=True
    )

    assert [0, 1, 2] == [step.step for step in evaluation.candidates[0].rollout.steps]
    assert 0 < evaluation.candidates[0].rollout.rollout_error < 1
    assert len(steps) == 3
