"""What choices of recipes gain, from pairs of candidates that differ in only one respect."""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import prod

from quanterr.documents.ranking.model import Candidate, Gain

SCALE_GRANULARITY = re.compile(
    r"(?P<codes>[a-z_]+?)(?P<bits>[2-8])?_(?P<per>tensor|row|channel|block\d+(?:x\d+)?|g\d+)"
)
SCALE_ELEMENTS = {
    "tensor": 1 << 40,
    "row": 1 << 20,
    "channel": 1 << 20,
}  # approximate number of elements that share a scale
WORDS = {
    "bits": "bits",
    "per": "finer scales",
    "asym": "zero points",
    "double": "scales quantized again",
    "scales": "calibration",
}


def find_gains(candidates: Sequence[Candidate], recipes: Collection[str]) -> list[Gain]:
    """Return the gains between adjacent ranked recipes that differ in only one respect."""
    known = {c.name: (_parse_name(c.name), c) for c in candidates if c.rank is not None and c.name in recipes}
    gains = []
    for aspect in WORDS:
        families: dict[str, list[tuple[float, Candidate]]] = {}
        for aspects, candidate in known.values():
            rest = str(sorted((key, value) for key, value in aspects.items() if key != aspect))
            if aspect in aspects:
                families.setdefault(rest, []).append((_order_key(aspect, aspects[aspect]), candidate))
        for family in families.values():
            family.sort(key=lambda item: item[0])
            for (_, before), (_, after) in pairwise(family):
                if before.snr_db is not None and after.snr_db is not None:
                    size = (after.bytes or 0) - (before.bytes or 0)
                    gains.append(Gain(WORDS[aspect], before.name, after.name, after.snr_db - before.snr_db, size))
    return gains


def _parse_name(name: str) -> dict[str, str]:
    """Return the aspects that a recipe's name encodes."""
    base, *options = name.split(":")
    aspects = {"asym": "", "double": "", "scales": "absmax"}
    if match := SCALE_GRANULARITY.fullmatch(base):
        aspects |= {"codes": match["codes"], "bits": match["bits"] or "", "per": match["per"]}
    else:
        aspects["codes"] = base
    for option in options:
        key, _, value = option.partition("=")
        aspects[key] = value or "yes"
    return aspects


def _order_key(aspect: str, value: str) -> float:
    """Return a sort key, from coarse to fine."""
    if aspect == "per":
        edges = [int(edge) for edge in re.findall(r"\d+", value)]
        if value.startswith("block") and len(edges) == 1:
            edges *= 2
        return -float(prod(edges) if edges else SCALE_ELEMENTS[value])
    if aspect == "bits":
        return float(value or 0)
    if aspect == "scales":
        return {"absmax": 0.0, "minmax": 0.0, "ema": 1.0, "mse": 3.0}.get(value, 2.0)
    return float(bool(value))
