"""The choice of layers to keep unquantized, compared with brute force, and budgets as users write them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.sample_reports import report_of, small

from quanterr.advice.kept_layers import (
    Budget,
    KeptLayer,
    choose_few,
    choose_within,
    list_keepable,
    order_by_worth,
    parse_budget,
)
from quanterr.advice.quantizers import join_names
from quanterr.documents.comparison.layer import find_sizes
from quanterr.errors import UsageError

LAYERS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=7).map(
    lambda pairs: [KeptLayer(f"layer{n}", added, float(error)) for n, (added, error) in enumerate(pairs)]
)


class TestBudget:
    @pytest.mark.parametrize(
        ("text", "budget"),
        [
            ("1000000", Budget(1e6)),
            ("500MiB", Budget(500 * 2**20)),
            ("1.5 gb", Budget(1.5e9)),
            ("3dB", Budget(3, is_gain=True)),
        ],
    )
    def test_budget_is_bytes_or_a_gain(self, text, budget):
        assert budget == parse_budget(text)

    @pytest.mark.parametrize("text", ["", "x", "0", "-3dB", "3 dBm", "1e9", "nan", "5%", "1" * 400])
    def test_any_other_budget_is_wrong_usage(self, text):
        with pytest.raises(UsageError, match=r"--keep-original .*give bytes, such as 500MiB, or a gain"):
            parse_budget(text)


class TestChoice:
    @given(LAYERS)
    def test_first_layers_remove_as_much_error_as_any_choice_with_their_bytes(self, layers):
        ordered = order_by_worth(layers)
        for n in range(len(ordered) + 1):
            room, gone = (sum(layer[key] for layer in ordered[:n]) for key in (1, 2))
            others = (c for k in range(len(layers) + 1) for c in combinations(layers, k))
            best = max(sum(x.error for x in c) for c in others if sum(x.added for x in c) <= room)
            assert best == gone

    @given(LAYERS, st.integers(0, 200))
    def test_byte_budget_removes_as_much_error_as_any_choice(self, layers, room):
        kept = choose_within(order_by_worth(layers), Budget(room), 1e9)
        every = (c for k in range(len(layers) + 1) for c in combinations(layers, k))
        best = max(sum(x.error for x in c) for c in every if sum(x.added for x in c) <= room)

        assert sum(layer.added for layer in kept) <= room
        assert best == sum(layer.error for layer in kept)

    @given(LAYERS, st.sampled_from([0.5, 1.0, 3.0, 6.0]))
    def test_gain_costs_as_few_bytes_as_any_choice(self, layers, gain):
        error = sum(layer.error for layer in layers) * 1.2
        kept = choose_within(order_by_worth(layers), Budget(gain, True), error)
        every = (c for k in range(len(layers) + 1) for c in combinations(layers, k))
        enough = error * (1 - 10 ** (-gain / 10)) - 1e-9
        costs = [sum(x.added for x in c) for c in every if sum(x.error for x in c) >= enough]

        assert sum(layer.added for layer in kept) == (min(costs) if costs else sum(x.added for x in layers))

    def test_gain_is_reached_by_no_more_layers_than_it_needs(self):
        layers = [
            KeptLayer("a", 10, 50.0),
            KeptLayer("b", 10, 25.0),
            KeptLayer("c", 10, 12.0),
            KeptLayer("d", 10, 13.0),
        ]

        assert ["a"] == [layer.name for layer in choose_within(order_by_worth(layers), Budget(3, True), 100.0)]
        assert ["a", "b"] == [layer.name for layer in choose_within(order_by_worth(layers), Budget(6, True), 100.0)]
        assert 4 == len(choose_within(order_by_worth(layers), Budget(60, True), 100.0))

    def test_layer_without_error_is_not_kept(self):
        assert [] == order_by_worth([KeptLayer("a", 10, 0.0)])

    def test_layer_that_is_no_larger_in_the_original_comes_first(self):
        assert ["b", "a"] == [layer.name for layer in order_by_worth([KeptLayer("a", 1, 9.0), KeptLayer("b", -4, 1.0)])]

    def test_few_layers_are_proposed_if_they_cause_most_error_and_cost_little(self):
        worst, *rest = (KeptLayer(f"l{n}", 10, 60.0 if n == 0 else 1.0) for n in range(30))

        assert [worst] == choose_few([worst, *rest], 89.0, nbytes=1000)
        assert [] == choose_few([worst, *rest], 89.0, nbytes=99)
        assert [] == choose_few(rest, 29.0, nbytes=1000)

    def test_every_outlier_is_proposed_and_no_ordinary_layer(self):
        outliers = [KeptLayer("a", 10, 47.0), KeptLayer("b", 10, 12.0), KeptLayer("c", 14, 14.0)]
        rest = [KeptLayer(f"l{n}", 10, 0.5) for n in range(54)]

        assert outliers == choose_few([*outliers, *rest], 100.0, nbytes=600)

    def test_layers_of_a_dequantized_copy_are_not_proposed(self):
        report = report_of(small())
        proposed = {layer.name for layer in list_keepable(report.layers, [])}
        layers = [
            replace(layer, quantized_dtype="torch.float32", quantized_bytes=2 * find_sizes(layer).original)
            for layer in report.layers
        ]

        assert proposed
        assert [] == list_keepable(layers, [])

    def test_bytes_of_an_older_report_follow_from_dtype_and_bits(self):
        layer = report_of(small()).layers[0]
        new, older = find_sizes(layer), replace(layer, original_bytes=None, quantized_bytes=None)

        assert new == find_sizes(older)
        assert (2 * new.original, new.quantized) == find_sizes(replace(older, original_dtype="torch.float32"))
        assert new == find_sizes(replace(older, original_dtype="ggml.q8_0"))


def test_modules_of_the_same_blocks_share_a_pattern():
    names = [
        "lm_head",
        "vision.blocks.0.mlp.gate",
        *(f"model.layers.{n}.{module}" for n in (2, 10) for module in ("b", "a.c")),
    ]

    assert [r"lm_head", r"vision\.blocks\.0\.mlp\.gate", r"model\.layers\.(2|10)\.(a\.c|b)"] == join_names(names)
