"""The sensitivity of weights, compared with a plain backward pass through the whole model and actual errors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forked import call
from support.making import CPU
from support.small_models import auto_of, ids, load_tensors, save_model
from support.tolerances import FLOAT64
from test_evaluate import CONTEXT, candidate

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation.files.backward import WHOLE, Curvature, profile
from quanterr.evaluation.files.fisher import SEED, Fisher
from quanterr.evaluation.models import building
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.names import ConversionNames
from quanterr.evaluation.models.weights import OriginalWeights
from quanterr.evaluation.running.stream import Stream
from quanterr.pairing.importance import read_importance

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


def compute_profile(folder, chunks):
    """Return the profile, computed one unit at a time."""
    with open_checkpoint(folder) as checkpoint, model_folder(checkpoint) as model_files:
        sides = OriginalWeights(checkpoint)
        model = building.Architecture(building.read_config(model_files), torch.float64).build()
        inputs = {n: {"input_ids": chunk[None], "use_cache": False} for n, chunk in enumerate(chunks)}
        stream = Stream(model, ConversionNames(model, sides.weights), sides.get, inputs, CPU, graph=True)
        try:
            return profile(stream, Fisher(CONTEXT // 2))
        finally:
            stream.close()


def plain(name, folder, chunks):
    """Return for each matrix Σ over chunks of the squared gradient, with everything in memory, and the matrix.

    √½ is in the loss, as in the profile: models that compute norms in float32 round its gradients.
    """
    model = auto_of(name).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(SEED)
    squared = {}
    for chunk in chunks:
        logits = model(input_ids=chunk[None], use_cache=False).logits[0, CONTEXT // 2 : -1]
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        model.zero_grad()
        (0.5**0.5 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")).backward()
        for path, weight in model.named_parameters():
            if weight.dim() > 1:
                squared[path] = squared.get(path, 0) + weight.grad.square()
    return {path: (squares, model.get_parameter(path).detach()) for path, squares in squared.items()}


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2", "qwen3_moe", "phi3", "gpt2"])
def test_curvature_equals_a_plain_backward_pass(name, tmp_path):
    folder = save_model(name, tmp_path / "original")
    chunks = load_file(ids(tmp_path))["ids"].view(-1, CONTEXT)
    curvatures = compute_profile(folder, chunks)
    known = plain(name, folder, chunks)
    tied = ("embed_tokens", "wte")  # plain torch adds up their gradients
    both = [
        path for path in known if WHOLE in curvatures.by_part.get(path, {}) and not any(part in path for part in tied)
    ]

    assert curvatures.scored == len(chunks) * (CONTEXT // 2 - 1)
    assert len(both) >= 8
    for path in both:
        curvature, (squares, weight) = curvatures.by_part[path][WHOLE], known[path]
        largest = float(squares.max())
        assert torch.allclose(squares, curvature.squares, rtol=FLOAT64, atol=FLOAT64 * largest), path
        want = float((squares.mean(1) * weight.square().sum(1)).sum()) / curvatures.scored
        assert curvature.alpha(curvatures.scored) == pytest.approx(want, rel=FLOAT64), path
        error = 0.1 * weight.square().mean(1, keepdim=True).sqrt().expand_as(
            weight
        )  # an error whose cost should be what alpha predicts
        assert curvature.predict_cost(error, curvatures.scored) == pytest.approx(want * 0.1**2, rel=FLOAT64), path


def test_error_is_weighed_by_its_own_element():
    curvature = Curvature()
    curvature.add(torch.tensor([[1e3, 0.0], [0.0, 2.0]]))
    curvature.add(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))

    assert curvature.predict_cost(torch.tensor([[0.0, 1.0], [1.0, 0.5]]), 1) == 1.25


def test_tied_head_matters_in_both_uses(tmp_path):
    """Embedding and head share one weight, so the cost of its error is that of both uses together."""
    original, tokens = save_model("llama tied", tmp_path / "original"), ids(tmp_path, 320)
    (tmp_path / "other").mkdir()
    tensors, name = load_tensors(original), "model.embed_tokens.weight"
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(4)) * tensors[name].std()
    save_file(tensors | {name: tensors[name] + 0.01 * noise}, tmp_path / "other" / "model.safetensors")
    candidate = quanterr.evaluate(
        original, [tmp_path / "other"], tokens=tokens, context=CONTEXT, dtype="float64",
        sensitivity=tmp_path / "s.json", sensitivity_chunks=20,
    ).candidates[0]  # fmt: skip
    [row] = [row for row in json.loads((tmp_path / "s.json").read_text())["weights"] if row["layer_name"] == name]
    made = compute_profile(original, load_file(tokens)["ids"].view(-1, CONTEXT))
    both = [
        made.by_part[path][WHOLE].alpha(made.scored) for path in made.by_part if "embed" in path or "lm_head" in path
    ]

    assert len(both) == 2
    assert row["alpha"] == pytest.approx(sum(both), rel=FLOAT64)
    assert 0.5 < candidate.predicted_kld / candidate.scores.kld_mean < 2


class TestEvaluation:
    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory):
        """A model with small random errors in all matrices of its blocks, and one with a third of them."""
        folder = tmp_path_factory.mktemp("sensitivity")
        original = save_model("llama", folder / "original")
        generator = torch.Generator().manual_seed(3)
        tensors, paths = load_tensors(original), []
        noise = {k: torch.randn(v.shape, generator=generator) * v.std() for k, v in tensors.items() if "proj" in k}
        for name, share in (("large", 0.03), ("small", 0.01)):
            (folder / name).mkdir()
            changed = {key: value + share * noise.get(key, 0) for key, value in tensors.items()}
            save_file(changed, folder / name / "model.safetensors")
            paths.append(folder / name)
        evaluation = quanterr.evaluate(
            original, paths, tokens=ids(folder, 320), context=CONTEXT, sensitivity=folder / "s.json",
            sensitivity_chunks=10,
        )  # fmt: skip
        return evaluation, json.loads((folder / "s.json").read_text())

    def test_prediction_agrees_with_small_errors(self, files):
        for scored in files[0].candidates:
            assert 0.5 < scored.predicted_kld / scored.scores.kld_mean < 2

    def test_prediction_is_quadratic_in_the_error(self, files):
        large, small = (scored.predicted_kld for scored in files[0].candidates)

        assert pytest.approx(9, rel=1e-3) == large / small

    def test_prediction_is_the_sum_over_the_weights(self, files):
        for scored in files[0].candidates:
            known = [weight.predicted_kld for weight in scored.weights if weight.predicted_kld is not None]
            assert pytest.approx(sum(known)) == scored.predicted_kld

    def test_file_names_every_matrix_the_most_sensitive_first(self, files):
        _, document = files
        alphas = [row["alpha"] for row in document["weights"]]

        assert ("quanterr.sensitivity", "1.3") == (document["schema"], document["schema_version"])
        assert alphas == sorted(alphas, reverse=True)
        assert {"model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= {r["layer_name"] for r in document["weights"]}
        assert "mainly a ranking" in document["note"]

    def test_standard_errors_fall_with_the_root_of_the_number_of_chunks(self, tmp_path):
        original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path, 40 * CONTEXT)
        standard_errors = []
        for chunks in (4, 40):
            asked = {"tokens": tokens, "context": CONTEXT, "sensitivity": tmp_path / "s.json"}
            quanterr.evaluation.run.study(original, **asked, sensitivity_chunks=chunks)
            rows = json.loads((tmp_path / "s.json").read_text())["weights"]
            standard_errors.append({row["layer_name"]: row["alpha_se"] / row["alpha"] for row in rows})
        gains = sorted(standard_errors[0][name] / standard_errors[1][name] for name in standard_errors[1])

        assert 2 < gains[len(gains) // 2] < 5  # ten times as many chunks divide the error by about √10
        assert all(0 < share < 1 for share in standard_errors[1].values())

    def test_model_must_continue_a_text(self, tmp_path):
        original = save_model("bert", tmp_path / "original")
        quantized, _ = candidate(original)
        with pytest.raises(UsageError, match="works only with models that predict the next token; bert does not"):
            quanterr.evaluate(
                original, [quantized], tokens=ids(tmp_path), context=CONTEXT, sensitivity=tmp_path / "s.json"
            )


def test_original_is_studied_without_a_candidate(tmp_path):
    original = save_model("llama", tmp_path / "original")
    words = ("--tokens", ids(tmp_path), "--context", 32)
    done = call("evaluate", original, *words, "--sensitivity", "s.json", "--importance-out", "i.gguf", cwd=tmp_path)

    assert (0, "") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.endswith("quanterr: wrote s.json, i.gguf\n")
    assert 16 == len(json.loads((tmp_path / "s.json").read_text())["weights"])
    assert "blk.0.ffn_up.weight" in read_importance(tmp_path / "i.gguf")
    assert 2 == call("evaluate", original, *words, cwd=tmp_path).returncode
