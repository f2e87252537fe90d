"""Plans: their choices, outputs and exports to quantizers, and comparing the results with them."""

import ast
import json
import os
import re
import shlex
import subprocess
import threading
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support.forked import call
from support.importance_files import gguf as importance_file
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.declarations import Declarations
from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.documents.reading import read_stored
from quanterr.errors import Interrupted, ReportError, UsageError
from quanterr.findings.codes import make_finding
from quanterr.gates.plan_check import check_against_plan
from quanterr.planning.exports import CONSUMERS, consumers_of, export_command, export_plan, list_writable, write
from quanterr.planning.run import plan
from quanterr.recipes import parse_recipe
from quanterr.recipes.quantized_file import mix_recipes
from quanterr.recipes.tensors import fake_quantize
from quanterr.samples.measuring import SampleMeasurer
from quanterr.views.plan.view import conclusion

LAYERS = [
    f"model.layers.{n}.{module}.weight"
    for n in range(2)
    for module in ("mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
]
TO = ["int4_g32,int8_channel,fp8_row"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Yield two blocks whose layers have numbers of very different sizes."""
    tensors = {name: numbers(32, 128, seed=n).float() * 3**n for n, name in enumerate(LAYERS)}
    tensors["model.norm.weight"] = numbers(64, seed=9)
    with open_checkpoint(store(tmp_path_factory.mktemp("plan") / "x.safetensors", tensors)) as checkpoint:
        yield checkpoint


def sensitivity(folder, alphas):
    weights = [{"layer_name": name, "alpha": alpha} for name, alpha in alphas.items()]
    path = folder / "s.json"
    path.write_text(json.dumps({"schema": "quanterr.sensitivity", "schema_version": "1.1", "weights": weights}))
    return path


@pytest.mark.parametrize("alpha", ["-1", "-1e-300", "1e999"])
@pytest.mark.parametrize("field", ["alpha", "int4_g32"])
def test_unusable_sensitivity_is_refused(original, tmp_path, alpha, field):
    path = sensitivity(tmp_path, dict.fromkeys(LAYERS, 1.0))
    row = {"layer_name": LAYERS[0], "alpha": 1.0, "alphas": {"int4_g32": 1.0}}
    written = json.dumps(row).replace(f'"{field}": 1.0', f'"{field}": {alpha}')
    path.write_text(path.read_text().replace(json.dumps({"layer_name": LAYERS[0], "alpha": 1.0}), written))

    with pytest.raises(ReportError, match=rf"s\.json: {re.escape(LAYERS[0])}: alpha is .*at least 0; measure it again"):
        quanterr.plan(original, to=TO, bits=5, sensitivity=path, device="cpu")


class TestChoice:
    def test_plan_is_the_best_that_fits(self, original):
        reports = {name: quanterr.sweep(original, [name], device="cpu") for name in TO[0].split(",")}
        costs = {
            name: {
                layer.layer_name: (layer.choices[0].bytes, layer.choices[0].squared_error) for layer in ranking.layers
            }
            for name, ranking in reports.items()
        }
        new_plan = plan(original, bits=6, to=TO, device="cpu")
        groups = [LAYERS[0:2], LAYERS[2:3], LAYERS[3:5], LAYERS[5:6]]
        room = 6 * 6 * 32 * 128 / 8
        best = None
        for picks in product([*costs, None], repeat=len(groups)):
            chosen = [
                costs[pick][name] if pick else (4 * 32 * 128, 0.0)
                for group, pick in zip(groups, picks, strict=True)
                for name in group
            ]
            if sum(size for size, _ in chosen) <= room:
                best = min(best or 1e30, sum(error for _, error in chosen))

        assert pytest.approx(best, rel=1e-9) == new_plan.cost == new_plan.bound
        assert new_plan.bits_per_weight <= 6
        assert new_plan.bytes == original.nbytes - 6 * 4 * 32 * 128 + sum(layer.bytes for layer in new_plan.layers)
        assert "a guess" in new_plan.notes[0]

    @pytest.mark.slow
    def test_fused_weights_share_a_recipe_and_others_on_request(self, original):
        for same_in, alike in (
            ("fused", [LAYERS[0:2], LAYERS[3:5]]),
            ("block", [LAYERS[:3], LAYERS[3:]]),
            ("role", [LAYERS]),
        ):
            new_plan = plan(original, bits=6, to=TO, same_in=same_in, device="cpu")
            recipe = {layer.layer_name: layer.recipe for layer in new_plan.layers}
            for names in alike:
                assert 1 == len({recipe[name] for name in names})

    def test_sensitivity_decides_and_unnamed_layers_stay_unquantized(self, original, tmp_path):
        alphas = {name: 100.0 if name == LAYERS[2] else 1e-6 for name in LAYERS[:5]}
        new_plan = plan(original, bits=9, to=TO, sensitivity=sensitivity(tmp_path, alphas), device="cpu")
        recipes = {layer.layer_name: layer.recipe for layer in new_plan.layers}

        assert "predicted KLD" == new_plan.measure
        assert LAYERS[5] not in recipes
        assert recipes[LAYERS[2]] in (ORIGINAL, "int8_channel")
        assert f"does not name 1 layer, left unquantized: {LAYERS[5]}" in new_plan.notes[0]

    @pytest.mark.slow
    def test_limits_give_the_smallest_size_that_meets_them(self, original, tmp_path):
        by_snr = plan(original, min_snr=35, to=TO, device="cpu")
        below = plan(original, size=by_snr.bytes - 1, to=TO, device="cpu")
        assert by_snr.snr_db >= 35 > below.snr_db

        path = sensitivity(tmp_path, dict.fromkeys(LAYERS, 1.0))
        by_kld = plan(original, max_kld=0.001, to=TO, sensitivity=path, device="cpu")
        below = plan(original, size=by_kld.bytes - 1, to=TO, sensitivity=path, device="cpu")
        assert by_kld.cost <= 0.001 < below.cost
        fitting = [uniform for uniform in by_kld.uniform if uniform.cost <= 0.001]
        assert fitting == [uniform for uniform in by_kld.uniform if uniform.fits]
        assert f"% of bytes against {min(fitting, key=lambda uniform: uniform.bytes).recipe} for all" in conclusion(
            by_kld
        )

    @pytest.mark.parametrize("same_in", ["fused", "block"])
    def test_plan_meets_its_own_cost_as_a_limit(self, original, tmp_path, same_in):
        """If costs are added up in groups, the sum may be larger in the last digit."""
        path = sensitivity(tmp_path, {name: 0.1 * 1.3**n for n, name in enumerate(LAYERS)})
        chosen = {"to": TO, "sensitivity": path, "device": "cpu", "same_in": same_in}
        for bits in (5.5, 6.7, 7.6, 8.2):
            new_plan = plan(original, bits=bits, **chosen)

            assert plan(original, max_kld=new_plan.cost, **chosen).bytes <= new_plan.bytes

    def test_bits_include_a_recipe_that_slightly_exceeds_its_name(self, original):
        """A recipe fits a budget of the bits in its name, although its scales take slightly more."""
        all_of_it = plan(original, bits=16, to=["int8_row"], device="cpu")
        exact = 8 * (all_of_it.uniform[0].bytes - all_of_it.unplanned_bytes) / (len(LAYERS) * 32 * 128)
        for bits, fits in ((exact - 4e-4, True), (exact - 6e-4, False)):
            new_plan = plan(original, bits=bits, to=["int8_row", "int4_g32"], device="cpu")
            assert fits == {uniform.recipe: uniform.fits for uniform in new_plan.uniform}["int8_row"]

    def test_curve_falls_and_uniform_plans_lie_on_or_above_it(self, original):
        new_plan = plan(original, bits=6, to=TO, device="cpu")

        assert all(
            a.bytes < b.bytes and a.cost > b.cost for a, b in zip(new_plan.curve, new_plan.curve[1:], strict=False)
        )
        for uniform in new_plan.uniform:
            assert all(point.cost <= uniform.cost + 1e-9 for point in new_plan.curve if point.bytes >= uniform.bytes)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "give one goal"),
            ({"bits": 4, "size": 1e6}, "give one goal"),
            ({"bits": 3}, "bits 3: cannot be met; the least possible is 5.031 bits per weight"),
            ({"size": 1000}, "cannot be met; the least possible is "),
            ({"max_kld": 0.1}, "max_kld needs sensitivity"),
        ],
    )
    def test_impossible_plan_is_refused_with_a_reason(self, original, options, message):
        with pytest.raises(UsageError, match=message):
            plan(original, to=["int4_g32"], device="cpu", **options)

    def test_interrupted_run_has_no_plan(self, original):
        stop = threading.Event()
        stop.set()
        with pytest.raises(Interrupted, match=r"interrupted before all layers were measured: no plan"):
            plan(original, bits=6, to=TO, stop=stop, device="cpu")


def test_plan_estimates_nothing_from_samples(original, monkeypatch):
    """Samples would take most of its time, and no plan uses their estimates."""
    expected = plan(original, bits=9, to=["gguf_q8_0", "int4_g32"], device="cpu")
    monkeypatch.delattr(SampleMeasurer, "_measure_closely")
    monkeypatch.delattr("quanterr.samples.kept_rows.prepare_sample")

    assert expected.layers == plan(original, bits=9, to=["gguf_q8_0", "int4_g32"], device="cpu").layers


class TestImportance:
    """An importance matrix weights errors if there is no sensitivity, and affects scales in both cases."""

    @pytest.fixture(scope="class")
    @classmethod
    def importance(cls, tmp_path_factory):
        blocks = {"mlp.up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}
        means = {}
        for n, name in enumerate(LAYERS):
            _, _, block, module = name.removesuffix(".weight").split(".", 3)
            means[f"blk.{block}.{blocks[module]}.weight"] = numbers(1, 128, seed=20 + n).float().square() * 5**-n
        path = tmp_path_factory.mktemp("importance") / "i.gguf"
        return list(means.values()), importance_file(path, {name: (row, [1.0]) for name, row in means.items()})

    def test_plan_cost_is_the_weighted_error(self, original, importance):
        means, path = importance
        new_plan = plan(original, bits=6, to=TO, importance=path, device="cpu")
        of_layer = {layer.layer_name: layer for layer in new_plan.layers}
        for name, row in zip(LAYERS, means, strict=True):
            x = torch.frombuffer(bytearray(original.entries[name].read()), dtype=torch.float32).view(32, 128)
            recipe = of_layer[name].recipe
            y = x if recipe == ORIGINAL else fake_quantize(x, recipe)
            assert pytest.approx(float(((y - x).square() * row).sum()), rel=1e-5) == of_layer[name].cost
        assert "weighted squared error" == new_plan.measure
        assert "errors of all outputs count the same: a guess" in new_plan.notes[0]

    def test_importance_affects_only_scales_under_a_sensitivity(self, original, importance, tmp_path):
        path = sensitivity(tmp_path, dict.fromkeys(LAYERS, 1.0))
        plans = [
            plan(original, bits=6, to=["gguf_q4_0"], sensitivity=path, importance=matrix, device="cpu")
            for matrix in (None, importance[1])
        ]
        quantized = [[layer.snr_db for layer in new_plan.layers if layer.recipe != ORIGINAL] for new_plan in plans]

        assert {"predicted KLD"} == {new_plan.measure for new_plan in plans}
        assert quantized[0] != quantized[1]

    @pytest.mark.parametrize("name", ["i.gguf", "a model's $(x).dat"])
    def test_llama_quantize_gets_the_importance_matrix_of_the_plan(self, original, importance, name):
        new_plan = plan(original, bits=6, to=["gguf_q4_0"], importance=importance[1], device="cpu")
        given = replace(new_plan, importance=name)
        command = export_plan(given, "llama-quantize").split("\n", 1)[1].replace("\\\n", "")
        without = plan(original, bits=6, to=["gguf_q4_0"], device="cpu")

        assert str(importance[1]) == new_plan.importance
        assert ["llama-quantize", "--imatrix", name] == shlex.split(command)[:3]
        assert without.importance is None
        assert "--imatrix" not in export_plan(without, "llama-quantize")

    def test_limit_on_the_squared_error_is_refused(self, original, importance):
        with pytest.raises(UsageError, match="min_snr limits the squared error"):
            plan(original, min_snr=30, to=TO, importance=importance[1], device="cpu")


def test_cost_has_the_same_form_in_every_output(original):
    """Squared errors are shown as an SNR, as in other outputs; output errors are shares in per cent."""
    new_plan = plan(original, bits=9, to=TO, device="cpu")
    other = replace(new_plan, measure="predicted output error", cost=9.403e-06, bound=9.403e-06, uniform=[])

    assert f"SNR {new_plan.snr_db:.2f} dB" in conclusion(new_plan)
    assert "squared error" not in conclusion(new_plan)
    assert "predicted output error 0.0009403 %" in conclusion(other)


class TestKept:
    def test_kept_layers_show_cost_and_gain_over_the_usual_recipe(self, original):
        new_plan = plan(original, bits=10, to=["int4_g32"], device="cpu")
        uniform = {layer.layer_name: layer for layer in plan(original, bits=5.1, to=["int4_g32"], device="cpu").layers}
        kept = [layer for layer in new_plan.layers if layer.recipe == ORIGINAL]
        (table,) = next(section for section in new_plan.view(10).sections if section.key == "kept").parts

        assert kept
        for layer in kept:
            other = uniform[layer.layer_name]
            assert ("int4_g32", other.bytes, other.cost) == (other.recipe, layer.usual_bytes, layer.usual_cost)
        assert not any(layer.usual_bytes for layer in new_plan.layers if layer.recipe != ORIGINAL)
        assert {layer.layer_name for layer in kept} == {row[0] for row in table.rows}


class TestExports:
    def test_llama_quantize_gets_a_pattern_for_each_module_and_type(self, original):
        exported = export_plan(plan(original, bits=7, to=["gguf_q4_0,gguf_q8_0"], device="cpu"), "llama-quantize")

        making, command = exported.split("\n", 1)
        program, *words = shlex.split(command.replace("\\\n", ""))
        *options, source, made, base = words
        given = list(zip(options[::2], options[1::2], strict=True))

        assert f"convert_hf_to_gguf.py {Path(original.path).parent} --outfile original.gguf --outtype bf16" == making
        assert ("llama-quantize", "original.gguf", "planned.gguf") == (program, source, made)
        assert base in ("Q4_0", "Q8_0")
        assert [("--token-embedding-type", "bf16"), ("--output-tensor-type", "bf16")] == given[:2]
        assert {"--tensor-type"} == {name for name, _ in given[2:]}
        patterns = [value.rpartition("=") for _, value in given[2:]]
        planned = plan(original, bits=7, to=["gguf_q4_0,gguf_q8_0"], device="cpu").layers
        for layer in planned:
            name = layer.layer_name.replace("model.layers", "blk")
            for module in ("up", "gate", "down"):
                name = name.replace(f"mlp.{module}_proj", f"ffn_{module}")
            kinds = [kind for pattern, _, kind in patterns if re.search(pattern, name)]
            assert [layer.recipe.removeprefix("gguf_").replace("original", "bf16")] == kinds, name
        assert len(patterns) < len(planned)

    def test_plan_with_searched_scales_is_refused(self, original):
        """No program computes these scales, so the checkpoint would have other errors than planned."""
        new_plan = plan(original, bits=9, to=["int8_row"], scales="mse", device="cpu")
        same = plan(original, bits=9, to=["int8_row"], scales="absmax", device="cpu")

        assert [] == consumers_of(new_plan)
        assert "convert_to_quant" in consumers_of(same)
        with pytest.raises(UsageError, match="convert_to_quant does not write int8_row:scales=mse; plan with recipes"):
            export_plan(new_plan, "convert_to_quant")
        assert "int8_tensorwise" in export_plan(same, "convert_to_quant")

    @pytest.mark.parametrize(("program", "recipe"), [("llmcompressor", "int8_channel"), ("bitsandbytes", "nf4")])
    def test_head_is_left_out_unless_the_plan_quantizes_it(self, tmp_path, program, recipe):
        names = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")
        given = store(tmp_path / "x.safetensors", {name: numbers(64, 64).float() for name in names})
        new_plan = plan(given, bits=10, to=[recipe], layers=["*"], device="cpu")
        kept = [replace(layer, recipe=ORIGINAL) if layer.layer_name == names[0] else layer for layer in new_plan.layers]
        others = [layer for layer in new_plan.layers if layer.layer_name != names[0]]

        assert {recipe} == {layer.recipe for layer in new_plan.layers}
        assert '"lm_head"' not in export_plan(new_plan, program)
        assert 1 == export_plan(replace(new_plan, layers=kept), program).count('"lm_head"')
        assert 1 == export_plan(replace(new_plan, layers=others), program).count('"lm_head"')

    def test_formats_that_no_runtime_loads_together_are_named(self, original):
        new_plan = plan(original, bits=6, to=["nvfp4,gguf_q8_0"], device="cpu")

        assert {"nvfp4", "gguf_q8_0"} <= {layer.recipe for layer in new_plan.layers}
        assert (
            "no known runtime loads ct_nvfp4, gguf_q8_0 in one checkpoint; give --to recipes of one" in new_plan.notes
        )
        assert not any("no runtime" in note for note in plan(original, bits=6, to=TO, device="cpu").notes)

    def test_embeddings_quantized_by_llama_quantize_itself_are_named(self, tmp_path):
        names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
        given = store(tmp_path / "x.safetensors", {name: numbers(64, 64) for name in names})
        note = "-l '\\*' also plans embeddings and heads, which llama-quantize quantizes by itself"

        assert re.search(note, " ".join(plan(given, bits=9, to=["gguf_q8_0"], device="cpu").notes))
        assert not re.search(note, " ".join(plan(given, bits=9, to=["int8_row"], device="cpu").notes))
        with pytest.raises(UsageError, match=note):
            plan(given, size="9KB", to=["gguf_q8_0"], device="cpu")

    @pytest.mark.parametrize("name", ["model", "a model's", 'x"; $(touch harmed) `id`!\\'])
    def test_export_command_takes_any_name_literally(self, original, name):
        changed = replace(plan(original, bits=9, to=["int8_row"], device="cpu"), original=name)
        for consumer, row in CONSUMERS.items():
            words = shlex.split(export_command(changed, consumer))
            if row.python:
                tree = ast.parse(words[2])
                constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
                assert ["python", "-c"] == words[:2]
                assert {name, row.file} <= set(constants)
            else:
                assert not row.command or {name, row.file} <= set(words)

    def test_plan_names_the_programs_that_write_all_its_recipes(self, original):
        new_plan = plan(original, bits=7, to=["gguf_q4_0,gguf_q8_0"], device="cpu")

        assert ["llama-quantize"] == consumers_of(new_plan)

    def test_transformers_accepts_the_bitsandbytes_export(self, original):
        transformers = pytest.importorskip("transformers", reason='pip install "quanterr[evaluate]"')
        fields = json.loads(export_plan(plan(original, bits=14, to=["nf4:double"], device="cpu"), "bitsandbytes"))
        config = transformers.BitsAndBytesConfig(**fields)

        assert (True, "nf4", True) == (
            config.load_in_4bit,
            config.bnb_4bit_quant_type,
            config.bnb_4bit_use_double_quant,
        )
        assert {"lm_head", "model.layers.1.mlp.down_proj"} <= set(config.llm_int8_skip_modules)

    def test_every_layer_is_exported_once(self, original):
        new_plan = plan(original, bits=6, to=TO, device="cpu")
        groups = json.loads(export_plan(new_plan, "llmcompressor"))["quant_stage"]["quant_modifiers"][
            "QuantizationModifier"
        ]
        targets = [target for group in groups["config_groups"].values() for target in group["targets"]]
        configs = json.loads(export_plan(new_plan, "torchao"))["_data"]["fqn_to_config"]
        modules = {name.removesuffix(".weight") for name in LAYERS}

        patterns = [target.removeprefix("re:") for target in (*targets, *groups["ignore"])]
        assert {1} == {sum(bool(re.match(pattern, name)) for pattern in patterns) for name in modules}
        assert len(patterns) < len(modules) + 1
        assert modules == configs.keys()
        mlx = json.loads(export_plan(plan(original, bits=7, to=["mlx_q{4,8}_g64"], device="cpu"), "mlx"))
        assert modules == mlx.keys()
        assert {64} == {how["group_size"] for how in mlx.values() if how}

    @pytest.mark.parametrize(
        ("consumer", "to", "declare"),
        [
            (
                "llmcompressor",
                TO,
                lambda written: written["quant_stage"]["quant_modifiers"]["QuantizationModifier"],
            ),
            ("torchao", TO, lambda written: {"quant_method": "torchao", "quant_type": {"default": written}}),
            ("mlx", ["mlx_q{4,8}_g64"], lambda written: {"bits": 2, "group_size": 32} | written),
            ("bitsandbytes", ["nf4"], lambda written: written),
        ],
    )
    def test_export_declares_for_each_layer_what_was_planned(self, original, consumer, to, declare):
        new_plan = plan(original, bits=7, to=to, device="cpu")
        declared = Declarations(declare(json.loads(export_plan(new_plan, consumer))))

        for layer in new_plan.layers:
            scheme = declared.of(layer.layer_name)
            assert scheme.is_quantized == (layer.recipe != ORIGINAL)
            bits = re.search(r"int(\d)|mlx_q(\d)|[nf]+[fp]?(4|8)", layer.recipe)
            assert layer.recipe == ORIGINAL or scheme.bits == int(next(filter(None, bits.groups())))

    def test_modelopt_gets_a_quantizer_for_each_weight(self, original):
        to = ["fp8_tensor,fp8_row,fp8_block128,int8_row,int4_g32,int8_channel,nvfp4,mxfp4,mxfp8"]
        new_plan = plan(original, bits=6, to=to, device="cpu")
        recipes = ("fp8_row", "nvfp4", "int4_g32", "int8_channel")
        for layer, recipe in zip(new_plan.layers, recipes, strict=False):
            layer.recipe = recipe
        first, deny, *lines = export_plan(new_plan, "modelopt").splitlines()
        module = new_plan.layers[1].layer_name.removesuffix(".weight")

        assert ("quant_cfg:", '- {quantizer_name: "*", enable: false}', "algorithm: max") == (first, deny, lines.pop())
        assert sum(layer.recipe != ORIGINAL for layer in new_plan.layers) == len(lines)
        config = "{num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e4m3}}"
        assert f'- {{quantizer_name: "{module}.weight_quantizer", cfg: {config}}}' in lines

    def test_convert_to_quant_gets_a_pattern_for_each_weight(self, original):
        """Like load_layer_config and get_layer_settings of convert_to_quant, match by re.search, then take _default."""
        new_plan = plan(original, bits=8.2, to=["fp8_row,fp8_block128,int8_row"], device="cpu")
        config = json.loads(export_plan(new_plan, "convert_to_quant"))
        formats = {"fp8_row": "float8_e4m3fn_rowwise", "fp8_block128": "float8_e4m3fn_blockwise", ORIGINAL: None}
        formats["int8_row"] = "int8_tensorwise"

        assert {"skip": True} == config.pop("_default")
        for layer in new_plan.layers:
            module = layer.layer_name.removesuffix(".weight")
            (how,) = [how for pattern, how in config.items() if re.search(pattern, module)]
            assert formats[layer.recipe] == how.get("format")
            assert (layer.recipe == ORIGINAL) == how.get("skip", False)

    @pytest.mark.parametrize(
        ("consumer", "to", "message"),
        [
            ("convert_to_quant", "nvfp4", "convert_to_quant does not write nvfp4"),
            ("llama-quantize", "int4_g32", "llama-quantize does not write int4_g32"),
            ("mlx", "int4_g64", "mlx does not write int4_g64"),
            ("bitsandbytes", "nf4,fp4", "bitsandbytes writes one format"),
            ("gptq", "int4_g32", "choose one of llama-quantize"),
        ],
    )
    def test_recipe_that_the_program_cannot_write_is_refused(self, original, consumer, to, message):
        new_plan = plan(original, bits=6, to=[to], device="cpu")
        if consumer == "bitsandbytes":
            new_plan.layers[0].recipe, new_plan.layers[2].recipe = "nf4", "fp4"
        with pytest.raises(UsageError, match=message):
            export_plan(new_plan, consumer)

    @pytest.mark.parametrize("consumer", CONSUMERS)
    def test_all_recipes_that_a_program_writes_can_be_exported(self, original, consumer):
        new_plan = plan(original, bits=9, to=list_writable(consumer), device="cpu")
        for layer, recipe in zip(new_plan.layers, cycle(list_writable(consumer)), strict=False):
            layer.recipe = recipe  # so that all recipes are exported, not only the best ones

        assert export_plan(new_plan, consumer)

    @pytest.mark.session
    def test_command_plans_with_the_recipes_the_program_writes(self, original):
        done = call("plan", original.path, "--bits", "9", "--export", "bitsandbytes")

        assert (0, "nf4") == (done.returncode, json.loads(done.stdout)["bnb_4bit_quant_type"])
        assert "plans with what bitsandbytes writes: nf4\n" in done.stderr

    @pytest.mark.parametrize("program", CONSUMERS)
    def test_script_writes_the_program_input_and_runs_it(self, original, program, tmp_path):
        new_plan = plan(original, bits=9, to=list_writable(program), device="cpu")
        run = replace(new_plan.run, command=["quanterr", "plan", "a\nexit 3"])
        new_plan = replace(new_plan, run=run)
        with (tmp_path / "plan.sh").open("w") as script:
            write(new_plan, script, program)
        for name in ("python", "convert_hf_to_gguf.py", *CONSUMERS):
            (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@" > called\n')
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["sh", "plan.sh"], cwd=tmp_path, env=environment, check=True)  # run by a shell, as a user would

        row, called = CONSUMERS[program], (tmp_path / "called").read_text()
        lines = (export_command(new_plan, program) or export_plan(new_plan, program)).replace("\\\n", "").splitlines()
        command = shlex.split(lines[-1])  # the previous command makes the input of llama-quantize
        assert [f"{tmp_path / command[0]}", *command[1:]] == called.splitlines()
        assert not row.file or export_plan(new_plan, program) == (tmp_path / row.file).read_text()

    @pytest.mark.session
    def test_script_goes_to_its_file_and_the_plan_survives_a_refusal(self, original, tmp_path):
        arguments = (
            "plan",
            original.path,
            "-v",
            "--bits",
            "9",
            "-o",
            tmp_path / "plan.json",
            "-o",
            tmp_path / "run me.sh",
        )
        done = call(*arguments, "--export", "mlx")
        assert (0, f"quanterr: run: sh '{tmp_path / 'run me.sh'}'") == (done.returncode, done.stderr.splitlines()[-1])
        assert "The plan compared with single recipes" in done.stdout

        (tmp_path / "plan.json").unlink()
        refused = call(*arguments, "--export", "mlx", "--to", "int8_row")
        assert (2, True) == (refused.returncode, (tmp_path / "plan.json").exists())
        assert "mlx does not write int8_row" in refused.stderr

    def test_script_may_not_replace_another_output(self, original, tmp_path):
        outputs = ("-o", tmp_path / "mlx.json", "-o", tmp_path / "run.sh")
        done = call("plan", original.path, "--bits", "9", *outputs, "--export", "mlx")

        assert (2, []) == (done.returncode, list(tmp_path.iterdir()))
        assert "mlx.json: the script writes the file for mlx under this name; choose another" in done.stderr

    def test_script_without_a_program_is_refused_before_the_run(self, original, tmp_path):
        done = call("plan", original.path, "--bits", "9", "-o", tmp_path / "plan.sh")

        assert 2 == done.returncode
        assert "quanterr: -o FILE.sh is a script for a program; name it: --export llama-quantize or" in done.stderr


class TestCompare:
    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, original):
        """A plan, and the checkpoint that it describes."""
        new_plan = plan(original, bits=6, to=TO, device="cpu")
        recipes = {
            layer.layer_name: parse_recipe(layer.recipe) for layer in new_plan.layers if layer.recipe != ORIGINAL
        }
        return new_plan, recipes

    def test_planned_file_passes_its_plan(self, original, files):
        new_plan, recipes = files
        produced, _ = mix_recipes(original, recipes, "produced")
        report = check_against_plan(quanterr.compare(original, produced, device="cpu"), new_plan)

        assert ("pass", "pass", True) == (report.verdict, report.gates[0].status, report.gated), report.reasons
        assert 6 == report.gates[0].judged

    def test_another_recipe_or_a_lower_snr_is_named(self, original, files):
        new_plan, recipes = files
        name = LAYERS[2]
        other, _ = mix_recipes(original, recipes | {name: parse_recipe("fp8_tensor")}, "produced")
        report = check_against_plan(quanterr.compare(original, other, device="cpu"), new_plan)
        assert ("fail", name) == (report.verdict, report.gates[0].worst_layer)
        assert "is fp8_tensor, planned " in report.reasons[0]

        worse = parse_recipe("int4_g32:scales=p70")
        layer_name = next(layer.layer_name for layer in new_plan.layers if layer.recipe == "int4_g32")
        other, _ = mix_recipes(original, recipes | {layer_name: worse}, "produced")
        gate = check_against_plan(quanterr.compare(original, other, device="cpu"), new_plan).gates[0]
        assert "fail" == gate.status
        assert "dB, planned" in gate.violations[0].reason

    @pytest.mark.parametrize(("recipe", "verdict"), [("int8_row", "pass"), ("fp8_row", "fail"), ("int4_g32", "fail")])
    def test_only_eight_bit_integers_may_lose_more_than_half_a_decibel(self, original, recipe, verdict):
        produced, _ = mix_recipes(original, dict.fromkeys(LAYERS, parse_recipe(recipe)), "produced")
        new_plan = plan(original, bits=9, to=recipe, device="cpu")
        for layer in new_plan.layers:
            layer.snr_db += 0.8
        gate = check_against_plan(quanterr.compare(original, produced, device="cpu"), new_plan).gates[0]

        assert {recipe} == {layer.recipe for layer in new_plan.layers}
        assert verdict == gate.status, gate.message

    def test_row_integers_match_the_plan_in_either_format(self, original):
        produced, _ = mix_recipes(original, dict.fromkeys(LAYERS, parse_recipe("int8_row")), "produced")
        new_plan = plan(original, bits=9, to="int8_channel", device="cpu")
        gate = check_against_plan(quanterr.compare(original, produced, device="cpu"), new_plan).gates[0]

        assert {"ct_pack"} == {layer.format for layer in new_plan.layers}
        assert "pass" == gate.status, gate.message

    def test_unplanned_layers_may_only_be_cast(self, original, files, tmp_path):
        new_plan, _ = files
        tensors = load_file(original.path)
        norm = "model.norm.weight"
        some = replace(new_plan, layers=new_plan.layers[1:])
        left = new_plan.layers[0].layer_name

        def change(name, weight):
            where = tmp_path / "y.safetensors"
            save_file(tensors | {name: weight}, where)
            gate = check_against_plan(quanterr.compare(original, where, device="cpu"), some).gates[0]
            return [violation.layer for violation in gate.violations if "not in the plan" in violation.reason]

        weight = tensors[left]
        assert [] == change(left, weight.bfloat16())
        assert [] == change(left, weight.half())
        assert [left] == change(left, weight * (1 + 2**-12))  # stored as before, without a cast
        assert [left] == change(left, weight.flip(0).bfloat16())
        assert [left] == change(left, (weight * 1.01).half())
        assert [norm] == change(norm, (tensors[norm].float() * 1.04).half())

    @pytest.mark.parametrize(("code", "unplanned"), [("folded_scales", []), ("excess_error", ["model.norm.weight"])])
    def test_layer_that_absorbed_scales_may_change(self, original, files, tmp_path, code, unplanned):
        tensors, norm = load_file(original.path), "model.norm.weight"
        changed = store(tmp_path / "y.safetensors", tensors | {norm: (tensors[norm].float() * 1.04).half()})
        report = quanterr.compare(original, changed, device="cpu")
        with_finding = replace(report, findings=[make_finding(code, "info", norm, "it was changed")])
        gate = check_against_plan(with_finding, files[0]).gates[0]

        assert unplanned == [violation.layer for violation in gate.violations if "not in the plan" in violation.reason]

    @pytest.mark.parametrize(("shift", "verdict"), [(1e-4, "pass"), (1.0, "fail")])
    def test_biases_for_quantized_weights_may_only_be_corrected(self, tmp_path, shift, verdict):
        weight, bias = numbers(32, 128, seed=1).float(), numbers(32, seed=2).float()
        unit = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / unit).to(torch.float8_e4m3fn)
        path, produced = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
        save_file({"a.weight": weight, "a.bias": bias}, path)
        save_file({"a.weight": codes, "a.weight_scale": unit, "a.bias": bias + shift * weight.norm(dim=1)}, produced)
        report = quanterr.compare(path, produced, device="cpu")
        gate = check_against_plan(report, plan(path, bits=16, to="fp8_row", device="cpu")).gates[0]

        assert verdict == gate.status, gate.message

    def test_all_planned_layers_must_be_there(self, original, files):
        new_plan, recipes = files
        produced, _ = mix_recipes(original, recipes, "produced")
        report = quanterr.compare(original, produced, layers=["model.layers.0.*"], device="cpu")
        judged = check_against_plan(report, new_plan)

        assert ("fail", 6) == (judged.verdict, judged.gates[0].judged)
        assert set(LAYERS[3:]) == {violation.layer for violation in judged.gates[0].violations}
        assert "was planned but not compared" in judged.reasons[0]

    @pytest.mark.parametrize("change", [torch.neg, lambda weight: weight.roll(1, 0), lambda weight: weight * 2])
    def test_plan_for_an_original_with_the_same_names_is_refused(self, original, files, tmp_path, change):
        tensors = load_file(original.path)
        tensors[LAYERS[1]] = change(tensors[LAYERS[1]])
        other = store(tmp_path / "other.safetensors", tensors)
        with pytest.raises(UsageError, match=rf"the plan was made for another original: .*{LAYERS[1]}"):
            check_against_plan(quanterr.compare(other, other, device="cpu"), files[0])

    def test_edited_plan_is_reported(self, files, tmp_path, capsys):
        where = tmp_path / "p.json"
        files[0].save(where)
        assert files[0] == quanterr.read_document(str(where))
        assert not capsys.readouterr().err

        where.write_text(where.read_text().replace('"int4_g32"', '"int8_channel"', 1))
        quanterr.read_document(str(where))
        assert "p.json: its checksum does not match: it was edited" in capsys.readouterr().err

        fields = json.loads(where.read_text())
        del fields["checksum"]
        for layer in fields["layers"]:  # an earlier version did not write these fields
            del layer["original_norm"], layer["original_fingerprint"]
        (tmp_path / "old.json").write_text(json.dumps(fields))
        assert 6 == len(quanterr.read_document(str(tmp_path / "old.json")).layers)
        assert "old.json: has no checksum" in capsys.readouterr().err

    def test_plan_and_compare_commands_work_together(self, original, tmp_path):
        where = tmp_path / "plan.json"
        done = call("plan", "-v", original.path, "--bits", "6", "--to", TO[0], "-o", where)
        assert 0 == done.returncode, done.stderr
        assert "\nwithout --sensitivity every squared error counts the same: a guess" in done.stdout
        assert "no plan is better\n" in done.stdout
        assert f"\nwrote {where}\n" in done.stdout

        judged = call("compare", original.path, original.path, "--plan", where)
        assert 1 == judged.returncode
        assert "gate as planned: format, bits, SNR; the rest unchanged does not hold: " in judged.stderr
        assert 6 == len(quanterr.read_document(str(where)).layers)
        assert 2 == call("plan", original.path, "--size", "6 apples").returncode

    def test_damaged_plan_or_plan_for_another_model_is_refused(self, original, files, tmp_path):
        (tmp_path / "p.json").write_text('{"schema": "quanterr.report"}')
        with pytest.raises(ReportError, match=r"not a plan of quanterr"):
            read_stored(str(tmp_path / "p.json"), Plan)
        save_file({"other.weight": torch.ones(4, 4)}, tmp_path / "o.safetensors")
        report = quanterr.compare(tmp_path / "o.safetensors", tmp_path / "o.safetensors")
        with pytest.raises(UsageError, match="names none of the compared layers"):
            check_against_plan(report, files[0])
