"""Whether experts are stacked or stored separately, the worst is named."""

import io

import pytest
import torch
from support.making import compare, in_memory, numbers, quantized_fp8, sum_up, summed_by_chunk
from support.tolerances import FEW

from quanterr.metrics.sums import Sums, as_float
from quanterr.outputs.terminal import make_console, show
from quanterr.views.comparison.items import values
from quanterr.views.comparison.layers import find_worst_expert, pick_worst_layers

PLACE = "model.layers.0.mlp.experts"


def stack(worst):
    """Return four experts and a bad copy, in which one is ten times as far off as the others."""
    x = numbers(4, 48, 64, dtype=torch.float32)
    noise = torch.full((4, 1, 1), 0.01)
    noise[worst] = 0.1
    return x, x + noise * numbers(4, 48, 64, seed=1, dtype=torch.float32).sign() * x.abs().mean()


@pytest.fixture
def apart(tmp_path):
    """The report of four experts that are stored separately; the third is bad."""
    x, y = stack(2)
    sides = [{f"{PLACE}.{e}.up_proj.weight": side[e].clone() for e in range(4)} for side in (x, y)]
    norm = {"model.layers.0.self_attn.q_proj.weight": numbers(64, 64, dtype=torch.float32)}
    sides[0] |= norm
    sides[1] |= {name: weight + 0.001 for name, weight in norm.items()}
    return compare(tmp_path, *sides)


class TestStack:
    @pytest.mark.session
    @pytest.mark.parametrize("wide", [False, True], ids=["fast", "exact"])
    @pytest.mark.parametrize("size", [16, 64, 1000, 48 * 64, 5000, 1 << 19])
    def test_expert_energies_equal_float64(self, size, wide):
        x, y = stack(2)
        for sums in (sum_up(x, y, size, wide), Sums.merge(summed_by_chunk(x, y, size, wide))):
            assert list(range(4)) == sorted(sums.matrices)
            for expert in range(4):
                matrix = sums.matrices[expert]
                e = (y[expert] - x[expert]).double()
                assert as_float(matrix.x_sq) == pytest.approx(float((x[expert].double() ** 2).sum()), rel=FEW)
                assert as_float(matrix.e_sq) == pytest.approx(float((e**2).sum()), rel=FEW)
                assert matrix.e_max == float(e.abs().max())

    def test_single_matrix_or_convolution_has_no_experts(self):
        for shape in ((64, 64), (64,), (8, 16, 3)):
            x = numbers(*shape, dtype=torch.float32)
            assert {} == sum_up(x, x + 1).matrices
            assert 0 == in_memory(x).matrix_rows

    def test_report_lists_experts_and_names_the_worst(self, tmp_path):
        codes, scale = quantized_fp8(stack(1)[1].view(-1, 64))
        stored = {f"{PLACE}.up_proj": codes.view(4, 48, 64), f"{PLACE}.up_proj_scale": scale}
        report = compare(tmp_path, {f"{PLACE}.up_proj": stack(1)[0]}, stored)
        (layer,) = report.layers

        assert [0, 1, 2, 3] == [expert.expert for expert in layer.experts]
        assert 1 == find_worst_expert(layer.experts).expert
        assert dict(values(layer))["worst_expert"] == 1
        (worst,) = pick_worst_layers(report.layers, 10)
        assert worst == (layer, f"4 experts, the worst 1: {layer.experts[1].snr_db:.2f} dB")


class TestApart:
    def test_worst_expert_stands_for_all(self, apart):
        picked = [(pick.layer.layer_name, pick.stands_for) for pick in pick_worst_layers(apart.layers, 10)]

        assert 5 == len(apart.layers)
        assert [
            (f"{PLACE}.2.up_proj.weight", "4 experts, the worst"),
            ("model.layers.0.self_attn.q_proj.weight", ""),
        ] == picked

    def test_table_names_the_worst_expert(self, apart):
        to = io.StringIO()
        show(apart.view(10), make_console(to), verbose=True)

        (row,) = [line for line in to.getvalue().splitlines() if "up_proj " in line]
        assert row.startswith(f"| {PLACE.removeprefix('model.layers.')}.2.up_proj ")
        assert "| 4 experts, the worst " in row
        assert f"| {PLACE.removeprefix('model.layers.')}.1.up_proj" not in to.getvalue()

    def test_table_has_as_many_rows_as_asked_for(self, apart):
        assert 1 == len(pick_worst_layers(apart.layers, 1))
