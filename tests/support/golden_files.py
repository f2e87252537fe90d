"""The golden files: what producers wrote, and the values that their own libraries read from it."""

import json
from pathlib import Path

from safetensors.torch import safe_open
from support.making import same_bits

GOLDEN = Path(__file__).parents[1] / "golden"

EXPECTED = ".expected.safetensors"

FILES = [path for path in GOLDEN.glob("*/*") if path.parent.name != "__pycache__"]

CASES = sorted(path for path in FILES if not path.name.endswith(EXPECTED))

NUMBERS = [case for case in CASES if case.parent.name != "verbatim"]


def expected_of(case):
    return case.with_suffix(EXPECTED)


def values_of(case):
    """The producer's values; where the origin says float32, the file may store them in 16 bits that lose nothing."""
    with safe_open(expected_of(case), framework="pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: x.float() for name, x in values.items()} if "dtype" in origin_of(case) else values


def origin_of(case):
    with safe_open(expected_of(case), framework="pt") as file:
        return json.loads(file.metadata()["origin"])


def formats_of(case):
    """Which weight is in which format: the one whose folder it is, but for what its origin tells."""
    return dict.fromkeys(values_of(case), case.parent.name) | origin_of(case).get("also", {})


def tolerance_of(case):
    """How far the producer's own rounding may lie away, relative to the largest value; 0: not a bit."""
    return float(origin_of(case).get("tolerance", 0))


def agree(case, values, actual):
    """Whether values are the producer's, to the bit but for what its origin tells."""
    if tolerance := tolerance_of(case):
        return bool(((values - actual).abs() <= tolerance * values.abs().max()).all())
    if "zeros" in origin_of(case):  # the producer knows no negative zero
        actual = actual + 0.0
    return same_bits(values, actual)
