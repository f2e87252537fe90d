import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_stored import TEXT, Stored, key, write_gguf
from support.importance_files import gguf
from support.making import legacy, numbers, quantized_fp8, store
from typer.testing import CliRunner

import quanterr
from quanterr.cli import app
from quanterr.errors import CheckpointError
from quanterr.pairing.importance import read_importance

NAME = "model.layers.0.self_attn.q_proj.weight"
COLUMNS = np.linspace(0.1, 4, 64, dtype=np.float32)


def store_means(path, form, means):
    if form == "gguf":
        return gguf(path, {"blk.0.attn_q.weight": ([means], [12.0])})
    path.write_bytes(legacy({"blk.0.attn_q.weight": means}))
    return path


def compute_expected(x, y, means):
    x, y, means = (np.asarray(a, np.float64) for a in (x, y, means))
    return (means * (y - x) ** 2).sum() / (means * x**2).sum()


def layer(folder, x, y, importance, **more):
    a = store(folder / "x.safetensors", {NAME: x} | more)
    b = store(folder / "y.safetensors", {NAME: y} | more)
    return quanterr.compare(a, b, importance=importance, device="cpu")


@pytest.mark.parametrize("form", ["gguf", "dat"])
@pytest.mark.parametrize("odd", [False, True], ids=["tame", "with NaN"])
def test_error_is_weighted_by_columns(tmp_path, form, odd):
    x = numbers(48, 64).float()
    y = x + 0.01 * numbers(48, 64, seed=1).float()
    means = COLUMNS
    if odd:  # the sums are then computed exactly
        x[3, 5] = 1e30
        y[3, 5] = 1e30
    report = layer(tmp_path, x, y, store_means(tmp_path / f"m.{form}", form, means))
    want = compute_expected(x, y, means)

    assert pytest.approx(want, rel=1e-6) == report.layers[0].weighted_nmse == report.aggregate.weighted_nmse
    assert pytest.approx(-10 * np.log10(want), rel=1e-6) == report.layers[0].weighted_snr_db
    energy = ((y - x).double().square().numpy() * np.asarray(means)).sum()
    assert pytest.approx(np.sqrt(energy), rel=1e-6) == report.layers[0].weighted_error_norm
    assert str(tmp_path / f"m.{form}") == report.settings.importance


def test_weighted_error_is_undefined_without_a_matrix(tmp_path):
    report = layer(tmp_path, numbers(8, 64), numbers(8, 64, seed=1), None)

    assert None is report.layers[0].weighted_nmse is report.aggregate.weighted_snr_db


@pytest.mark.parametrize("single", [False, True], ids=["stacked", "single experts"])
def test_each_expert_has_its_own_importance(tmp_path, single):
    means = np.stack([COLUMNS, COLUMNS[::-1], np.full(64, 9)])
    x, y = numbers(3, 40, 64).float(), numbers(3, 40, 64, seed=1).float()
    path = gguf(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (means, [5, 6, 0])})
    names = ["model.layers.0.mlp.experts.up_proj"]
    tensors = [{names[0]: side} for side in (x, y)]
    if single:
        names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(3)]
        tensors = [{name: side[e].clone() for e, name in enumerate(names)} for side in (x, y)]
    files = [store(tmp_path / f"{n}.safetensors", side) for n, side in enumerate(tensors)]
    report = quanterr.compare(*files, importance=path, device="cpu")
    means[2] = 1  # never counted
    want = compute_expected(x, y, means[:, None])

    assert pytest.approx(want, rel=1e-6) == report.aggregate.weighted_nmse
    assert "importance_uncovered" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("experts", [3, 4])  # whether 40 rows can be divided among the matrices of a stack
@pytest.mark.parametrize(
    "single", ["mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"], ids=["Qwen", "Mixtral"]
)
@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_single_experts_next_to_a_stack_have_their_own_importance(tmp_path, experts, single, form):
    means = np.stack([np.roll(COLUMNS, 7 * e) for e in range(experts)])
    x, y = numbers(experts, 40, 64).float(), numbers(experts, 40, 64, seed=1).float()
    stack = "blk.0.ffn_up_exps.weight"
    names = [f"model.layers.0.{single.format(e)}.weight" for e in range(experts)]
    original = store(tmp_path / "x.safetensors", {name: x[e].clone() for e, name in enumerate(names)})
    quantized = write_gguf(
        tmp_path / "y.gguf",
        [Stored(stack, "F32", tuple(y.shape), y.numpy().tobytes())],
        [key("general.architecture", TEXT, "llama")],
    )
    path = tmp_path / f"m.{form}"
    if form == "gguf":
        gguf(path, {stack: (means, [5, 0, *range(6, 4 + experts)])})
        means[1] = 1  # never counted
    else:
        path.write_bytes(legacy({stack: means}))
    report = quanterr.compare(original, quantized, importance=path, device="cpu")
    errors = {row.layer_name: row.weighted_nmse for row in report.layers}

    assert {
        name: pytest.approx(compute_expected(x[e], y[e], means[e]), rel=1e-6) for e, name in enumerate(names)
    } == errors
    assert ([1] if form == "gguf" else []) == [
        finding.evidence["experts"] for finding in report.findings if finding.code == "importance_uncovered"
    ]


