"""The golden files: producers' files, and the values that the producers' own libraries read from them."""

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
    """Return the file of the producer's values; ``NAME_alone``, which has no configuration, may share that of NAME."""
    expected_path = case.with_suffix(EXPECTED)
    return expected_path if expected_path.exists() else case.with_name(f"{case.stem.removesuffix('_alone')}{EXPECTED}")


def values_of(case):
    """Return the producer's values. Where the origin names float32, the file may store them losslessly in 16 bits."""
    with safe_open(expected_of(case), framework="pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: x.float() for name, x in values.items()} if "dtype" in origin_of(case) else values


def origin_of(case):
    with safe_open(expected_of(case), framework="pt") as file:
        return json.loads(file.metadata()["origin"])


def formats_of(case):
    """Return the format of each weight: the name of the folder, unless the origin names another."""
    return dict.fromkeys(values_of(case), case.parent.name) | origin_of(case).get("also", {})


def tolerance_of(case):
    """Return the tolerance for the producer's own rounding, relative to the largest value; 0 means the same bits."""
    return float(origin_of(case).get("tolerance", 0))


def agree(case, values, actual):
    """Return True if the values equal the producer's, to the bit or within the tolerance that the origin names."""
    if tolerance := tolerance_of(case):
        return bool(((values - actual).abs() <= tolerance * values.abs().max()).all())
    if "zeros" in origin_of(case):  # the producer stores no negative zero
        actual = actual + 0.0
    return same_bits(values, actual)
