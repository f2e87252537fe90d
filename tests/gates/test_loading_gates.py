"""``loads(vllm)``: a rule about the program that is to load the checkpoint."""

import pytest
from support.making import numbers, quantized_fp8, store
from typer.testing import CliRunner

import quanterr
from quanterr.cli import app
from quanterr.errors import Status, UsageError
from quanterr.gates.expression import parse

UP = "model.layers.0.mlp.up_proj"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FP8 = LLAMA | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}


@pytest.fixture
def pair(tmp_path):
    """Return an original, and its weight in FP8, which vLLM loads, llama.cpp refuses, and MLX may load."""
    original = store(tmp_path / "original", {f"{UP}.weight": numbers(64, 64)}, config=LLAMA)
    codes, scale = quantized_fp8(numbers(64, 64))
    return original, store(tmp_path / "fp8", {f"{UP}.weight": codes, f"{UP}.weight_scale": scale}, config=FP8)


@pytest.mark.parametrize(
    ("rule", "verdict", "expected_message"),
    [
        ("loads(vllm)", "pass", "gate loads(vllm) holds"),
        ("loads(vLLM)", "pass", "gate loads(vLLM) holds"),
        ("loads(llama.cpp)", "fail", "refuses: reads GGUF files alone"),
        ("loads(mlx)", "fail", "not known"),
    ],
)
def test_gate_holds_if_the_program_surely_loads_the_file(pair, rule, verdict, expected_message):
    report = quanterr.compare(*pair, require=[rule], device="cpu")

    assert verdict == report.verdict
    assert expected_message in report.gates[0].message


def test_gate_is_judged_again_from_what_is_stored(pair, tmp_path):
    report = quanterr.compare(*pair, runtimes=["all"], device="cpu")
    report.save(tmp_path / "report.json")

    for rule, status in (("loads(vllm)", Status.OK), ("loads(llama.cpp)", Status.GATE_FAILED)):
        assert status == CliRunner().invoke(app, ["gate", str(tmp_path / "report.json"), "--require", rule]).exit_code


def test_inspection_is_judged_as_well(pair, tmp_path):
    quanterr.inspect(pair[1], runtimes=["all"]).save(tmp_path / "inspection.json")
    done = CliRunner().invoke(app, ["gate", str(tmp_path / "inspection.json"), "--require", "loads(vllm)"])

    assert Status.OK == done.exit_code


def test_result_without_loading_verdicts_is_no_pass(pair):
    report = quanterr.compare(*pair, device="cpu")
    [gate] = quanterr.judge(report, require=["loads(vllm)"]).gates

    assert "fail" == gate.status
    assert "give --for vllm" in gate.message


def test_unknown_program_is_wrong_usage(pair):
    with pytest.raises(UsageError, match="no rules for the runtime vlm"):
        quanterr.compare(*pair, require=["loads(vlm)"], device="cpu")


@pytest.mark.parametrize("rule", ["loads(all)", "loads(vllm) >= 1", "loads()", "share(loads(vllm))", "loads"])
def test_invalid_loading_rule_is_refused(rule):
    with pytest.raises(UsageError):
        parse(rule)


def test_opposite_is_refused(pair):
    with pytest.raises(UsageError, match=r"loads\(vllm\): require it"):
        quanterr.compare(*pair, fail_if=["loads(vllm)"], device="cpu")


@pytest.mark.parametrize("suffix", ["html", "md", "xml"])
def test_outputs_hold_a_result_with_the_gate(pair, tmp_path, suffix):
    report = quanterr.compare(*pair, require=["loads(llama.cpp)", "loads(vllm)"], device="cpu")
    report.save(tmp_path / f"report.{suffix}")
    text = (tmp_path / f"report.{suffix}").read_text()

    assert "loads(llama.cpp)" in text
    assert ("tested statically" in text) == (suffix != "xml")
    assert ("loads (read)" in text) == (suffix != "xml")


def test_ranking_says_which_candidates_load(pair, tmp_path):
    ranking = quanterr.rank(pair[0], {"fp8": pair[1], "plain": pair[0]}, runtimes=["all"], device="cpu")
    ranking.save(tmp_path / "ranking.json")
    done = CliRunner().invoke(app, ["gate", str(tmp_path / "ranking.json"), "--require", "loads(mlx)"])

    assert ranking.verdict == "pass"
    assert "vLLM (0.33.0): loads (read): all candidates" in list(ranking.view(0).summary)
    assert "MLX (mlx-lm 0.32.2): loads (run): plain; not known: fp8" in list(ranking.view(0).summary)
    assert Status.GATE_FAILED == done.exit_code


def test_candidate_that_a_named_program_may_refuse_has_no_rank(pair):
    ranking = quanterr.rank(pair[0], {"fp8": pair[1], "plain": pair[0]}, runtimes=["mlx"], device="cpu")
    ranked, excluded = ranking.candidates

    assert ("inconclusive", 1, "plain", None) == (ranking.verdict, ranked.rank, ranked.name, excluded.rank)
    assert "MLX (mlx-lm 0.32.2): not known" in excluded.not_ranked


def test_candidates_of_a_ranking_are_judged(pair):
    ranking = quanterr.rank(pair[0], pair[1], against=["int8_row"], require=["loads(vllm)"], device="cpu")
    statuses = {candidate.name: [gate.status for gate in candidate.gates] for candidate in ranking.candidates}

    assert {"fp8": ["pass"], "int8_row": ["fail"]} == statuses  # a recipe makes no file that a runtime could load
