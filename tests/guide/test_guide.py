"""README and guide show the program's actual output; guide and explain find every page and name."""

import json
import re
import shlex
import shutil
import subprocess
from itertools import takewhile

import make_guide
import pytest
import typer
from support.forked import call, in_terminal
from support.making import quantized_fp8
from support.small_models import ids, quantized_by, save_model
from support.small_models import load_tensors as read_stored
from support.stored import pair, write

import quanterr
from quanterr import cli, guide
from quanterr.errors import Status, UsageError

pytestmark = pytest.mark.session

README = make_guide.README.read_text()
PAGE_OF_JQ = (guide.PAGES / "automation.md").read_text()
RECIPES = re.findall(r"^jq ((?:-es )?'[^']+') report\.json$", PAGE_OF_JQ, re.MULTILINE)
ISSUED = [
    "'.layers | sort_by(.snr_db) | .[0:5]'",
    "'.layers | map({name: .layer_name, mae: .mean_absolute_error})'",
    "'.aggregate | {mae: .mean_absolute_error, snr: .overall_snr_db}'",
]

needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


@pytest.mark.parametrize(
    ("page", "part"), [(page, part) for page in make_guide.PAGES for part in make_guide.parts_of(page)]
)
def test_generated_part_is_up_to_date(page, part):
    assert make_guide.PARTS[part]() == make_guide.between(page.read_text(), part)


def test_every_part_has_its_place():
    assert make_guide.PARTS.keys() == {part for page in make_guide.PAGES for part in make_guide.parts_of(page)}


def test_readme_is_short():
    assert len(README.encode()) <= 12_000


def test_readme_counts_the_formats():
    assert {str(len(quanterr.FORMATS))} == set(re.findall(r"(\d+)\s+(?:layouts|\[formats\])", README))


class TestGuide:
    def test_guide_is_short(self):
        pages = [(guide.PAGES / f"{topic}.md").read_text() for topic in guide.TOPICS]
        made = r"<!-- (?!findings:)([a-z-]+): made by .*?<!-- /\1 -->"  # entries of findings are written by hand
        written = [guide.MARKER.sub("", re.sub(made, "", page, flags=re.DOTALL)) for page in pages]

        assert sum(len(page.split()) for page in written) <= 11_700

    @pytest.mark.parametrize("topic", guide.TOPICS)
    def test_each_page_begins_with_a_command(self, topic):
        assert re.match(r"# .+\n\n.+\n\n```(console\n\$|python\n)", guide.read_page(topic))

    def test_guide_lists_every_existing_page(self):
        assert set(guide.TOPICS) == {page.stem for page in guide.PAGES.glob("*.md")}
        assert all(f"  {topic} " in guide.list_pages() for topic in guide.TOPICS)

    @pytest.mark.parametrize("topic", guide.TOPICS)
    def test_guide_shows_a_page_without_its_markers(self, topic):
        text = guide.read_page(topic)

        assert text.startswith("# ")
        assert "made by" not in text
        assert (topic == "outputs") == ("<!--" in text)  # the markers of render --update

    @pytest.mark.parametrize("topic", guide.TOPICS)
    def test_guide_links_lead_to_pages(self, topic):
        assert set(re.findall(r"\]\((.+?)\.md\)", guide.read_page(topic))) <= set(guide.TOPICS)

    def test_unknown_page_is_wrong_usage_with_the_nearest_name(self):
        done = call("guide", "metric")

        assert (Status.USAGE, "") == (done.returncode, done.stdout)
        assert "did you mean metrics" in done.stderr

    def test_guide_is_plain_text_in_a_pipe_and_drawn_in_a_terminal(self):
        assert "# Settings" in call("guide", "settings").stdout
        assert "\x1b[" in in_terminal("explain", "scale_factor")

    def test_guide_without_a_topic_lists_the_pages(self):
        assert guide.list_pages() == call("guide").stdout.rstrip()


class TestExplain:
    @pytest.mark.parametrize(
        "list_entries", [*guide.KINDS, guide.list_formats], ids=lambda list_entries: list_entries.__name__
    )
    def test_explain_knows_every_name(self, list_entries):
        for entry in list_entries():
            assert entry.text in guide.explain(entry.name)
            assert "attrgetter" not in entry.text  # a text of Python: a property of a model has none of its own

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("far_off", "## implausible_error"), ("0", "Exit status"), ("fp8_block", "Format"), ("p99_9", "## pNN")],
    )
    def test_explain_describes_the_name(self, name, expected):
        done = call("explain", name)

        assert expected in done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("name", "listed"),
        [
            ("int4_g32", "int4_g128"),
            ("int3_channel", "int8_channel"),
            ("INT4_g64:asym", "int4_g128"),
            ("nf4_g128", "nf4"),
            ("fp8_block1x128", "fp8_block128"),
            ("mlx_q8_g32", "mlx_q4_g64"),
            ("gguf_q2_k:strict", "gguf_q2_k"),
        ],
    )
    def test_recipe_with_other_numbers_is_explained_as_the_listed_one(self, name, listed):
        assert guide.explain(name).startswith(f"## {listed}\n")

    def test_misspelt_name_is_wrong_usage_with_the_nearest_name(self):
        with pytest.raises(UsageError, match="did you mean scale_factor"):
            guide.explain("scale_facto")


