"""Traces that quantization methods leave in correct files, and faults that no method makes: see findings/methods.py."""

from dataclasses import replace

import pytest
import torch
from mutation import methods, parts
from mutation.coding import code, compensate, fit, sound
from mutation.excuses import move
from mutation.layouts import find_layout
from mutation.originals import make_generator, matrix
from mutation.pairs import Bench, Case, make_pair
from mutation.scales import DAMAGES, ONE, case, declared_by_gptq
from support.making import compare

import quanterr
from quanterr.findings.methods import AWQ, GGML, GPTQ, LEARNED, ROUNDING, UNKNOWN, find_declared_method, find_method

NAME = "model.layers.0.mlp.up_proj.weight"
ATTENTION = "model.layers.0.self_attn"
ROW = 9


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq"}, GPTQ),
        ({"quant_method": "gptq", "autoround_version": "0.4"}, LEARNED),
        ({"quant_method": "awq"}, AWQ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"actorder": "static"}}}}, GPTQ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"actorder": None}}}}, UNKNOWN),
        ({}, ROUNDING),
    ],
)
def test_configuration_names_the_method(config, method):
    assert method == find_declared_method(config)
    assert GGML == find_method(find_declared_method(config), "gguf_q4_k", folded=False)


def warnings(report):
    """Return warnings about the weights; the configuration belongs to a larger model."""
    return {finding.code for finding in report.findings if finding.severity != "info"} - {"config_mismatch"}


@pytest.fixture
def outlier():
    """A weight with a row in which a single value, in a column of large inputs, is far larger than the rest."""
    x, generator = matrix(256, 512, 5).float(), make_generator(6)
    inputs = torch.randn(1024, 64, generator=generator) @ torch.randn(64, 512, generator=generator)
    inputs[:, 40] = 30 * inputs[:, 40].abs() + 100
    inputs += inputs[:, 40:41] * torch.randn(1, 512, generator=generator) * 0.3
    x[ROW, 40] = 40 * x[ROW].abs().max()
    return x.bfloat16(), inputs


@pytest.fixture
def gptq(tmp_path, outlier):
    """A correct pair, quantized by GPTQ with those inputs."""
    x, inputs = outlier
    layout = declared_by_gptq(find_layout("GPTQ 4 bits"))
    return make_pair(Bench(tmp_path), layout, {NAME: x}, lambda layout, x: compensate(layout, x, inputs))


def test_row_with_a_large_error_that_gptq_spreads_is_accepted(gptq):
    assert set() == warnings(gptq.report)


def test_same_row_with_other_values_is_a_warning(gptq):
    before = gptq.weights[NAME]
    codes = before.codes.clone()
    codes[20] = codes[21]
    report = compared_with(gptq, before, codes)
    assert {"excess_rows"} <= warnings(report)


def with_smaller_row(x, _generator):
    x[ROW] *= 0.8
    return x


@pytest.mark.parametrize("name", ["GPTQ 4 bits", "CT INT4 g128"])
@pytest.mark.parametrize(
    ("damage", "finding"),
    [(with_smaller_row, "excess_rows"), (parts.half_of_another_step, "another_source"), (parts.block, "excess_blocks")],
)
def test_damage_beside_compensated_errors_is_a_warning(tmp_path, name, damage, finding):
    generator = make_generator(6)
    x = torch.randn(128, 256, generator=generator).bfloat16()
    inputs = torch.randn(512, 64, generator=generator) @ torch.randn(64, 256, generator=generator)
    inputs += 4 * torch.randn(512, 256, generator=generator)
    pair = make_pair(Bench(tmp_path), find_layout(name), {NAME: x}, lambda layout, x: compensate(layout, x, inputs))
    after = move(damage)(pair.layout, x, pair.weights[NAME])
    assert set() == warnings(pair.report)
    assert {finding} == warnings(compared_with(pair, pair.weights[NAME], after.codes))


def collinear(x):
    """Return inputs whose every second channel repeats the one before."""
    inputs = torch.randn(1024, x.shape[1], generator=make_generator(6))
    inputs[:, 1::2] = inputs[:, ::2] + 1e-3 * inputs[:, 1::2]
    return inputs


def with_large_steps(x):
    """Return a weight in which one group has far larger steps than the others of its row."""
    x[ROW, 40] = 40 * x[ROW].abs().max()
    return x.bfloat16()


@pytest.mark.parametrize("layout", ["GPTQ 4 bits", "GPTQ 8 bits"])
def test_block_as_coarse_as_the_coarsest_of_its_row_is_accepted(tmp_path, layout):
    x = with_large_steps(matrix(128, 512, 5).float())
    pair = make_pair(
        Bench(tmp_path), find_layout(layout), {NAME: x}, lambda layout, x: compensate(layout, x, collinear(x))
    )
    assert set() == warnings(pair.report)
    before = pair.weights[NAME]
    codes = before.codes.clone()
    codes[20, :, 2] = codes[21, :, 2]
    assert {"excess_rows"} == warnings(compared_with(pair, before, codes))


