"""Files with correct numbers that a runtime refuses or misreads: rules as data, each found in the runtime's code.

``model.py`` says what a rule is; each runtime is a module; ``judging.py`` answers whether one loads a checkpoint.
"""

from collections.abc import Iterator

from quanterr.checkpoints import Entry
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.judging import RUNTIMES
from quanterr.findings.runtimes.model import TensorRule
from quanterr.util.text import count, itemize

RULES = tuple(rule for runtime in RUNTIMES for rule in runtime.tensors)


@check("unloadable", needs=DECLARED, of=QUANTIZED)
def check_runtimes(contents: Contents) -> Iterator[Finding]:
    """Report tensors that a runtime refuses or misreads, although their numbers are right, in one finding per rule."""
    for rule in RULES:
        if entries := rule.find(contents):
            yield _report(rule, entries)


def _report(rule: TensorRule, entries: list[Entry]) -> Finding:
    message = (
        f"{rule.runtime} expects {rule.expects}, and {rule.fails}: {count(len(entries), 'tensor')}: "
        f"{itemize([f'{entry.name} ({entry.dtype} {list(entry.shape)})' for entry in entries], 3)}"
    )
    remedy = "store them as expected if this runtime is to load the file"
    names = [entry.name for entry in entries]
    return make_finding("unloadable", "warning", None, message, remedy, tensors=names, place=rule.place)
