"""The kernel's enums and constants are those of enums.py and of the rows of ggml's types."""

import make_c_headers
import pytest


@pytest.mark.parametrize(
    ("file", "make"),
    [(make_c_headers.ENUMS, make_c_headers.make_enums), (make_c_headers.BLOCKS, make_c_headers.make_blocks)],
    ids=["enums", "blocks"],
)
def test_header_is_up_to_date_with_make_c_headers(file, make):
    assert make() == file.read_text(encoding="utf-8")