@pytest.mark.parametrize("shared", [True, False])
def test_row_with_shared_error_directions_is_excused_without_a_declaration(tmp_path, shared):
    x, generator = matrix(256, 512, 5), make_generator(6)
    pair = make_pair(Bench(tmp_path), find_layout("CT INT4 g128"), {NAME: x})
    direction, other = ((torch.rand(512, generator=generator) < 0.06).float() for _ in range(2))
    off = torch.randn(256, 1, generator=generator).sign() * direction
    off[ROW] = 3 * (direction if shared else other)
    before = pair.weights[NAME]
    codes = (before.codes + before.layout.groups(off)).clamp(-8, 7)
    assert shared != ("excess_rows" in warnings(compared_with(pair, before, codes)))


def compared_with(pair, before, codes):
    """Return the report where the weight has other codes."""
    after = code(before.layout, pair.x[NAME], *before.wanted, codes=codes)
    path = pair.write(Case("other codes", {NAME: after}), pair.path)
    return quanterr.compare(pair.original, path, device="cpu")


def with_huge_values(x, number, factor):
    x = x.float()
    x.view(-1)[torch.randint(x.numel(), (number,), generator=make_generator(1))] *= factor
    return x.bfloat16()


@pytest.mark.parametrize(
    ("layout", "number", "factor"),
    [("Q4_K", 2, 1e4), ("Q5_K", 2, 1e4), ("Q6_K", 20, 1e4), ("quanto INT4", 200, 1e3), ("quanto INT2", 200, 1e3)],
)
def test_error_beside_huge_values_is_the_limit_of_the_format(tmp_path, layout, number, factor):
    x = with_huge_values(matrix(256, 512, 3), number, factor)
    assert set() == warnings(make_pair(Bench(tmp_path), find_layout(layout), {NAME: x}).report)


def test_row_with_wider_scales_than_its_values_need_is_bad(tmp_path):
    x = with_huge_values(matrix(256, 512, 3), 200, 1e3)

    def with_a_wide_row(layout, x):
        scale, shift = fit(layout, x)
        scale[186], shift[186] = 2.1 * scale[186], 2.1 * shift[186]
        return code(layout, x, scale, shift)

    assert "bad_rows" in warnings(
        make_pair(Bench(tmp_path), find_layout("quanto INT4"), {NAME: x}, with_a_wide_row).report
    )


@pytest.mark.parametrize(("layout", "damage"), [("INT8 tensor", "tensor / 6"), ("GPTQ 2 bits asym", "columns / 6")])
def test_scales_that_clip_are_a_warning_where_rounding_gains_as_much(tmp_path, layout, damage):
    """GPTQ explains neither: where all codes are the nearest, no error was moved."""
    pair = make_pair(Bench(tmp_path), find_layout(layout), {ONE: matrix(512, 768, 200)})
    outcome = pair.outcome("scales", case(pair, next(candidate for candidate in DAMAGES if candidate.name == damage)))
    assert ("noticed", True) == (outcome.told, outcome.loss.counts)


@pytest.mark.parametrize("layout", ["AWQ", "NF4", "INT8 row", "MLX 4 bits"])
def test_scales_with_an_unused_range_are_a_warning(tmp_path, layout):
    x = matrix(256, 512, 3)
    bench = Bench(tmp_path)
    assert {"scale_loss"} == warnings(make_pair(bench, find_layout(layout), {NAME: x}, methods.scale_by(1.3)).report)
    assert set() == warnings(make_pair(bench, find_layout(layout), {NAME: x}, sound).report)


def test_clipped_largest_fp8_value_is_a_warning(tmp_path):
    x = matrix(256, 512, 3).float()
    unit = x.abs().amax() / 448
    for factor, expected in ((1.0, set()), (0.85, {"scale_loss"})):
        codes = (x / (factor * unit)).clamp(-448, 448).to(torch.float8_e4m3fn)
        folder = tmp_path / str(factor)
        folder.mkdir()
        report = compare(folder, {NAME: x}, {NAME: codes, f"{NAME}_scale": factor * unit})
        assert expected == warnings(report)


def test_shared_scale_for_fused_weights_is_right_if_one_needs_it(tmp_path):
    x = {
        f"model.layers.0.self_attn.{part}_proj.weight": matrix(128, 512, n).float() / 3**n
        for n, part in enumerate("qkv")
    }
    unit = max(weight.abs().max() for weight in x.values()) / 127
    stored = {name: (weight / unit).round().to(torch.int8) for name, weight in x.items()}
    report = compare(tmp_path, x, stored | {f"{name}_scale": unit for name in x})

    assert set() == warnings(report)
    assert 2 == sum(finding.code == "shared_scale" for finding in report.findings)


def test_shared_scale_larger_than_necessary_is_an_error(tmp_path):
    x = {f"{ATTENTION}.{part}_proj.weight": matrix(128, 512, n).float() for n, part in enumerate("qk")}
    unit = 30 * max(weight.abs().max() for weight in x.values()) / 127
    stored = {name: (weight / unit).round().to(torch.int8) for name, weight in x.items()}
    report = compare(tmp_path, x, stored | {f"{name}_scale": unit for name in x})

    assert {"error"} == {finding.severity for finding in report.findings if finding.code == "scale_loss"}


