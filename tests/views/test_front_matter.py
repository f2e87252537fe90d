"""Front matter in model cards, read by PyYAML and, as on the hub, by huggingface_hub."""

from functools import partial

import pytest
import yaml
from msgspec.structs import replace
from support.hostile_names import SHORT_NAMES
from support.sample_documents import evaluation

from quanterr.errors import UsageError
from quanterr.outputs import OUTPUTS
from quanterr.outputs.files import update_section
from quanterr.outputs.markdown import BEGIN, END
from quanterr.views.evaluation.front_matter import put_front_matter

MD = next(output for output in OUTPUTS if output.name == "md")


def sample(original="hf://org/model@main", **changes):
    """Return an evaluation of one candidate."""
    made = evaluation()
    candidates = [replace(made.candidates[0], **changes)]
    run = replace(made.run, command=["quanterr", "evaluate", "/home/me/original", "--text", "a=/home/me/a.txt"])
    return replace(made, original=original, candidates=candidates, run=run)


def front(text):
    """Return the front matter of a card and the text after it."""
    _, head, rest = text.removeprefix("\ufeff").replace("\r\n", "\n").split("---\n", 2)
    return yaml.safe_load(head), rest


def test_card_gets_the_hub_keys(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"# Model\n{BEGIN}\n{END}\n")
    document = sample()
    for _ in range(2):  # the second time changes nothing
        update_section(str(card), document, MD, finish=partial(put_front_matter, evaluation=document))
        head, rest = front(card.read_text())
        [entry] = head["model-index"]
        [result] = entry["results"]
        values = {metric["type"]: metric["value"] for metric in result["metrics"]}

        assert ("org/model", "quantized", "fp8") == (head["base_model"], head["base_model_relation"], entry["name"])
        assert ("text-generation", "wiki.txt") == (result["task"]["type"], result["dataset"]["name"])
        assert values["kld_mean"] == pytest.approx(document.candidates[0].scores.kld_mean, rel=1e-5)
        assert "quanterr evaluate original --text a=a.txt" == head["quanterr"]["command"]
        assert "/home/me" not in card.read_text()
        assert rest.startswith("\n# Model\n")
        assert card.read_text().count("model-index:") == 1


def test_hub_reads_the_front_matter():
    from huggingface_hub import ModelCard

    data = ModelCard(put_front_matter("# Model\n", "card", sample())).data

    assert ("org/model", "quantized") == (data.base_model, data.to_dict()["base_model_relation"])
    assert {result.metric_type for result in data.eval_results} >= {"kld_mean", "ppl", "top1"}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_other_keys_and_comments_stay(newline, mark):
    lines = ["---", "# mine", "license: mit", "base_model:", "- old/one", "tags:", "  - a", "---", "# Model", "---", ""]
    made = put_front_matter(mark + newline.join(lines), "card", sample())
    head, rest = front(made)

    assert ("mit", ["a"], "org/model") == (head["license"], head["tags"], head["base_model"])
    assert made.startswith(f"{mark}---{newline}# mine{newline}license: mit{newline}")
    assert rest == "# Model\n---\n"
    assert made.count("\r\n") == (made.count("\n") if newline == "\r\n" else 0)


def test_results_from_other_authors_stay():
    text = "---\nmodel-index:\n- name: x\n  results: []\n---\n"
    once = put_front_matter(text, "card", sample())

    assert [{"name": "x", "results": []}] == front(once)[0]["model-index"]


@pytest.mark.parametrize(
    ("original", "base"),
    [
        ("hf://org/model", "org/model"),
        ("/root/.cache/huggingface/hub/models--org--model/snapshots/ab12", "org/model"),
        ("/home/me/model", None),
        ("org/model", None),  # this may be the path of a local folder
    ],
)
def test_base_model_is_not_guessed(original, base):
    head = front(put_front_matter("", "card", sample(original)))[0]

    assert base == head.get("base_model")
    assert ("base_model_relation" in head) == (base is not None)


@pytest.mark.parametrize("text", ["---\na: b\n", "---\n{a: b}\n---\n", "---\njust words\n---\n"])
def test_invalid_front_matter_is_refused(text):
    with pytest.raises(UsageError, match="card: its front matter"):
        put_front_matter(text, "card", sample())


@pytest.mark.parametrize("name", SHORT_NAMES, ids=lambda name: ascii(name[:16]))
def test_names_are_only_text(name):
    made = sample(original=name, name=name, reasons=[name])
    head, rest = front(put_front_matter("# Model\n", "card", replace(made, reasons=[name])))

    assert {"model-index", "quanterr"} == set(head) - {"base_model", "base_model_relation"}
    assert isinstance(head["model-index"][0]["name"], str)
    assert rest == "\n# Model\n"


def test_name_that_yaml_1_2_reads_as_a_number_is_quoted():
    made = put_front_matter("", "card", sample(name="1e5"))

    assert '- name: "1e5"' in made.splitlines()


def test_verdict_comes_from_the_evaluation():
    """Without gates, a pass means evaluated; an inconclusive result stays inconclusive."""
    bare = sample(gates=[])
    verdicts = [
        front(put_front_matter("", "card", replace(bare, verdict=verdict)))[0]["quanterr"]["verdict"]
        for verdict in ("pass", "inconclusive")
    ]

    assert ["evaluated", "inconclusive"] == verdicts
