"""The construction of findings; their codes are in documents/finding_codes/."""

from math import isfinite

import msgspec

from quanterr.documents.base import Finding


def make_finding(
    code: str, severity: str, layer: str | None, message: str, remedy: str | None = None, **evidence: object
) -> Finding:
    """Return a finding; numbers in ``evidence`` that are not finite become None.

    Args:
        code: one of CODES.
        severity: info, warning or error.
        layer: the weight concerned; None for the whole checkpoint.
        message: what is wrong.
        remedy: what to do about it.
        **evidence: numbers and names for the report.
    """
    return msgspec.convert(
        {
            "code": code,
            "severity": severity,
            "layer": layer,
            "message": message,
            "remedy": remedy,
            "evidence": {key: _drop_nonfinite(value) for key, value in evidence.items()},
        },
        Finding,
    )


def _drop_nonfinite(value: object) -> object:
    """Return the value with None for each number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _drop_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_drop_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