@pytest.mark.parametrize("damage", [methods.exchange_columns, methods.lowest])
def test_damage_whose_directions_few_rows_or_columns_share_is_a_warning(tmp_path, damage):
    x, layout = matrix(256, 512, 3), find_layout("CT INT4 asym g128")
    report = make_pair(Bench(tmp_path), layout, {NAME: x}, lambda layout, x: damage(layout, x, sound(layout, x))).report
    assert {warning for warning in warnings(report) if warning.startswith(("excess", "bad_rows"))}


def find_by_method(tmp_path, name, damage):
    """Return the findings about a weight by GPTQ, if it is one that GPTQ makes, which is then damaged."""
    x, generator = matrix(128, 256, 5), make_generator(6)
    layout = declared_by_gptq(find_layout(name)) if isinstance(name, str) else name
    inputs = torch.randn(512, 64, generator=generator) @ torch.randn(64, 256, generator=generator)

    def quantize(layout, x):
        compensates = layout.name.startswith(("GPTQ", "CT"))
        return damage(compensate(layout, x, inputs) if compensates else sound(layout, x))

    return make_pair(Bench(tmp_path), layout, {NAME: x}, quantize).report.findings


@pytest.mark.parametrize("places", [[3, 200], []])
def test_columns_with_exchanged_groups_are_named(tmp_path, places):
    plain = find_layout("GPTQ 4 bits")

    def store(name, weight):
        stored = plain.store(name, weight)
        order = stored[name.replace("weight", "g_idx")]
        order[places] = order[places[::-1]]
        return stored

    layout = replace(plain, store=store, config=plain.config | {"desc_act": True})
    findings = find_by_method(tmp_path, layout, lambda by_method: by_method)
    assert bool(places) == any(
        "a few columns (3, 200) have the scales of other" in finding.message for finding in findings
    )


def find_moved(tmp_path, name, damage):
    return [
        finding for finding in find_by_method(tmp_path, name, damage) if "holds the values of column" in finding.message
    ]


@pytest.mark.parametrize("name", ["GPTQ 4 bits asym", "CT INT4 asym g128"])
@pytest.mark.parametrize("share", [0.05, 0])
def test_zero_points_that_are_off_by_whole_steps_are_named(tmp_path, name, share):
    findings = find_by_method(tmp_path, name, lambda by_method: methods.shift_zeros(share)(None, None, by_method))
    assert bool(share) == any(
        "off by whole steps (1)" in finding.message for finding in findings if finding.severity == "warning"
    )


@pytest.mark.parametrize("name", ["GPTQ 4 bits", "GPTQ 4 bits asym", "CT INT4 g128", "Q2_K"])
def test_columns_that_hold_the_values_of_others_are_named(tmp_path, name):
    (moved,) = find_moved(tmp_path, name, lambda by_method: methods.exchange_columns(None, None, by_method))
    assert "warning" == moved.severity
    assert [[-1, 3], [-1, 244]] == moved.evidence["places"]


def test_columns_with_much_compensated_error_hold_their_own_values(tmp_path):
    assert [] == find_moved(tmp_path, "GPTQ 4 bits", lambda by_method: by_method)


def quantize_around_middle(layout, x):
    """Quantize with scales for whole ranges, but with zero points in the middle."""
    return methods.move_to_middle(layout, x, sound(layout, x))


@pytest.mark.parametrize("layout", ["quanto INT4", "Q2_K", "MLX 4 bits"])
def test_equal_zero_points_with_scales_for_whole_ranges_are_a_warning(tmp_path, layout):
    bench, x = Bench(tmp_path), {NAME: matrix(256, 512, 3)}
    assert "zero_points" in warnings(make_pair(bench, find_layout(layout), x, quantize_around_middle).report)


@pytest.mark.parametrize("layout", ["quanto INT4", "CT INT4 asym g128", "MLX 4 bits"])
def test_equal_zero_points_with_fitting_scales_are_no_warning(tmp_path, layout):
    def symmetric(layout, x):
        largest = layout.groups(x.float()).abs().amax((1, 3))
        unit = 0.85 * largest / 7.5  # clipped, as a search for scales chooses it
        return code(layout, x, unit, -unit * round((layout.grid.high + layout.grid.low) / 2))

    report = make_pair(
        Bench(tmp_path), replace(find_layout(layout), config={}), {NAME: matrix(256, 512, 3)}, symmetric
    ).report
    assert "zero_points" not in warnings(report)


@pytest.mark.parametrize("layout", ["CT INT4 asym g128", "AWQ", "GPTQ 4 bits asym"])
@pytest.mark.parametrize("x", [matrix(256, 512, 3), torch.randn(256, 256, generator=make_generator(3)).bfloat16()])
def test_equal_zero_points_with_scales_for_other_zero_points_are_a_warning(tmp_path, layout, x):
    bench, x = Bench(tmp_path), {NAME: x}
    assert "zero_points" in warnings(make_pair(bench, find_layout(layout), x, quantize_around_middle).report)
    assert "zero_points" not in warnings(make_pair(bench, find_layout(layout), x, sound).report)
