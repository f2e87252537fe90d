"""In the tests of this folder, each finding must have a code that its check declares."""

import pytest

from quanterr.findings.checks import CHECKS, LAST, WEIGHT, WEIGHTS
from quanterr.findings.results import check_weights
from quanterr.findings.running import list_checks

# codes of the checks whose findings check_weights returns
INNER = {code for check in CHECKS if check.of in (WEIGHT, WEIGHTS, LAST) for code in check.codes}


def strict(check):
    """Return a check that fails on findings with other codes than it declares."""
    allowed = {*check.codes, *(INNER if check.function is check_weights else ())}

    def run(subject):
        for finding in check.function(subject):
            assert finding.code in allowed, f"{check.function.__name__} does not declare {finding.code}"
            yield finding

    run.__module__ = check.function.__module__
    return check._replace(function=run)


@pytest.fixture(scope="package", autouse=True)
def strict_checks():
    kept = list(CHECKS)
    CHECKS[:] = map(strict, kept)
    list_checks.cache_clear()
    yield
    CHECKS[:] = kept
    list_checks.cache_clear()