def test_expert_missing_in_the_stack_has_no_importance(tmp_path):
    path = gguf(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (np.stack([COLUMNS] * 2), [5, 6])})
    names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(3)]
    files = [store(tmp_path / f"{n}.safetensors", {name: numbers(40, 64, seed=n) for name in names}) for n in range(2)]
    report = quanterr.compare(*files, importance=path, device="cpu")

    assert [True, True, False] == [row.weighted_nmse is not None for row in report.layers]
    assert names[2] in next(f.message for f in report.findings if f.code == "importance_missing")


def test_weights_missing_in_the_matrix_are_named(tmp_path):
    more = {"model.layers.0.mlp.up_proj.weight": numbers(8, 64, seed=3)}
    report = layer(
        tmp_path, numbers(8, 64), numbers(8, 64, seed=1), store_means(tmp_path / "m.dat", "dat", COLUMNS), **more
    )

    assert "mlp.up_proj" in next(f.message for f in report.findings if f.code == "importance_missing")


@pytest.mark.parametrize(
    ("covered", "severity"),
    [(10, "warning"), (18, "warning"), (19, "info"), (20, "info")],
    ids=["half", "all but a block", "all but a weight", "all but the head and a router"],
)
def test_expected_weights_missing_in_the_matrix_are_a_warning(tmp_path, covered, severity):
    names = [f"model.layers.{n}.mlp.{projection}_proj.weight" for n in range(10) for projection in ("up", "gate")]
    x = {name: numbers(8, 64, seed=n) for n, name in enumerate(["lm_head.weight", *names])}
    router = {"model.layers.0.mlp.gate.weight": numbers(8, 64, seed=99)}
    y = {}
    for name, weight in x.items():
        y[name], y[f"{name}_scale"] = quantized_fp8(weight)
    matrix = tmp_path / "m.dat"
    matrix.write_bytes(legacy({f"blk.{n // 2}.ffn_{('up', 'gate')[n % 2]}.weight": COLUMNS for n in range(covered)}))
    files = [store(tmp_path / "x.safetensors", x | router), store(tmp_path / "y.safetensors", y | router)]
    report = quanterr.compare(*files, importance=matrix, device="cpu")
    (finding,) = [finding for finding in report.findings if finding.code == "importance_missing"]
    layers = [row for row in report.layers if row.weighted_nmse is not None]

    assert severity == finding.severity
    assert (severity == "warning") == (
        f"{20 - covered} of 20 quantized weights, {1 - covered / 20:.0%}" in finding.message
    )
    assert pytest.approx(1 - covered / 20) == finding.evidence["share"]
    assert covered == len(layers)
    energy = [row.weighted_error_norm**2 for row in layers]
    total = sum(e / row.weighted_nmse for e, row in zip(energy, layers, strict=True))
    assert pytest.approx(sum(energy) / total, rel=1e-6) == report.aggregate.weighted_nmse


def test_matrix_without_columns_is_refused(tmp_path):
    path = gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (np.zeros((1, 0)), [1])})

    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight: no mean squares"):
        read_importance(path)


def test_matrix_for_another_model_is_an_error(tmp_path):
    path = tmp_path / "m.dat"
    path.write_bytes(legacy({"blk.77.attn_q.weight": COLUMNS}))
    report = layer(tmp_path, numbers(8, 64), numbers(8, 64, seed=1), path)

    assert "inconclusive" == report.verdict
    assert "importance_unmatched" in {finding.code for finding in report.findings}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not an importance matrix"),
        (b"\x00\x00\x00\x00", "number of entries is 0"),
        (legacy({"a": COLUMNS})[:40], "truncated"),
        (legacy({"a": COLUMNS * np.nan}), "not finite"),
        (legacy({"a": -COLUMNS}), "negative"),
    ],
    ids=["empty", "no entry", "truncated", "NaN", "negative"],
)
def test_damaged_legacy_files_are_refused(tmp_path, raw, says):
    (tmp_path / "m.dat").write_bytes(raw)
    with pytest.raises(CheckpointError, match=says):
        read_importance(tmp_path / "m.dat")


def test_model_is_not_an_importance_matrix(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", [Stored("a")], [key("general.architecture", TEXT, "llama")])
    with pytest.raises(CheckpointError, match=r"general\.type"):
        read_importance(path)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("any") / "m.dat"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        read_importance(path)


def test_missing_file_exits_with_3(tmp_path):
    path = store(tmp_path / "x.safetensors", {NAME: numbers(8, 64)})
    done = CliRunner().invoke(app, ["compare", str(path), str(path), "--importance", str(tmp_path / "no.dat")])

    assert isinstance(done.exception, CheckpointError)


@pytest.mark.parametrize("given", [True, False])
def test_scales_for_important_columns_count_as_good_with_their_importance(tmp_path, given):
    x = numbers(64, 64).float()
    x[:, 32:] *= 5
    scale = x[:, :32].abs().amax(1, keepdim=True) / 127
    stored = {NAME: (x / scale).round().clamp(-127, 127).to(torch.int8), f"{NAME}_scale": scale}
    means = np.repeat(np.float32([1.0, 1e-9]), 32)
    importance = gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": ([means], [12.0])}) if given else None
    a, b = store(tmp_path / "x.safetensors", {NAME: x}), store(tmp_path / "y.safetensors", stored)
    report = quanterr.compare(a, b, importance=importance, device="cpu")
    codes = {finding.code for finding in report.findings if finding.severity != "info"}

    assert given != ("scale_loss" in codes)
