"""Scales that were folded into the layer before, which the comparison undoes, and those that were folded wrongly."""

from collections.abc import Iterator

from quanterr.documents.base import Finding
from quanterr.findings.checks import BOTH, VALUES, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Comparison
from quanterr.util.text import count, display, listed


@check("folded_scales", needs=VALUES, of=BOTH)
def check_folding(comparison: Comparison) -> Iterator[Finding]:
    """Report scales that a quantizer moved between weights, with the error as stored and after moving them back."""
    folded = comparison.pairing.folded
    if folded:
        names = list(dict.fromkeys(name for one in folded for name in one.names))
        sources = list(dict.fromkeys(one.source for one in folded))
        least = min(folded, key=lambda one: one.before_db)
        yield make_finding(
            "folded_scales",
            "info",
            None if len(sources) > 1 else sources[0],
            f"scales of {count(len(names), 'weight')} ({listed(names, 4)}) were folded into {listed(sources, 2)}; the "
            f"comparison undoes that: {least.after_db:.1f} dB on a sample of {display(least.worst)}, "
            f"{least.before_db:.1f} dB as stored",
            "nothing if the quantizer does this (AWQ, SmoothQuant); use both tensors together",
            layers=names,
            sources=sources,
            snr_db_as_stored=least.before_db,
            snr_db=least.after_db,
        )
    for one in folded:
        if one.without:
            have, lack = listed(list(one.names), 4), listed(list(one.without), 4)
            yield make_finding(
                "folded_scales",
                "error",
                one.source,
                f"{display(one.source)} absorbed the scales of {have}; {lack}, which it also feeds, lack them",
                "quantize these layers again with the same scales",
                layers=list(one.without),
            )
        if one.misplaced:
            yield make_finding(
                "folded_scales",
                "error",
                one.misplaced,
                f"{display(one.misplaced)} has the scales that {display(one.source)} absorbed in another order of "
                "heads than config.json declares: each head of values feeds neighbouring heads of queries",
                "repeat the scales of each head for its heads of queries, one after the other, and quantize again",
                layers=[one.misplaced],
            )
        if one.unlike:
            rows = listed([str(row) for row in one.unlike], 4)
            yield make_finding(
                "folded_scales",
                "warning",
                one.source,
                f"{display(one.source)} absorbed the scales of {display(one.names[1])}, but some of its rows "
                f"({rows}) have other factors than the columns that they feed",
                "quantize both layers again with the same scales",
                layers=list(one.names),
                rows=list(one.unlike),
            )
        if one.bias:
            yield make_finding(
                "folded_scales",
                "error",
                one.bias,
                f"{display(one.source)} absorbed scales, but its bias {display(one.bias)} did not",
                "apply the same factors to the bias, or quantize these layers again",
                layers=[one.bias],
            )
