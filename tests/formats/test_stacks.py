"""Stacks of experts: quantized per expert along inputs, ranked, planned, evaluated, and their sensitivity."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import auto_of, ids, load_tensors, save_model
from support.tolerances import FLOAT64

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation.files.fisher import SEED
from quanterr.planning.exports import export_plan
from quanterr.recipes.matrices import matrices_of

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


CONTEXT = 32


def by_rows(x):
    """Quantize to INT8 with a scale per output and expert; stacks of these models are [experts, inputs, outputs]."""
    scale = x.abs().amax(-2, keepdim=True) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def quantize_stacks(original, folder):
    """Write the original with its stacks as int8_row stores them, computed plainly."""
    tensors = load_tensors(original)
    save_file({k: by_rows(v) if v.dim() == 3 else v for k, v in tensors.items()}, folder / "produced.safetensors")
    return folder / "produced.safetensors"


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
class TestTransposedStacks:
    def test_recipe_is_applied_to_each_expert_along_its_inputs(self, name, tmp_path):
        original = save_model(name, tmp_path / "original")
        layers = {layer.layer_name: layer.choices[0] for layer in quanterr.sweep(original, ["int8_row"]).layers}
        stacks = {key: tensor for key, tensor in load_tensors(original).items() if tensor.dim() == 3}

        assert len(stacks) == 4
        for key, x in stacks.items():
            error = float((by_rows(x) - x).double().square().sum())
            experts, rows, cols = x.shape
            assert layers[key].squared_error == pytest.approx(error, rel=1e-4)  # codes at ties between float32 products
            assert layers[key].bytes == experts * (rows * cols + 4 * cols)

    def test_recipe_on_stacks_ranks_as_its_file(self, name, tmp_path):
        original = save_model(name, tmp_path / "original")
        file = quantize_stacks(original, tmp_path)
        ranking = quanterr.rank(original, [file], against=["int8_row"], layers=["experts"])
        stacks = [key for key, tensor in load_tensors(original).items() if tensor.dim() == 3]
        errors = {layer.layer_name: [choice.squared_error for choice in layer.choices] for layer in ranking.layers}

        assert set(stacks) <= set(errors)
        for key in stacks:
            ranked, recipe = errors[key]
            assert 0 < ranked == pytest.approx(recipe, rel=1e-3)  # a few codes at ties

    def test_recipe_on_stacks_evaluates_as_its_file(self, name, tmp_path):
        original = save_model(name, tmp_path / "original")
        options = {"tokens": ids(tmp_path), "context": CONTEXT, "dtype": "float64"}
        plan = quanterr.plan(original, bits=9.5, to=["int8_row"], layers=["re:experts\\.(gate_up|down)_proj$"])
        plan.save(tmp_path / "plan.json")
        candidates = quanterr.evaluate(
            original, [quantize_stacks(original, tmp_path)], against=[str(tmp_path / "plan.json")], **options
        ).candidates
        file, planned = (candidate.scores.kld_mean for candidate in candidates)

        assert len(plan.layers) == 4
        assert 0 < planned == pytest.approx(file, rel=1e-3)  # a few codes at ties

    @pytest.mark.session
    def test_every_stack_has_a_sensitivity_and_is_planned_by_it(self, name, tmp_path):
        original = save_model(name, tmp_path / "original")
        made = quanterr.evaluate(
            original, against=["int4_g16"], tokens=ids(tmp_path, 640), context=CONTEXT,
            sensitivity=tmp_path / "s.json", sensitivity_chunks=40,
        ).candidates[0]  # fmt: skip
        rows = {row["layer_name"]: row for row in json.loads((tmp_path / "s.json").read_text())["weights"]}
        stacks = {key for key, tensor in load_tensors(original).items() if tensor.dim() == 3}
        plan = quanterr.plan(original, bits=7, to=["int4_g16", "int8_g16"], sensitivity=tmp_path / "s.json")

        assert stacks <= rows.keys()
        assert all(rows[key]["alpha"] > 0 and rows[key]["alphas"]["int4_g16"] > 0 for key in stacks)
        assert 0.5 < made.predicted_kld / made.scores.kld_mean < 2
        assert stacks <= {layer.layer_name for layer in plan.layers}
        with pytest.raises(UsageError, match="is a stack of experts"):
            export_plan(plan, "llmcompressor")


def test_gate_and_up_are_two_tensors_for_llama_quantize(tmp_path):
    original = save_model("gpt_oss", tmp_path / "original")
    command = export_plan(quanterr.plan(original, bits=9, to=["gguf_q8_0"], layers=["experts"]), "llama-quantize")

    assert "'^blk\\.(0|1)\\.(ffn_gate_exps|ffn_up_exps)\\.weight$=q8_0'" in command


def test_other_stack_decides_where_shapes_are_square(tmp_path):
    stacks = {"gate_up_proj": (2, 32, 64), "down_proj": (2, 32, 32)}
    path = tmp_path / "x.safetensors"
    save_file({f"a.experts.{name}": torch.zeros(shape) for name, shape in stacks.items()}, path)
    with open_checkpoint(path) as turned:
        shapes = {name: matrices_of(f"a.experts.{name}", turned.entries)[1].shape for name in stacks}
    straight = {"gate_up_proj": torch.zeros(2, 64, 32), "down_proj": torch.arange(2.0 * 32 * 32).view(2, 32, 32)}
    save_file({f"a.experts.{name}": stack for name, stack in straight.items()}, path)
    with open_checkpoint(path) as checkpoint:
        matrices = {name: matrices_of(f"a.experts.{name}", checkpoint.entries)[1] for name in straight}
        row = matrices["down_proj"].read(1, 2)[0].clone()

    assert {"gate_up_proj": (64, 32), "down_proj": (32, 32)} == shapes
    assert {"gate_up_proj": (64, 32), "down_proj": (32, 32)} == {
        name: matrix.shape for name, matrix in matrices.items()
    }
    assert torch.equal(straight["down_proj"][1, 1], row)


def test_joined_experts_have_the_sensitivity_from_a_plain_backward_pass(tmp_path):
    """Qwen3-MoE stores gate and up of each expert separately; its model has one stack of both."""
    original, tokens = save_model("qwen3_moe", tmp_path / "original"), ids(tmp_path)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    quanterr.evaluation.run.study(
        original, tokens=tokens, context=CONTEXT, dtype="float64", sensitivity=tmp_path / "s.json", sensitivity_chunks=9
    )
    alphas = {row["layer_name"]: row["alpha"] for row in json.loads((tmp_path / "s.json").read_text())["weights"]}

    model = auto_of("qwen3_moe").from_pretrained(original, dtype=torch.float64, experts_implementation="eager").eval()
    experts, generator, scored = model.model.layers[1].mlp.experts, torch.Generator().manual_seed(SEED), 0
    squares = dict.fromkeys((experts.gate_up_proj, experts.down_proj), 0)
    for chunk in chunks:
        logits = model(input_ids=chunk[None], use_cache=False).logits[0, CONTEXT // 2 : -1]
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        model.zero_grad()
        (0.5**0.5 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")).backward()
        squares = {stack: square + stack.grad.square() for stack, square in squares.items()}
        scored += len(labels)
    tensors, wide = load_tensors(original), 24
    for n in range(4):
        for name, stack, outputs in (
            ("gate_proj", experts.gate_up_proj, slice(0, wide)),
            ("up_proj", experts.gate_up_proj, slice(wide, None)),
            ("down_proj", experts.down_proj, slice(None)),
        ):
            key = f"model.layers.1.mlp.experts.{n}.{name}.weight"
            of_rows = squares[stack][n, outputs].mean(1) * tensors[key].double().square().sum(1)
            want = float(of_rows.sum()) / scored
            assert alphas[key] == pytest.approx(want, rel=FLOAT64), key
