"""Scales that a quantizer folded into the preceding layer: correctly, which the comparison undoes, or wrongly."""

from collections.abc import Iterator

from quanterr.documents.base import Finding
from quanterr.findings.checks import BOTH, VALUES, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Comparison
from quanterr.util.text import count, display, itemize


@check("folded_scales", needs=VALUES, of=BOTH)
def check_folding(comparison: Comparison) -> Iterator[Finding]:
    """Report scales that a quantizer moved between weights, with the error as stored and after moving them back."""
    folded = comparison.pairing.folded
    if folded:
        names = list(dict.fromkeys(name for fold in folded for name in fold.names))
        sources = list(dict.fromkeys(fold.source for fold in folded))
        worst = min(folded, key=lambda fold: fold.before_db)
        yield make_finding(
            "folded_scales",
            "info",
            None if len(sources) > 1 else sources[0],
            f"scales of {count(len(names), 'weight')} ({itemize(names, 4)}) were folded into {itemize(sources, 2)}; "
            f"the comparison undoes that: {worst.after_db:.1f} dB on a sample of {display(worst.worst)}, "
            f"{worst.before_db:.1f} dB as stored",
            "nothing if the quantizer does this (AWQ, SmoothQuant); use both tensors together",
            layers=names,
            sources=sources,
            snr_db_as_stored=worst.before_db,
            snr_db=worst.after_db,
        )
    for fold in folded:
        if fold.without:
            have, lack = itemize(list(fold.names), 4), itemize(list(fold.without), 4)
            yield make_finding(
                "folded_scales",
                "error",
                fold.source,
                f"{display(fold.source)} absorbed the scales of {have}; {lack}, which it also feeds, lack them",
                "quantize these layers again with the same scales",
                layers=list(fold.without),
            )
        if fold.misplaced:
            yield make_finding(
                "folded_scales",
                "error",
                fold.misplaced,
                f"{display(fold.misplaced)} has the scales that {display(fold.source)} absorbed in another order of "
                "heads than config.json declares: each head of values feeds neighbouring heads of queries",
                "repeat the scales of each head for its heads of queries, one after the other, and quantize again",
                layers=[fold.misplaced],
            )
        if fold.unlike:
            rows = itemize([str(row) for row in fold.unlike], 4)
            yield make_finding(
                "folded_scales",
                "warning",
                fold.source,
                f"{display(fold.source)} absorbed the scales of {display(fold.names[1])}, but some of its rows "
                f"({rows}) have other factors than the columns that they feed",
                "quantize both layers again with the same scales",
                layers=list(fold.names),
                rows=list(fold.unlike),
            )
        if fold.bias:
            yield make_finding(
                "folded_scales",
                "error",
                fold.bias,
                f"scales were folded into {display(fold.source)}, but not into its bias {display(fold.bias)}",
                "apply the same factors to the bias, or quantize these layers again",
                layers=[fold.bias],
            )
