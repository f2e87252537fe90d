"""A few inputs for each target of `make fuzz`, and whether the fuzzer finds defects."""

import time
from random import Random

import pytest
from fuzz import gguf_bytes, safetensors_bytes
from fuzz.__main__ import main
from fuzz.finding import Defect, Target
from fuzz.running import Limits, run
from fuzz.targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quanterr
from quanterr.checkpoints import safetensors_file
from quanterr.errors import CheckpointError

pytestmark = pytest.mark.session

# Inputs per target: less than a second. `make fuzz` makes many more.
EXAMPLES = {"compare": 12, "report": 30, "lost": 60, "labels": 40, "rules": 100}
DEFAULT_EXAMPLES = 200

by_name = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@by_name
@pytest.mark.slow
def test_changed_inputs_reveal_no_defect(target):
    @settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=EXAMPLES.get(target.name, DEFAULT_EXAMPLES),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def check(random):
        target.check(target.make(random))

    check()


@by_name
def test_number_makes_the_same_input_again(target):
    assert target.make(Random(7)) == target.make(Random(7)) != target.make(Random(8))


@by_name
def test_some_inputs_are_taken_and_some_refused(target):
    outcomes = {target.check(target.make(Random(number))) for number in range(60)}
    refused = {outcome for outcome in outcomes if "Error" in outcome.split(";")[0]}

    assert len(refused) > 1
    assert outcomes - refused


def target_of(check):
    return Target("made_up", lambda random: random.randbytes(8), check)


def find(check, folder, n=20, **limits):
    return run(target_of(check), n, 0, 2, Limits(**limits), folder)


def test_input_that_raises_a_foreign_error_is_saved(tmp_path):
    def check(raw):
        if raw == Random(13).randbytes(8):
            raise KeyError("surprise")
        return "taken"

    result = find(check, tmp_path)

    assert {"taken": 19} == result.outcomes
    assert 1 == sum(result.defects.values())
    assert Random(13).randbytes(8) == (tmp_path / "made_up-13").read_bytes()
    assert "surprise" in (tmp_path / "made_up-13.txt").read_text()


def test_slow_input_is_saved(tmp_path):
    def check(raw):
        while raw == Random(3).randbytes(8):
            time.sleep(0.01)
        return "taken"

    result = find(check, tmp_path, seconds=0.2)

    assert {"taken": 19} == result.outcomes
    assert "takes too long" in next(iter(result.defects))
    assert (tmp_path / "made_up-3").exists()


def test_input_that_takes_too_much_memory_is_saved(tmp_path):
    def check(raw):
        return str(len(bytearray(1 << 30))) if raw == Random(5).randbytes(8) else "taken"

    result = find(check, tmp_path, memory=256)

    assert {"taken": 19} == result.outcomes
    assert "MemoryError" in next(iter(result.defects))


@pytest.mark.parametrize("end", ["exits", "hangs where no signal reaches it"])
def test_input_that_ends_the_process_is_saved_and_the_others_are_checked(tmp_path, end):
    import os
    import signal

    def check(raw):
        if raw == Random(4).randbytes(8):
            if end == "exits":
                os._exit(9)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(60)
        return "taken"

    result = find(check, tmp_path, seconds=0.2)

    assert 1 == sum(result.defects.values())
    assert (tmp_path / "made_up-4").read_bytes() == Random(4).randbytes(8)
    assert 19 - 4 <= result.outcomes["taken"]


# Defects that the targets must find


def first_defect(name, n=400):
    target = next(target for target in TARGETS if target.name == name)
    for number in range(n):
        try:
            target.check(target.make(Random(number)))
        except Exception as error:
            return error
    return None


def test_unbounded_reader_is_found(monkeypatch):
    monkeypatch.setattr(safetensors_file, "_check_tiling", lambda *arguments: None)
    monkeypatch.setattr(safetensors_file, "_check_with_library", lambda *arguments: None)

    assert first_defect("safetensors") is not None


def test_unprintable_message_is_found(monkeypatch):
    monkeypatch.setattr("quanterr.checkpoints.safetensors_file.display", str)

    assert isinstance(first_defect("safetensors", 2000), Defect)


def test_unnoticed_loss_is_found(monkeypatch):
    monkeypatch.setattr("quanterr.documents.reading._check", lambda *arguments: None)

    assert isinstance(first_defect("lost"), Defect)


def test_forgotten_tensor_is_found(monkeypatch):
    whole = quanterr.comparison.assembly.ReportBuilder._make_coverage

    def without_parts(*arguments):
        coverage = whole(*arguments)
        coverage.quantized.pop("consumed", None)
        return coverage

    monkeypatch.setattr("quanterr.comparison.assembly.ReportBuilder._make_coverage", without_parts)

    assert isinstance(first_defect("compare", 40), Defect)


def test_plain_header_is_read_like_any_other():
    read = 0
    for raw in (safetensors_bytes.make(Random(number)) for number in range(300)):
        header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
        if plain := safetensors_file._read_plain("x", header, 8):
            notes = []
            assert (plain, []) == (safetensors_file._read_any("x", header, 8, notes), notes)
            read += 1

    assert read > 30


def test_gguf_is_checked_by_the_package_where_it_is_installed():
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    raw = next(raw for raw in map(gguf_bytes.make, map(Random, range(99))) if gguf_bytes.check(raw) == "taken")

    assert raw.startswith(b"GGUF")


def test_saved_input_can_be_checked_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "input").write_bytes(b"GGUF")
    monkeypatch.setattr("sys.argv", ["fuzz", "gguf", "--input", str(tmp_path / "input")])

    assert 0 == main()
    assert CheckpointError.__name__ in capsys.readouterr().out
