"""The proposed command can be pasted and names existing files."""

import shlex
from types import SimpleNamespace

import pytest

from quanterr.cli.next_steps import suggest_after_plan, suggest_after_rank, suggest_after_report

COMMAND = ("quanterr", "compare", "a b", "q")
SURE = SimpleNamespace(verdict="pass", findings=[])


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ('{"model_type": "llama"}', ["--text", "FILE"]),
        ('{"_class_name": "FluxTransformer2DModel"}', ["--inputs", "CALLS"]),
    ],
)
def test_evaluation_with_suitable_input_is_proposed_next(config, asked, tmp_path):
    original = tmp_path / "it's"
    original.mkdir()
    (original / "config.json").write_text(config)

    suggestion = suggest_after_report(SURE, (str(original), "q"), COMMAND, [])
    assert ["quanterr", "evaluate", str(original), "q", *asked] == shlex.split(suggestion)


@pytest.mark.parametrize("config", [None, "{", "[]", '"text"'])
def test_page_is_proposed_next_without_a_model_unless_files_were_written(config, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)

    assert [*COMMAND, "-o", "report.html"] == shlex.split(suggest_after_report(SURE, (str(tmp_path), "q"), COMMAND, []))
    assert "" == suggest_after_report(SURE, (str(tmp_path), "q"), COMMAND, ["report.html"])


def candidate(path, rank, bits):
    return SimpleNamespace(path=path, name=path, rank=rank, bits_per_weight=bits, formats={path: 1})


def test_comparing_the_best_file_is_proposed_next():
    ranking = SimpleNamespace(candidates=[candidate("int8", None, 8), candidate("b b", 1, 8), candidate("c", 2, 4)])

    suggestion = suggest_after_rank(ranking, ["original", "int8", "c", "b b"], [])
    assert ["quanterr", "compare", "original", "b b", "-o", "report.html"] == shlex.split(suggestion)


def test_plan_between_the_candidate_sizes_is_proposed_next():
    ranking = SimpleNamespace(candidates=[candidate("int8_row", 1, 8.5), candidate("ct_pack", 2, 4.25)])

    suggestion = suggest_after_rank(ranking, ["original"], [])
    assert ["quanterr", "plan", "original", "--bits", "6.38", "--to", "int8_row,ct_pack"] == shlex.split(suggestion)
    assert "" == suggest_after_rank(SimpleNamespace(candidates=ranking.candidates[:1]), ["original"], [])


def test_no_plan_mixes_recipes_that_no_runtime_loads_together():
    names = ["gguf_q8_0", "int8_row", "gguf_q4_k", "ct_nvfp4"]
    ranking = SimpleNamespace(candidates=[candidate(name, n, 8 - n) for n, name in enumerate(names)])

    assert ["--to", "gguf_q8_0,gguf_q4_k"] == shlex.split(suggest_after_rank(ranking, ["original"], []))[-2:]


@pytest.mark.parametrize("stored", [True, False])
def test_proposal_keeps_the_selection_from_the_command(stored):
    ranking = SimpleNamespace(candidates=[candidate("int8_row", 1, 8), candidate("ct_pack", 2, 4)])
    shared = ["-l", "!vae", "-lattn", "--exclude=norm", "--importance", "a b.gguf", "--lenient"]
    command = ["quanterr", "rank", "original", "q", "c", *shared, "-o", "ranking.html", "--require", "snr_db > 3"]

    words = shlex.split(
        suggest_after_rank(ranking, ["original", "int8_row", "ct_pack"] if stored else ["original"], command)
    )
    assert shared == [word for word in words if word in shared]
    assert not {"ranking.html", "--require"} & set(words)


def test_proposed_budget_can_be_met_by_equally_large_recipes():
    ranking = SimpleNamespace(candidates=[candidate("int8_row", 1, 8.0331), candidate("fp8_row", 2, 8.0331)])

    assert "8.04" in shlex.split(suggest_after_rank(ranking, ["original"], []))


@pytest.mark.parametrize("export", [["--export", "mlx"], ["--export=mlx"]])
def test_exported_plan_is_not_exported_again(export):
    assert "" == suggest_after_plan(SimpleNamespace(), ["quanterr", "plan", "original", *export, "-o", "plan.json"])


def test_proposed_commands_repeat_no_credentials(tmp_path):
    command = ["quanterr", "compare", "https://host/x", "q"]
    suggestion = suggest_after_report(SURE, ("https://user:secret@host/x", "q"), command, [])
    assert "secret" not in suggestion
    ranking = SimpleNamespace(candidates=[candidate("https://u:secret@host/q", 1, 8), candidate("c", 2, 4)])
    paths = ["https://u:secret@host/x", "https://u:secret@host/q", "c"]
    assert "secret" not in suggest_after_rank(ranking, paths, [])
