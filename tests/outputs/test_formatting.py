"""Numbers as text."""

import pytest

from quanterr.outputs.formatting import format_measured


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.0125, 0.0006, "0.01250 ± 0.00060"),
        (0.0123456, 0.00123, "0.0123 ± 0.0012"),
        (12.6251, 0.26, "12.63 ± 0.26"),
        (95.0, 12.3, "95 ± 12"),
        (1234.5, 123.0, "1.23e+03 ± 1.2e+02"),
        (1.2e-10, 3.4e-12, "1.2e-10 ± 3.4e-12"),
        (0.0, 0.001, "0.0000 ± 0.0010"),
        (0.0, 1e-12, "0 ± 1e-12"),
        (-0.002, 0.00085, "-0.00200 ± 0.00085"),
    ],
)
def test_digits_follow_the_error(value, error, shown):
    assert shown == format_measured(value, error)
