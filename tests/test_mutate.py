"""A small part of `make mutate`: a few golden files broken in every way, and one sound file of each format."""

import mutate
import pytest
from mutating import MUTATIONS, Mutation

FEW = [
    "fp8_row/ct_fp8_channel.safetensors",
    "gptq/gptq_v1_w4_g32_asym_gptqmodel",
    "gguf_q4_1/llama_quantize.gguf",
    "nvfp4/modelopt_nvfp4.safetensors",
]
ONE_EACH = list({case.parent.name: case for case in mutate.cases()}.values())


@pytest.mark.parametrize("name", FEW)
def test_every_accident_is_noticed(name):
    outcomes, _ = mutate.judged(mutate.GOLDEN / name)

    assert len(outcomes) > 10
    assert [] == [outcome for outcome in outcomes if outcome.outcome == "UNNOTICED"]


def test_damage_of_what_is_cast_is_noticed():
    outcomes, findings = mutate.recast(("BF16", "F32"))

    assert len(outcomes) > 20
    assert [] == [outcome for outcome in outcomes if outcome.outcome not in ("error", "finding")]
    assert [] == [finding.message for finding in findings if finding.severity != "info"]


@pytest.mark.slow  # a file of each format
@pytest.mark.parametrize("case", ONE_EACH, ids=mutate.named)
def test_a_sound_file_raises_no_error(case):
    _, findings = mutate.judged(case, [])

    assert [] == [finding.message for finding in findings if finding.severity == "error"]


def test_what_is_not_told_is_unnoticed(tmp_path):
    sound = mutate.made_sound(mutate.GOLDEN / FEW[0], tmp_path)

    assert "UNNOTICED" == mutate.outcome(sound.report, sound.report, sound.weights[0].name)


def test_what_changes_nothing_is_not_counted(tmp_path):
    sound = mutate.made_sound(mutate.GOLDEN / FEW[0], tmp_path)
    nothing = Mutation("nothing", lambda _stored, _weight: True)

    assert [] == list(mutate.broken(sound, nothing, tmp_path / "broken"))


def test_no_two_mutations_have_one_name():
    assert len(MUTATIONS) == len({mutation.name for mutation in MUTATIONS})
