"""The kernel's constants are those that the rows of ggml's types give."""

import make_block_types


def test_header_is_up_to_date_with_make_block_types():
    assert make_block_types.make_header() == make_block_types.FILE.read_text(encoding="utf-8")
