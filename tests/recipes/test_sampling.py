"""A sweep over a sample of rows is close to the full sweep, within its stated margin."""

import json

import pytest
import torch
from support.forked import call
from support.importance_files import gguf
from support.making import store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError, Status, UsageError
from quanterr.recipes.matrices import matrices_of
from quanterr.recipes.sampling import MIN_RUNS, RUN_BYTES, draw_runs, parse_share

# Errors, their squares and products with importances are rounded to float32 on one side, at most four times each side.
ROUNDINGS = 8 * 2.0**-24
RECIPES = ["int8_row", "int8_tensor", "fp8_block128", "int4_g32", "nf4", "nf4:double", "nvfp4", "gguf_q4_0"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Weights with rows of different sizes, and a norm."""
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for n in range(12):
        rows = 400 + 16 * n
        sizes = torch.randn(rows, 1, generator=random).mul(0.4).exp()
        tensors[f"model.layers.{n}.mlp.up_proj.weight"] = (torch.randn(rows, 128, generator=random) * sizes).bfloat16()
    tensors["model.norm.weight"] = torch.ones(128)
    return store(tmp_path_factory.mktemp("sampled") / "x.safetensors", tensors)


@pytest.fixture(scope="module")
def both(original):
    return quanterr.sweep(original, RECIPES, device="cpu"), quanterr.sweep(original, RECIPES, sample="20%")


def choices(ranking):
    return {(layer.layer_name, choice.candidate): choice for layer in ranking.layers for choice in layer.choices}


def test_estimates_are_within_their_stated_margin(both):
    full, sampled = map(choices, both)
    assert full.keys() == sampled.keys()
    off = {key: abs(sampled[key].snr_db - full[key].snr_db) for key in full}
    within = sum(off[key] <= sampled[key].snr_db_margin + 1e-6 for key in full)

    assert within >= 0.95 * len(full)
    assert max(off.values()) > 1e-3  # the SNRs are estimates, so they differ
    assert sum(choice.snr_db_margin for choice in sampled.values()) < 0.5 * len(sampled)


def test_sizes_and_formats_are_exact(both):
    full, sampled = both
    known = {candidate.name: candidate for candidate in full.candidates}
    for candidate in sampled.candidates:
        same = ("bytes", "bits_per_weight", "formats", "checkpoint_bytes")
        assert [getattr(candidate, key) for key in same] == [getattr(known[candidate.name], key) for key in same]
    assert {key: (c.bytes, c.format) for key, c in choices(full).items()} == {
        key: (c.bytes, c.format) for key, c in choices(sampled).items()
    }
    assert (None, 0.2) == (full.sample, sampled.sample)


def test_reading_all_rows_leaves_no_margin(tmp_path):
    x = {"a.up_proj.weight": torch.randn(6, 64, generator=torch.Generator().manual_seed(1))}
    path = store(tmp_path / "x.safetensors", x)
    full, sampled = (
        quanterr.sweep(path, ["int8_row", "int4_g32"], **more) for more in ({"device": "cpu"}, {"sample": "10%"})
    )
    for key, choice in choices(sampled).items():
        assert (pytest.approx(choices(full)[key].snr_db, abs=1e-6), 0) == (choice.snr_db, choice.snr_db_margin)


def test_tensor_scale_covers_all_rows(tmp_path):
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    x[7, 0] = 100  # this row is not read
    path = store(tmp_path / "x.safetensors", {"a.up_proj.weight": x})
    with open_checkpoint(path) as checkpoint:
        [matrix] = matrices_of("a.up_proj.weight", checkpoint.entries)
        assert not any(first <= 7 < stop for first, stop in draw_runs(matrix, 0.1, 1).spans())
    (full,), (sampled,) = (
        quanterr.sweep(path, ["int8_tensor"], **more).candidates for more in ({"device": "cpu"}, {"sample": "10%"})
    )

    assert full.snr_db < 20
    assert pytest.approx(full.snr_db, abs=3) == sampled.snr_db


@pytest.mark.parametrize(("rows", "cols", "together"), [(4096, 4096, 1), (4096, 4096, 128), (300, 64, 16), (5, 64, 4)])
def test_runs_are_a_share_spread_over_all_rows(tmp_path, rows, cols, together):
    entries = open_checkpoint(store(tmp_path / "x.safetensors", {"x": torch.zeros(rows, cols).bfloat16()})).entries
    [matrix] = matrices_of("x", entries)
    runs = draw_runs(matrix, 0.1, together)
    spans = runs.spans()

    assert runs == draw_runs(matrix, 0.1, together)
    assert all(first % together == 0 and first < stop <= rows for first, stop in spans)
    assert sorted(spans) == spans
    assert len(set(spans)) == len(spans) == max(round(0.1 * runs.total), min(MIN_RUNS, runs.total))
    assert runs.height == together or runs.height * cols * 2 <= RUN_BYTES


@pytest.mark.parametrize("text", ["10", "0%", "100%", "-5%", "%", "ten%", "nan%"])
def test_share_is_part_of_the_rows(text):
    assert (0.1, 0.025) == (parse_share("10%"), parse_share("2.5 %"))
    with pytest.raises(UsageError, match="between 0 and 100 %, such as 10%"):
        parse_share(text)


class TestImportanceAndSensitivity:
    """With all rows read, an estimate equals the full sweep; with some of them, it is close."""

    @pytest.fixture
    def small(self, tmp_path):
        """Weights with few rows, which are all read; the importance of their columns, and one sensitivity."""
        random = torch.Generator().manual_seed(3)
        names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(2)]
        path = store(tmp_path / "x.safetensors", {n: torch.randn(6, 64, generator=random) for n in names})
        means = [torch.rand(64, generator=random).add(0.1).tolist() for _ in names]
        gguf(tmp_path / "i.gguf", {f"blk.{n}.ffn_up.weight": ([of], [9.0]) for n, of in enumerate(means)})
        weights = [{"layer_name": names[0], "alpha": 2.0, "alphas": {"int4_g32": 3.0}}]
        (tmp_path / "s.json").write_text(
            json.dumps({"schema": "quanterr.sensitivity", "schema_version": "1.3", "weights": weights})
        )
        return path, {"importance": tmp_path / "i.gguf", "sensitivity": tmp_path / "s.json"}

    def test_importance_and_sensitivity_equal_all_rows(self, small):
        path, files = small
        full, sampled = (
            quanterr.sweep(path, ["int8_row", "int4_g32", "gguf_q4_k"], **files, **more)
            for more in ({"device": "cpu"}, {"sample": "10%"})
        )
        for a, b in zip(full.candidates, sampled.candidates, strict=True):
            assert a.name == b.name
            for metric in ("snr_db", "weighted_snr_db", "predicted_kld"):
                assert getattr(a, metric) == pytest.approx(getattr(b, metric), rel=ROUNDINGS), (a.name, metric)
            assert "sensitivity_missing" in {finding.code for finding in b.findings}

    def test_sensitivity_from_another_model_is_refused(self, small, tmp_path):
        other = store(tmp_path / "other.safetensors", {"a.up_proj.weight": torch.ones(6, 64)})
        with pytest.raises(UsageError, match="names none of the compared weights"):
            quanterr.sweep(other, ["int8_row"], sample="10%", sensitivity=small[1]["sensitivity"])


def test_nan_is_an_error(tmp_path):
    x = torch.full((64, 64), torch.nan)
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        quanterr.sweep(store(tmp_path / "x.safetensors", {"a.up_proj.weight": x}), ["int8_row"], sample="10%")


def test_command_shows_margins_and_calls_the_result_an_estimate(original, tmp_path):
    done = call("sweep", "-v", original, "--to", "int8_row,int4_g32", "--sample", "20%", "-o", tmp_path / "s.json")
    document = json.loads((tmp_path / "s.json").read_text())

    assert Status.OK == done.returncode, done.stderr
    assert " ± " in done.stdout
    assert "; estimated from 20 % of the rows\n" in done.stdout
    assert 0.2 == document["sample"]
    assert all(candidate["snr_db_margin"] > 0 for candidate in document["candidates"])


def test_rules_are_refused_in_the_library_too(original):
    with pytest.raises(UsageError, match="sample cannot be combined with rules"):
        quanterr.sweep(original, ["int8_row"], sample="20%", require=["snr_db >= 1000"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--require", "snr_db >= 3"), "--sample cannot be combined with rules, which need all rows"),
        (("--resume", "j"), "--resume: needs all rows"),
        (("--device", "cuda"), "a sample is measured on the CPU"),
    ],
)
def test_options_that_need_all_rows_are_refused(original, words, message):
    done = call("sweep", original, "--sample", "20%", *words)

    assert Status.USAGE == done.returncode
    assert message in done.stderr
