"""The map of blocks in the terminal: merging hides nothing bad, and it can be read without colours."""

import io
import re

import pytest
from rich.console import Console
from support.sample_reports import Model, hostile, make_mixed, report_of, small

from quanterr.outputs import block_map
from quanterr.outputs.block_map import COLOURS, CURVE, MAX_MODULES, MAX_STACKS, draw_block_maps
from quanterr.views.comparison.view import map_cells


def show(report, width=100, unicode=True, **options):
    console = Console(
        file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False, **{"color_system": None} | options
    )
    for picture in draw_block_maps(map_cells(report), width, unicode):
        console.print(picture)
    return console.file.getvalue()


def line(text, module):
    return next(row for row in text.splitlines() if row.split()[:1] == [module]).split()


def many(blocks, modules=1, stacks=1, bad=None):
    """Return a model whose weights have 30 dB, except for one with 3."""
    weights = [
        (f"stack{s}.{b}.module{m}.weight", (8, 8), "fp8_row", 3.0 if (s, b, m) == bad else 30.0)
        for s in range(stacks)
        for b in range(blocks)
        for m in range(modules)
    ]
    return report_of(Model("many", weights))


class TestCells:
    def test_digits_count_steps_above_the_worst_and_the_line_names_it(self):
        text = show(report_of(small()))

        assert ["8999999999909998", "4.12", "11"] == [line(text, "mlp.down_proj")[n] for n in (1, 3, 4)]
        assert "0: below 6 dB, 9: 30 dB or more, in steps of 3 dB" in text

    def test_worst_cells_are_the_brightest(self):
        text = show(many(4, bad=(0, 1, 0)), color_system="truecolor", force_terminal=True)
        row = next(line for line in text.splitlines() if "module0" in line)
        colours = re.findall(r"48;2;(\d+;\d+;\d+)m", row)
        other, bright = (";".join(map(str, bytes.fromhex(COLOURS[n][1:]))) for n in (6, 0))  # digits of 5 dB

        assert [other, bright, other, other] == colours

    def test_curve_is_low_where_the_snr_is(self):
        curve = line(show(report_of(small())), "mlp.down_proj")[2]

        assert CURVE[0] == curve[11]
        assert CURVE[-1] == curve[5]

    def test_uncompared_cell_outranks_every_number(self):
        text = show(report_of(make_mixed()))

        assert ["?", "7"] == line(text, "txt_mlp.2")[-2:]
        assert "? not compared" in text

    def test_undefined_cell_outranks_numbers(self):
        report = many(4)
        report.layers[2].snr_db = None
        text = show(report)

        assert ["00!0", "!", "2"] == [line(text, "module0")[n] for n in (1, -2, -1)]
        assert "! undefined" in text

    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_expert_cell_shows_the_worst_expert(self, bad):
        weights = [
            (f"layers.{n}.experts.{expert}.up.weight", (8, 8), "fp8_row", 3.0 if (n, expert) == (1, bad) else 30.0)
            for n in range(3)
            for expert in range(3)
        ]
        text = show(report_of(Model("experts", weights)))

        assert ["606", "3.00", "1"] == [line(text, "experts.*.up")[n] for n in (1, 3, 4)]

    def test_modules_that_are_identical_everywhere_have_no_line(self):
        assert "input_layernorm" not in show(report_of(small()))

    @pytest.mark.parametrize("blocks", [9, 40, 100, 1000])
    @pytest.mark.parametrize("width", [60, 80, 200])
    def test_merged_cells_show_their_worst_block(self, blocks, width):
        bad = blocks * 2 // 3
        text = show(many(blocks, bad=(0, bad, 0)), width)
        cells = line(text, "module0")[1]

        assert 1 == cells.count("0")
        assert str(bad) == line(text, "module0")[-1]
        assert all(len(row.rstrip()) <= width for row in text.splitlines())
        assert ("blocks per cell" in text) == (len(cells) < blocks)

    def test_every_block_has_a_digit_where_there_is_room(self):
        assert 38 == len(line(show(report_of(make_mixed()), 140), "modulation.lin")[1])


class TestRoom:
    @pytest.mark.parametrize("width", [20, 59])
    def test_narrow_terminal_gets_no_map(self, width):
        assert "" == show(report_of(small()), width)

    def test_fewer_than_two_blocks_get_no_map(self):
        weights = [("a.weight", (8, 8), "fp8_row", 30.0), ("layers.0.b.weight", (8, 8), "fp8_row", 30.0)]

        assert "" == show(report_of(Model("flat", weights)))

    def test_worst_modules_are_drawn_if_there_are_many(self):
        text = show(many(2, modules=40, bad=(0, 1, 33)))

        assert "module33" in text
        assert f"the {MAX_MODULES} worst of 40 modules" in text

    def test_additional_stacks_are_counted(self):
        assert "and 3 more stacks of blocks" in show(many(2, stacks=MAX_STACKS + 3))

    def test_poor_terminal_gets_only_digits(self):
        text = show(report_of(small()), unicode=False)

        assert not set(CURVE) & set(text)
        assert 4 == len(line(text, "mlp.down_proj"))


class TestColours:
    def test_digits_are_coloured_in_a_colour_terminal(self):
        assert "\x1b[" in show(report_of(small()), color_system="256", force_terminal=True)

    def test_map_is_the_same_text_without_colours(self):
        assert "\x1b" not in show(report_of(small()))

    def test_hostile_names_are_only_text(self):
        text = show(hostile(), 200)

        assert "SNR by block" in text
        assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_map_spans_at_least_12_decibels_so_that_equal_values_look_equal():
    scale = block_map._fit_scale([31.3, 31.5, 32.4])

    assert scale.step * block_map.DIGITS >= 12
    assert 1 == len({scale.digit(level) for level in (31.3, 31.5, 31.9)})
