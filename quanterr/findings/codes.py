"""How a finding is made; the codes are in report/finding_codes.py."""

from math import isfinite

from quanterr.report.base import Finding


def finding(
    code: str, severity: str, layer: str | None, message: str, remedy: str | None = None, **evidence: object
) -> Finding:
    """A finding; ``code`` is one of CODES, ``severity`` info, warning or error, ``layer`` None for the whole."""
    return Finding.model_validate(
        {
            "code": code,
            "severity": severity,
            "layer": layer,
            "message": message,
            "remedy": remedy,
            "evidence": {key: _finite(value) for key, value in evidence.items()},
        }
    )


def _finite(value: object) -> object:
    """The value; None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not isfinite(value) else value
