"""Requested outputs of a run that fails: they hold the error, not the result of an earlier run."""

import json
from xml.etree import ElementTree

import pytest
from support.forked import call
from support.stored import pair

from quanterr.errors import Status

pytestmark = pytest.mark.session

SUFFIXES = ("json", "jsonl", "csv", "html", "md", "xml")


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("sides"))


def compare(x, y, folder, *words):
    outputs = [word for suffix in SUFFIXES for word in ("-o", str(folder / f"r.{suffix}"))]
    return call("compare", x, y, *outputs, *words, "-q")


def test_outputs_of_an_earlier_run_are_replaced_by_the_error(sides, tmp_path):
    assert Status.OK == compare(*sides, tmp_path).returncode
    done = compare(sides[0], tmp_path / "<nowhere>", tmp_path)
    texts = {suffix: (tmp_path / f"r.{suffix}").read_text() for suffix in SUFFIXES}

    assert Status.UNREADABLE == done.returncode
    assert all("nowhere" in text for text in texts.values())
    assert all("<nowhere>" not in text for text in (texts["html"], texts["md"], texts["xml"]))
    assert ("quanterr.failure", 3) == tuple(json.loads(texts["json"])[key] for key in ("schema", "status"))
    assert "1" == ElementTree.fromstring(texts["xml"]).get("errors")
    assert texts["csv"].startswith("quanterr_verdict,error\nerror,")


def test_stored_error_is_judged_as_unreadable_and_a_new_run_replaces_it(sides, tmp_path):
    compare(sides[0], tmp_path / "nowhere", tmp_path)
    judged = call("gate", tmp_path / "r.json", "--require", "snr_db >= 1", "-o", tmp_path / "junit.xml")

    assert Status.UNREADABLE == judged.returncode
    assert "the run that should have written it ended with an error: run it again" in judged.stderr
    assert "run it again" in (tmp_path / "junit.xml").read_text()
    assert Status.OK == compare(*sides, tmp_path).returncode
    assert "pass" == json.loads((tmp_path / "r.json").read_text())["verdict"]


def test_wrong_usage_replaces_no_earlier_result(sides, tmp_path):
    compare(*sides, tmp_path)
    before = (tmp_path / "r.json").read_bytes()

    assert Status.USAGE == compare(*sides, tmp_path, "-l", "atn").returncode
    assert before == (tmp_path / "r.json").read_bytes()
