import pytest

from quanterr.util.text import count, cut_prefix, display, itemize, parse_digits, size


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("with a space", "with a space"),
        ("größe.重み", "größe.重み"),
        ("e\u0301", "e\u0301"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        ("<b>&amp;", "<b>&amp;"),
        ("a\\b", "a\\b"),
        ("", '""'),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x00", "\\x00"),
        ("a\nb\rc\td", "a\\x0ab\\x0dc\\x09d"),
        ("\x7f", "\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("a\xa0b", "a\\xa0b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("\u200b", "\\u200b"),
        ("a\u2028b\u2029c", "a\\u2028b\\u2029c"),
        ("\ufeffx", "\\ufeffx"),
        ("\ud800", "\\ud800"),
        ("\udcff.safetensors", "\\udcff.safetensors"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_name_is_shown_without_terminal_controls(name, shown):
    assert shown == display(name)


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), 0xD800, 0xDFFF])
def test_no_control_character_remains(code):
    shown = display(f"a{chr(code)}b")

    assert shown.isprintable()
    assert chr(code) not in shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("::error::x", "\\x3a:error::x"),
        ("  ::set-output", "  \\x3a:set-output"),
        ("##[error]x", "\\x23#[error]x"),
        ("a ##[add-mask]x", "a \\x23#[add-mask]x"),
        ("##vso[task.complete]", "\\x23#vso[task.complete]"),
        ("a##teamcity[x]", "a\\x23#teamcity[x]"),
        ("###[error]", "#\\x23#[error]"),
        ("a ## b [c]", "a ## b [c]"),
        ("a::b", "a::b"),
    ],
)
def test_name_is_never_a_ci_command(name, shown):
    assert shown == display(name)


def test_name_at_the_limit_is_shown_whole():
    name = "x" * 200

    assert name == display(name)


@pytest.mark.parametrize(("length", "limit", "kept"), [(201, 200, 99), (5_000, 200, 99), (50, 11, 5), (50, 10, 4)])
def test_longer_name_loses_its_middle(length, limit, kept):
    name = "a" * (length // 2) + "b" * (length - length // 2)

    assert "a" * kept + "…" + "b" * kept == display(name, limit)


def test_name_is_measured_after_escaping():
    shown = display("\x1b" * 100)

    assert len(shown) <= 200
    assert shown.startswith("\\x1b\\x1b")


@pytest.mark.parametrize(
    ("names", "limit", "shown"),
    [
        ([], 5, ""),
        (["a"], 5, "a"),
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d"], 3, "a, b, c and 1 more"),
        (["x"] * 2_005, 5, "x, x, x, x, x and 2,000 more"),
        (["a\x1b", ""], 5, 'a\\x1b, ""'),
    ],
)
def test_long_list_shows_a_few_names(names, limit, shown):
    assert shown == itemize(names, limit)


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (1_536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_sizes_are_in_binary_units(n_bytes, shown):
    assert shown == size(n_bytes)


@pytest.mark.parametrize(
    ("n", "words", "shown"),
    [
        (0, ("tensor",), "0 tensors"),
        (1, ("tensor",), "1 tensor"),
        (1_204, ("tensor",), "1,204 tensors"),
        (1, ("bias", "biases"), "1 bias"),
        (2, ("bias", "biases"), "2 biases"),
    ],
)
def test_counts_use_the_right_plural(n, words, shown):
    assert shown == count(n, *words)


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("0", 0),
        ("12", 12),
        ("999999999", 999_999_999),
        ("1" * 10, None),
        ("", None),
        ("-1", None),
        ("²", None),
        ("१", None),
    ],
)
def test_whole_number_has_a_few_ascii_digits(word, number):
    assert number == parse_digits(word)


@pytest.mark.parametrize(
    ("names", "short", "prefix"),
    [
        (["m-Q4_K_M", "m-Q4_K_S"], ["Q4_K_M", "Q4_K_S"], "m-"),
        (["a/m-Q4_K", "a/m-Q4"], ["Q4_K", "Q4"], "a/m-"),
        (["model_q4", "model_q5"], ["model_q4", "model_q5"], ""),
        (["fp8", "fp8_row"], ["fp8", "fp8_row"], ""),
        (["m-", "m-a"], ["m-", "m-a"], ""),
        (["alone-a"], ["alone-a"], ""),
        ([], [], ""),
    ],
)
def test_common_words_are_cut_from_names(names, short, prefix):
    assert (short, prefix) == cut_prefix(names)