COMMANDS = typer.main.get_command(cli.app).commands
EXAMPLE = re.compile(r"^(?:\$ |\[bold\]|torchrun .* -m )?(quanterr [a-z-]+ .*?)(?:\[/bold\]|  +#.*)?$", re.MULTILINE)


def examples():
    """Return the commands in the help of every command, in the README and in blocks of the guide."""
    texts = [command.help for command in COMMANDS.values() if command.help]
    for page in make_guide.PAGES:
        texts += re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.DOTALL)
    return sorted({line for text in texts for line in EXAMPLE.findall(text)})


@pytest.mark.parametrize("line", examples())
def test_example_parses(line):
    words = shlex.shlex(line.removesuffix("\\"), posix=True, punctuation_chars="|&;>")
    words.whitespace_split = True
    _, name, *given = takewhile(lambda word: word[0] not in "|&;>", words)

    COMMANDS[name].make_context(name, given)


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE))
    makefile = (make_guide.ROOT / "Makefile").read_text()

    assert targets
    assert set() == {target for target in targets if f"\n{target}:" not in makefile}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jq")
    original, quantized = pair(folder)
    path = folder / "report.json"
    path.write_text(quanterr.compare(original, quantized).to_json())
    return path


@needs_jq
class TestRecipes:
    def jq(self, recipe, report):
        words = recipe.split(" ", 1) if recipe.startswith("-es") else [recipe]
        return subprocess.run(
            ["jq", *words[:-1], words[-1].strip("'"), str(report)], capture_output=True, text=True, check=False
        )

    def test_recipes_are_kept_for_existing_scripts(self):
        assert set(ISSUED) <= set(RECIPES)

    def test_recipe_lists_the_five_worst_layers_in_order(self, report):
        layers = json.loads(self.jq(RECIPES[0], report).stdout)

        assert layers
        assert sorted(layer["snr_db"] for layer in layers) == [layer["snr_db"] for layer in layers]

    def test_recipe_lists_names_and_errors_for_all_layers(self, report):
        document = json.loads(self.jq(RECIPES[1], report).stdout)
        layers = json.loads(report.read_text())["layers"]

        assert [{"name": x["layer_name"], "mae": x["mean_absolute_error"]} for x in layers] == document

    def test_recipe_gives_the_numbers_for_the_whole_model(self, report):
        aggregate = json.loads(report.read_text())["aggregate"]
        expected = {"mae": aggregate["mean_absolute_error"], "snr": aggregate["overall_snr_db"]}

        assert expected == json.loads(self.jq(RECIPES[2], report).stdout)

    def test_recipe_gate_passes_a_good_report(self, report):
        assert 0 == self.jq(RECIPES[3], report).returncode

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda r: r.update(verdict="inconclusive"),
            lambda r: r.update(complete=False),
            lambda r: r.update(layers=[]),
            lambda r: r["layers"][0].update(snr_db=None),
            lambda r: r["layers"][0].update(snr_db="Infinity"),
            lambda r: r["layers"][0].update(snr_db=27.9),
            lambda r: r["layers"][0].pop("snr_db"),
            lambda r: r.pop("layers"),
            lambda r: r.clear(),
        ],
    )
    def test_recipe_gate_fails_closed(self, report, tmp_path, spoil):
        spoilt = json.loads(report.read_text())
        spoil(spoilt)
        path = tmp_path / "report.json"
        path.write_text(json.dumps(spoilt))

        assert 0 != self.jq(RECIPES[3], path).returncode

    @pytest.mark.parametrize("times", [0, 2])
    def test_recipe_gate_fails_closed_on_a_file_with_no_report_or_several(self, report, tmp_path, times):
        path = tmp_path / "report.json"
        path.write_text(times * report.read_text())

        assert 0 != self.jq(RECIPES[3], path).returncode

    def test_example_gate_passes_and_fails_closed(self, report, tmp_path):
        gate = ["jq", "-e", "-s", "-f", str(make_guide.ROOT / "examples/ci/gate.jq")]
        empty = tmp_path / "empty.json"
        empty.write_text("")

        assert 0 == subprocess.run([*gate, str(report)], capture_output=True).returncode
        assert 0 != subprocess.run([*gate, str(empty)], capture_output=True).returncode


@pytest.mark.slow
def test_library_page_examples_run(tmp_path, monkeypatch):
    """All examples run in their order on a small model, within a few seconds, as evaluate runs it."""
    pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
    save_model("llama", tmp_path / "original")
    (tmp_path / "fp8").mkdir()
    write(tmp_path / "fp8/model.safetensors", quantized_by(quantized_fp8, read_stored(tmp_path / "original"))[0])
    ids(tmp_path)
    monkeypatch.chdir(tmp_path)
    page, names = (guide.PAGES / "library.md").read_text(), {}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(example, names)

    assert {"report", "judged", "ranking", "plan", "evaluation", "inspection", "new"} <= names.keys()
    assert "pass" == names["report"].verdict
    assert (tmp_path / "report.html").is_file()
