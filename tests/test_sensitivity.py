"""Which weights matter: against a plain backward pass through the whole model, and against what errors really do."""

import json

import pytest
import torch
from forked import call
from safetensors.torch import load_file, save_file
from small_models import auto_of, ids, saved, stored
from test_evaluate import CONTEXT, FLOAT64, candidate

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation import models
from quanterr.evaluation.fisher import SEED, Fisher, FisherCurvature
from quanterr.evaluation.folder import model_folder
from quanterr.evaluation.names import ConversionNames
from quanterr.evaluation.sensitivity import WHOLE, profile
from quanterr.evaluation.sides import Sides
from quanterr.evaluation.stepping import Stream
from quanterr.pairing.importance import read_importance
from quanterr.tensors.devices import CPU

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


def streamed(folder, chunks):
    """The profile, a unit at a time."""
    with open_checkpoint(folder) as checkpoint, model_folder(checkpoint) as found:
        sides = Sides(checkpoint)
        model = models.Architecture(models.read_config(found), torch.float64).build()
        inputs = [{"input_ids": chunk[None], "use_cache": False} for chunk in chunks]
        stream = Stream(model, ConversionNames(model, sides.weights), sides.get, inputs, CPU, graph=True)
        try:
            return profile(stream, len(inputs), Fisher(CONTEXT // 2))
        finally:
            stream.close()


def plain(name, folder, chunks):
    """The same with everything in memory: squares of inputs and of output gradients of each linear layer, and over
    tokens the sum of the products of both."""
    model = auto_of(name).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    inputs, gradients, products = {}, {}, {}

    def watch(path):
        def hook(_, args, output):
            flat = args[0].detach().reshape(-1, args[0].shape[-1])
            inputs[path] = inputs.get(path, 0) + flat.square().sum(0, dtype=torch.float64)
            if not output.requires_grad:
                output.requires_grad_(True)

            def add(gradient):
                squares = gradient.reshape(-1, gradient.shape[-1]).square()
                gradients[path] = gradients.get(path, 0) + squares.sum(0)
                products[path] = products.get(path, 0) + float((squares.sum(1) * flat.square().sum(1)).sum())

            output.register_hook(add)

        return hook

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(watch(f"{path}.weight"))
    for chunk in chunks:
        logits = model(input_ids=chunk[None], use_cache=False).logits[0, CONTEXT // 2 : -1]
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return inputs, gradients, products


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2", "qwen3_moe", "phi3"])
def test_curvature_is_that_of_a_plain_backward_pass(name, tmp_path):
    folder = saved(name, tmp_path / "original")
    chunks = load_file(ids(tmp_path))["ids"].view(-1, CONTEXT)
    found = streamed(folder, chunks)
    inputs, gradients, products = plain(name, folder, chunks)
    both = [path for path in gradients if path in found.found]

    assert found.scored == len(chunks) * (CONTEXT // 2 - 1)
    assert len(both) >= 8
    for path in both:
        curvature = found.found[path][WHOLE]
        assert torch.allclose(inputs[path], curvature.inputs, rtol=FLOAT64, atol=0)
        assert torch.allclose(gradients[path], curvature.gradients, rtol=FLOAT64, atol=0), path
        n = curvature.shape[0] * curvature.shape[1]
        want = 0.5 * products[path] / found.scored * curvature.energy / n
        assert curvature.alpha(found.scored) == pytest.approx(want, rel=FLOAT64), path
        even = torch.full(curvature.shape, 0.1, dtype=torch.float64)  # an even error costs what alpha says
        nmse = n * 0.1**2 / curvature.energy
        assert curvature.predicted(even, found.scored) == pytest.approx(want * nmse, rel=FLOAT64), path


def test_a_weight_that_is_stored_turned_has_its_vectors_the_right_way_round(tmp_path):
    """GPT-2 stores [in, out]: an error in one input is weighed by that input."""
    folder = saved("gpt2", tmp_path / "original")
    chunks = load_file(ids(tmp_path))["ids"].view(-1, CONTEXT)
    found = streamed(folder, chunks)
    curvature = found.found["transformer.h.0.mlp.c_fc.weight"][WHOLE]
    error = torch.zeros(curvature.shape)
    error[3] = 1.0
    over_tokens = float(torch.cat(curvature.products).sum())
    want = 0.5 * over_tokens * float(curvature.inputs[3] / curvature.inputs.sum()) / found.scored

    assert (32, 128) == curvature.shape == (len(curvature.inputs), len(curvature.gradients))
    assert pytest.approx(want) == curvature.predicted(error, found.scored)


def test_a_huge_input_without_gradient_costs_nothing():
    """Massive activations: a product of sums over tokens would give half of 1e6."""
    inputs, gradients = torch.tensor([1e6, 1.0]), torch.tensor([0.0, 1.0])
    sums = inputs.sum().view(1), gradients.sum().view(1)
    curvature = FisherCurvature(*sums, [inputs * gradients], energy=1.0, shape=(1, 1))

    assert curvature.alpha(1) == 0.5 == curvature.predicted(torch.ones(1, 1), 1)


def test_a_tied_head_matters_in_both_of_its_uses(tmp_path):
    """Its weight is stored once: what an error of it costs is what it does as an embedding, and as the head."""
    original, tokens = saved("llama tied", tmp_path / "original"), ids(tmp_path, 320)
    (tmp_path / "other").mkdir()
    tensors, name = stored(original), "model.embed_tokens.weight"
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(4)) * tensors[name].std()
    save_file(tensors | {name: tensors[name] + 0.01 * noise}, tmp_path / "other" / "model.safetensors")
    found = quanterr.evaluate(
        original, [tmp_path / "other"], tokens=tokens, context=CONTEXT, dtype="float64",
        sensitivity=tmp_path / "s.json", sensitivity_chunks=20,
    ).candidates[0]  # fmt: skip
    [row] = [row for row in json.loads((tmp_path / "s.json").read_text())["weights"] if row["layer_name"] == name]
    made = streamed(original, load_file(tokens)["ids"].view(-1, CONTEXT))
    both = [made.found[path][WHOLE].alpha(made.scored) for path in made.found if "embed" in path or "lm_head" in path]

    assert len(both) == 2
    assert row["alpha"] == pytest.approx(sum(both), rel=FLOAT64)
    assert 0.5 < found.predicted_kld / found.scores.kld_mean < 2


class TestEvaluation:
    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory):
        """A model with small random errors in all matrices of its blocks, and one with a third of them."""
        folder = tmp_path_factory.mktemp("sensitivity")
        original = saved("llama", folder / "original")
        generator = torch.Generator().manual_seed(3)
        tensors, paths = stored(original), []
        noise = {k: torch.randn(v.shape, generator=generator) * v.std() for k, v in tensors.items() if "proj" in k}
        for name, share in (("large", 0.03), ("small", 0.01)):
            (folder / name).mkdir()
            changed = {key: value + share * noise.get(key, 0) for key, value in tensors.items()}
            save_file(changed, folder / name / "model.safetensors")
            paths.append(folder / name)
        found = quanterr.evaluate(
            original, paths, tokens=ids(folder, 320), context=CONTEXT, sensitivity=folder / "s.json",
            sensitivity_chunks=10,
        )  # fmt: skip
        return found, json.loads((folder / "s.json").read_text())

    def test_predicts_what_small_errors_cost(self, made):
        for each in made[0].candidates:
            assert 0.5 < each.predicted_kld / each.scores.kld_mean < 2

    def test_is_quadratic_in_the_error(self, made):
        large, small = (each.predicted_kld for each in made[0].candidates)

        assert pytest.approx(9, rel=1e-3) == large / small

    def test_is_the_sum_over_the_weights(self, made):
        for each in made[0].candidates:
            known = [weight.predicted_kld for weight in each.weights if weight.predicted_kld is not None]
            assert pytest.approx(sum(known)) == each.predicted_kld

    def test_the_file_names_every_matrix_the_most_sensitive_first(self, made):
        _, document = made
        alphas = [row["alpha"] for row in document["weights"]]

        assert ("quanterr.sensitivity", "1.3") == (document["schema"], document["schema_version"])
        assert alphas == sorted(alphas, reverse=True)
        assert {"model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= {r["layer_name"] for r in document["weights"]}
        assert "a ranking first" in document["note"]

    def test_standard_errors_fall_with_the_root_of_the_chunks(self, made, tmp_path):
        original = saved("llama", tmp_path / "original")
        tokens = ids(tmp_path, 320)
        asked = {"tokens": tokens, "context": CONTEXT, "sensitivity": tmp_path / "s.json", "sensitivity_chunks": 1}
        quanterr.evaluate(original, [original], **asked)
        of_one, of_ten = (
            {row["layer_name"]: row["alpha_se"] / row["alpha"] for row in document["weights"]}
            for document in (json.loads((tmp_path / "s.json").read_text()), made[1])
        )
        gains = sorted(of_one[name] / of_ten[name] for name in of_ten)

        assert 2 < gains[len(gains) // 2] < 5  # of ten times as many tokens
        assert all(0.01 < share < 1 for share in of_one.values())

    def test_is_of_models_that_continue_a_text(self, tmp_path):
        original = saved("bert", tmp_path / "original")
        quantized, _ = candidate(original)
        with pytest.raises(UsageError, match="for models that continue a text; bert does not"):
            quanterr.evaluate(
                original, [quantized], tokens=ids(tmp_path), context=CONTEXT, sensitivity=tmp_path / "s.json"
            )


def test_an_original_is_studied_without_a_candidate(tmp_path):
    original = saved("llama", tmp_path / "original")
    words = ("--tokens", ids(tmp_path), "--context", 32)
    done = call("evaluate", original, *words, "--sensitivity", "s.json", "--importance-out", "i.gguf", cwd=tmp_path)

    assert (0, "") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.endswith("quanterr: wrote s.json, i.gguf\n")
    assert 16 == len(json.loads((tmp_path / "s.json").read_text())["weights"])
    assert "blk.0.ffn_up.weight" in read_importance(tmp_path / "i.gguf")
    assert 2 == call("evaluate", original, *words, cwd=tmp_path).returncode
