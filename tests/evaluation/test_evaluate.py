"""Evaluation by the original's own architecture, compared with plain transformers and the same dequantized weights."""

import json
import math
import mmap
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.making import numbers, quantized_fp8, quantized_int8
from support.small_models import MODELS, auto_of, ids, load_tensors, quantized_by, save_model, with_words
from support.tolerances import FLOAT64

import quanterr
from quanterr.errors import CheckpointError, Interrupted, UsageError
from quanterr.evaluation.measures import gram, outputs_of_weights
from quanterr.evaluation.models.building import Architecture
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.run import study
from quanterr.evaluation.running import floor
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.workload import CAUSAL
from quanterr.gates import judge
from quanterr.pairing.importance import read_importance

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
CONTEXT = 32
STATM = Path("/proc/self/statm")

# Two runs of one function in float64, with batches of the same size: some thousand roundings of 2^-53 apart. What is
# float32 whatever the dtype (norms, rotary tables, Mamba's scan) has the same inputs in the same places of vectors.
EXACTLY = {"dtype": "float64", "batch": 3}


def candidate(folder, recipe=quantized_fp8):
    """Write a quantized copy of a saved model, and one with the same values as plain weights."""
    written, values = quantized_by(recipe, load_tensors(folder))
    linears = []
    for name, tensors in (("quantized", written), ("plain", values)):
        path = folder.parent / name
        path.mkdir(exist_ok=True)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        shutil.copy(folder / "config.json", path)
        linears.append(path)
    return linears


def plain(name, folder, chunks, dtype=torch.float64):
    """Return the results of transformers with everything in memory."""
    model = auto_of(name).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    with torch.inference_mode():
        if name == "t5":
            half = chunks.shape[1] // 2
            decoder = torch.cat([torch.zeros(len(chunks), 1, dtype=torch.int64), chunks[:, half:-1]], 1)
            return model(input_ids=chunks[:, :half], decoder_input_ids=decoder, use_cache=False).logits
        if name == "bert":
            return model(input_ids=chunks).last_hidden_state
        return model(input_ids=chunks, use_cache=False).logits


def compute_expected(name, x, y, chunks):
    """Return perplexities and divergence by their definitions."""
    half = chunks.shape[1] // 2
    rows, targets = (slice(None), chunks[:, half:]) if name == "t5" else (slice(half, -1), chunks[:, half + 1 :])
    log_p, log_q = (side_logits[:, rows].double().log_softmax(-1) for side_logits in (x, y))
    nll = [-log_probabilities.gather(-1, targets[..., None]).mean() for log_probabilities in (log_p, log_q)]
    return math.exp(nll[0]), math.exp(nll[1]), float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def float32_allows(largest):
    """Return how far log-probabilities may differ between two orders of summation, for logits up to ``largest``.

    A logit passes through some 20 sums of at most 64 products each, one after the other; each rounding is at most half
    of 2^-23 of the logit's size and has either sign equally often: √(20 · 64), six times over to be sure.
    """
    return 6 * 2.0**-24 * largest * math.sqrt(20 * 64)


def addresses():
    """Return how many bytes of addresses this process has."""
    return int(STATM.read_text().split()[0]) * mmap.PAGESIZE


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama in shards, its quantized copy, the same values as plain weights, and tokens."""
    folder = tmp_path_factory.mktemp("llama")
    original = save_model("llama", folder / "original", shard="40KB")
    quantized, values = candidate(original)
    return original, quantized, values, ids(folder)


@pytest.fixture(scope="module")
def evaluation(llama):
    original, quantized, _, tokens = llama
    return quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, **EXACTLY)


def test_tokens_may_be_in_memory_and_candidates_have_names(llama, evaluation):
    original, quantized, _, tokens = llama
    stored_ids = next(iter(load_file(tokens).values()))
    for given in (stored_ids, stored_ids.numpy(), stored_ids.flatten().tolist()):
        in_memory = quanterr.evaluate(original, {"mine": quantized}, tokens=given, context=CONTEXT, **EXACTLY)
        assert "mine" == in_memory.candidates[0].name
        assert evaluation.candidates[0].scores == in_memory.candidates[0].scores
    with pytest.raises(UsageError, match=r"^tokens: expected integers, the ids of a text; got torch\.float32$"):
        quanterr.evaluate(original, quantized, tokens=torch.ones(64), context=CONTEXT)


def test_weights_from_another_model_are_noticed(llama, evaluation, tmp_path):
    original, quantized, _, tokens = llama
    shutil.copytree(quantized, tmp_path / "other")
    generator = torch.Generator().manual_seed(9)
    other = {
        name: x if x.dim() < 2 else x[torch.randperm(len(x), generator=generator)]
        for name, x in load_tensors(original).items()
    }
    save_file(other, tmp_path / "other/model.safetensors", {"format": "pt"})
    candidate = quanterr.evaluate(original, [tmp_path / "other"], tokens=tokens, context=CONTEXT, **EXACTLY).candidates[
        0
    ]
    (finding,) = [finding for finding in candidate.findings if finding.code == "another_source"]

    assert "warning" == finding.severity
    assert finding.message.startswith("another model? The outputs of 16 of 16 changed weights differ")
    assert not [finding for finding in evaluation.candidates[0].findings if finding.code == "another_source"]


def test_many_micro_batches_start_no_thread(llama, monkeypatch):
    """A container may allow only a few hundred threads."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread"))
    original, quantized, _, tokens = llama

    assert quanterr.evaluate(original, [quantized], tokens=tokens, context=8, batch=1).tokens.chunks == 12


@pytest.mark.skipif(not STATM.exists(), reason="this system does not say how many addresses a process has")
def test_model_without_weights_reserves_no_addresses_for_them():
    """A memory limit would count these addresses: 24 layers of 64 MB each would take most of their 1.5 GB."""
    from transformers import LlamaConfig

    shape = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    # A first run sets up the heap and loads code
    Architecture(LlamaConfig(num_hidden_layers=1, **shape), torch.float32).build()
    before = addresses()
    model = Architecture(LlamaConfig(num_hidden_layers=24, **shape), torch.float32).build()

    assert 1.5e9 < sum(parameter.nbytes for parameter in model.parameters())
    assert addresses() - before < 128 << 20


class TestArchitectures:
    @pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
    def test_predictions_equal_plain_transformers(self, name, tmp_path):
        original = save_model(name, tmp_path / "original")
        quantized, values = candidate(original)
        tokens = ids(tmp_path)
        chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
        evaluation = quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, **EXACTLY)
        scores = evaluation.candidates[0].scores
        want = compute_expected(name, *(plain(name, folder, chunks) for folder in (original, values)), chunks)

        assert pytest.approx(want, rel=FLOAT64) == (scores.ppl_original, scores.ppl, scores.kld_mean)
        assert ("pass", []) == (evaluation.verdict, evaluation.candidates[0].missing)
        assert scores.kld_mean > 1e-7
        assert [block for block in evaluation.candidates[0].blocks if block.relative_error]
        assert all(weight.output_error is not None for weight in evaluation.candidates[0].weights)

    @pytest.mark.parametrize("name", ["llama", "mixtral", "mamba", "t5"])
    def test_predictions_in_float32_differ_by_rounding_only(self, name, tmp_path):
        """Other batch sizes and another path through experts add up sums in another order."""
        original = save_model(name, tmp_path / "original")
        quantized, values = candidate(original)
        tokens = ids(tmp_path)
        chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
        evaluation = quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, batch=2)
        scores = evaluation.candidates[0].scores
        x, y = (plain(name, folder, chunks, torch.float32) for folder in (original, values))
        want, off = (
            compute_expected(name, x, y, chunks),
            float32_allows(max(float(x.abs().max()), float(y.abs().max()))),
        )

        assert pytest.approx(want[:2], rel=off) == (scores.ppl_original, scores.ppl)
        assert pytest.approx(want[2], abs=off) == scores.kld_mean

    def test_embeddings_equal_plain_transformers(self, tmp_path):
        original = save_model("bert", tmp_path / "original")
        quantized, values = candidate(original)
        tokens = ids(tmp_path, 160)
        chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
        evaluation = quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, dtype="float64", batch=5)
        got = evaluation.candidates[0].embeddings
        x, y = (plain("bert", folder, chunks).double() for folder in (original, values))
        cosines = torch.nn.functional.cosine_similarity(x.mean(1), y.mean(1))

        assert "encoder" == evaluation.kind
        assert pytest.approx(float(cosines.mean()), rel=FLOAT64) == got.cosine_mean
        assert pytest.approx(float((y - x).norm() / x.norm()), rel=FLOAT64) == got.relative_error
        assert 0.9 < got.rank_correlation <= 1

    def test_two_candidates_in_one_pass_give_the_same_results_as_separately(self, tmp_path):
        original = save_model("llama tied", tmp_path / "original")
        first, _ = candidate(original)
        second = first.rename(tmp_path / "fp8")
        third, _ = candidate(original, quantized_int8)
        tokens = ids(tmp_path)
        both = quanterr.evaluate(original, [second, third], tokens=tokens, context=CONTEXT)
        alone = quanterr.evaluate(
            original, third, tokens=tokens, context=CONTEXT
        )  # a string is one path, not a sequence of characters

        assert ["fp8", "quantized"] == [candidate.name for candidate in both.candidates]
        assert alone.candidates[0] == both.candidates[1]

    def test_original_against_itself_is_the_same(self, llama, tmp_path):
        original, *_, tokens = llama
        copy = shutil.copytree(original, tmp_path / "copy")
        candidate = quanterr.evaluate(original, [copy], tokens=tokens, context=CONTEXT).candidates[0]

        assert (0, 1, 0) == (candidate.scores.kld_mean, candidate.scores.top1, candidate.scores.kld_max)
        assert {0.0} == {block.relative_error for block in candidate.blocks}
        assert {0.0} == {weight.output_error for weight in candidate.weights}


def test_head_stored_only_by_the_quantized_side_is_used(tmp_path):
    """The original ties the head to its embedding; here the head is quantized and the embedding is not."""
    original = save_model("llama tied", tmp_path / "original")
    tensors = load_tensors(original)
    codes, scale = quantized_fp8(tensors["model.embed_tokens.weight"])
    (tmp_path / "quantized").mkdir()
    written = tensors | {"lm_head.weight": codes, "lm_head.weight_scale": scale}
    save_file(written, tmp_path / "quantized/model.safetensors")
    (tmp_path / "plain").mkdir()
    save_file(
        tensors | {"lm_head.weight": codes.float() * scale}, tmp_path / "plain/model.safetensors", {"format": "pt"}
    )
    config = json.loads((original / "config.json").read_text())
    (tmp_path / "plain/config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tokens = ids(tmp_path)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    evaluation = quanterr.evaluate(original, [tmp_path / "quantized"], tokens=tokens, context=CONTEXT, **EXACTLY)
    scores = evaluation.candidates[0].scores
    want = compute_expected(
        "llama", *(plain("llama", folder, chunks) for folder in (original, tmp_path / "plain")), chunks
    )

    assert "pass" == evaluation.verdict, evaluation.reasons
    assert scores.kld_mean > 1e-6
    assert pytest.approx(want, rel=FLOAT64) == (scores.ppl_original, scores.ppl, scores.kld_mean)


class TestOutputErrors:
    def test_output_errors_are_exact_for_the_actual_inputs(self, llama, evaluation):
        original, _, values, tokens = llama
        name = "model.layers.1.mlp.down_proj.weight"
        inputs = []
        model = auto_of("llama").from_pretrained(original, dtype=torch.float64).eval()
        model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        with torch.inference_mode():
            model(input_ids=load_file(tokens)["ids"].view(-1, CONTEXT))
        x = inputs[0].flatten(0, 1).double()
        w, q = (load_tensors(folder)[name].double() for folder in (original, values))
        want = float((x @ (q - w).T).square().sum() / (x @ w.T).square().sum())
        weight = next(weight for weight in evaluation.candidates[0].weights if weight.layer_name == name)

        assert pytest.approx(want, rel=FLOAT64) == weight.output_error
        assert (96, "model.layers.1") == (weight.inputs, weight.block)

    @pytest.mark.parametrize("rows", [256, 12, 5], ids=["many inputs", "some wait for others", "all wait to the end"])
    def test_output_errors_are_the_same_from_inputs_and_from_outputs(self, monkeypatch, rows):
        """Two weights share their inputs; one of them is used a second time with other inputs."""
        module = torch.nn.ModuleDict({name: torch.nn.Linear(16, 64, bias=False) for name in "ab"}).double()
        unit = Unit("u", module)
        errors = {slot.name: 0.01 * numbers(64, 16, seed=n).double() for n, slot in enumerate(unit.slots)}
        others = [{slot.name: slot.tensor.detach() + errors[slot.name] for slot in unit.slots}]
        others.append({name: weight.t().contiguous().t() for name, weight in others[0].items()})  # in another layout
        batches = [(numbers(rows, 16, seed=n).double(), numbers(rows, 16, seed=10 + n).double()) for n in (2, 3)]
        outcomes, blocks = [], []
        for limit, edge in ((0, 0), (gram.MAX_ELEMENTS, gram.BLOCK_COLUMNS), (gram.MAX_ELEMENTS, 5)):
            monkeypatch.setattr(gram, "MAX_ELEMENTS", limit)
            monkeypatch.setattr(gram, "BLOCK_COLUMNS", edge)
            products = {}
            watching = outputs_of_weights.OutputErrors(products, 512, with_moments=False)
            with torch.inference_mode():
                watching.watch(unit, others)
                for x, more in batches:
                    with watching:
                        module["a"](x), module["b"](x), module["a"](more)
                watching.finish()
            blocks.append(max((len(gram._blocks) for gram in watching._gram.values()), default=0))
            outcomes.append({name: product.noise[0] for name, product in products.items()})
            assert {name: product.noise[1] for name, product in products.items()} == outcomes[-1]
        inputs_by_weight = {
            name: [x for x, _ in batches] + [more for _, more in batches if name == "u.a.weight"] for name in errors
        }
        want = {
            n: sum(float((x @ errors[n].t()).square().sum()) for x in inputs) for n, inputs in inputs_by_weight.items()
        }

        for ways in outcomes:
            assert pytest.approx(want, rel=FLOAT64) == ways
        assert [0, 1, 4] == blocks  # Every way to compute the outputs was used.

    def test_shares_within_a_block_add_up_to_one(self, evaluation):
        weights = evaluation.candidates[0].weights
        for block in {weight.block for weight in weights} - {"model.embed_tokens", "lm_head"}:
            shares = [weight.share_of_block for weight in weights if weight.block == block]
            assert pytest.approx(1) == sum(shares)

    def test_largest_output_error_comes_first(self, evaluation):
        errors = [weight.output_error for weight in evaluation.candidates[0].weights]

        assert errors == sorted(errors, reverse=True)

    def test_second_moments_are_an_importance_matrix(self, llama, tmp_path):
        original, quantized, _, tokens = llama
        path = tmp_path / "i.gguf"
        quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, importance_out=str(path), **EXACTLY)
        inputs = []
        model = auto_of("llama").from_pretrained(original, dtype=torch.float64).eval()
        model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        with torch.inference_mode():
            model(input_ids=load_file(tokens)["ids"].view(-1, CONTEXT))
        means, counts = read_importance(str(path))["blk.0.attn_output.weight"]

        want = inputs[0].flatten(0, 1).square().mean(0)
        assert torch.allclose(want, means.flatten().double(), rtol=2.0**-23, atol=0)  # the file holds float32
        assert 96 == counts
        report = quanterr.compare(original, quantized, importance=str(path), device="cpu")
        assert report.aggregate.weighted_snr_db is not None

    @pytest.mark.parametrize(
        ("model_type", "module", "name"),
        [
            ("llama", "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.o_proj.weight"),
            ("gpt2", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_fc.weight"),  # stored [in, out]
        ],
    )
    def test_saliency_follows_the_input_variance(self, model_type, module, name, tmp_path):
        original, tokens, path = save_model(model_type, tmp_path / "original"), ids(tmp_path), tmp_path / "s.json"
        study(original, tokens=tokens, context=CONTEXT, saliency_out=path, saliency=5, **EXACTLY)
        inputs = []
        model = auto_of(model_type).from_pretrained(original, dtype=torch.float64).eval()
        model.get_submodule(module).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        with torch.inference_mode():
            model(input_ids=load_file(tokens)["ids"].view(-1, CONTEXT))
        variance = inputs[0].flatten(0, 1).double().var(0, correction=0)
        weight = model.get_submodule(module).weight.detach().double()
        saliency = weight.square() * (variance[:, None] if model_type == "gpt2" else variance)
        columns = saliency.sum(1 if model_type == "gpt2" else 0)
        salient = next(row for row in json.loads(path.read_text())["weights"] if row["layer_name"].endswith(name))

        assert columns.topk(max(round(len(columns) * 0.05), 1)).indices.tolist() == salient["columns"]
        assert set(saliency.view(-1).topk(round(saliency.numel() * 0.05)).indices.tolist()) == set(salient["weights"])
        share = saliency.view(-1)[salient["weights"]].sum() / saliency.sum()
        # The value is rounded to float32 three times.
        assert pytest.approx(float(share), rel=2.0**-22) == salient["weight_share"]

    @pytest.mark.parametrize("percent", [0, 101])
    def test_saliency_must_be_a_share(self, llama, tmp_path, percent):
        with pytest.raises(UsageError, match="--saliency"):
            study(llama[0], tokens=llama[3], saliency_out=tmp_path / "s.json", saliency=percent)


class TestTokens:
    def test_first_token_in_a_chunk_comes_from_the_tokenizer_and_targets_stay(self, llama):
        from quanterr.evaluation.texts.tokens import Text, chunks_of

        given, raw, *_ = chunks_of(Text(torch.arange(40), "x", 7), 16, None, 96)

        assert [7, 7] == given[:, 0].tolist()
        assert [0, 16] == raw[:, 0].tolist()
        assert torch.equal(given[:, 1:], raw[:, 1:])

    def test_text_goes_through_the_original_tokenizer(self, llama, tmp_path):
        original, quantized, *_ = llama
        folder = shutil.copytree(original, tmp_path / "original")
        with_words(folder)
        (tmp_path / "text.txt").write_text(" ".join(f"w{n % 90}" for n in range(96)))
        evaluation = quanterr.evaluate(folder, [quantized], text=str(tmp_path / "text.txt"), context=CONTEXT)
        numbers = tmp_path / "n.safetensors"
        save_file({"ids": torch.arange(96) % 90}, numbers)
        same = quanterr.evaluate(folder, [quantized], tokens=numbers, context=CONTEXT)

        assert evaluation.candidates[0].scores == same.candidates[0].scores
        assert (evaluation.tokens.sha256, 3, 45) == (
            same.tokens.sha256,
            evaluation.tokens.chunks,
            evaluation.tokens.scored,
        )

    def test_beginning_gives_the_same_tokens_as_a_long_text(self, llama, tmp_path):
        from quanterr.evaluation.models.folder import ModelFolder
        from quanterr.evaluation.texts.tokens import read_text

        folder = shutil.copytree(llama[0], tmp_path / "original")
        with_words(folder)
        (tmp_path / "text.txt").write_text(" ".join(f"w{n % 90}" for n in range(20000)))
        model_files = ModelFolder(folder, str(folder))
        whole, beginning = (read_text(str(tmp_path / "text.txt"), model_files, enough) for enough in (None, 64))

        assert 20000 == len(whole.ids)
        assert 64 <= len(beginning.ids) < 1000
        assert torch.equal(whole.ids[:64], beginning.ids[:64])


class TestGates:
    def evaluate(self, llama, *require):
        original, quantized, _, tokens = llama
        return quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, require=require, **EXACTLY)

    def test_gates_on_interval_ends_need_enough_chunks(self, llama):
        evaluation = self.evaluate(llama, "upper(kld_mean) <= 1e9", "kld_mean <= 1e9")
        gate, other = evaluation.candidates[0].gates

        assert ("inconclusive", "fail", "pass") == (evaluation.verdict, gate.status, other.status)
        assert "cannot be judged: upper() needs at least 8 chunks of text, found " in evaluation.reasons[0]

    def test_gates_judge_the_value_and_the_interval_end(self, llama, evaluation):
        kld, error = (evaluation.candidates[0].value(name) for name in ("kld_mean", "kld_mean_chunk_se"))
        deviation = max(error, evaluation.candidates[0].value("kld_mean_se"))
        between = kld + deviation
        evaluation.candidates[0].scores.chunks, chunks = 8, evaluation.candidates[0].scores.chunks
        rules = [f"kld_mean <= {between!r}", f"upper(kld_mean) <= {between!r}", "lower(top1)>=0"]
        judged = judge(evaluation, require=rules)
        evaluation.candidates[0].scores.chunks = chunks
        gates = judged.candidates[0].gates

        assert ["pass", "fail", "pass"] == [gate.status for gate in gates]
        assert pytest.approx(kld + 1.96 * deviation) == gates[1].observed
        assert ("fail", [f"quantized: {gates[1].message}"]) == (judged.verdict, judged.reasons)

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ("kld_men <= 1", "no metric of the evaluation named kld_men; did you mean kld_mean, "),
            ("kld_mean", "expected one of < <= "),
            ("upper(kld_max) <= 1", "kld_max has no standard error"),
        ],
    )
    def test_invalid_gates_cost_no_run(self, tmp_path, rule, message):
        with pytest.raises(UsageError, match=message.replace("(", r"\(").replace("?", r"\?")):
            quanterr.evaluate(tmp_path / "nowhere", ["x"], tokens="none", require=[rule])

    def test_gates_on_values_that_an_encoder_lacks_fail(self, tmp_path):
        original = save_model("bert", tmp_path / "original")
        quantized, _ = candidate(original)
        evaluation = quanterr.evaluate(
            original, [quantized], tokens=ids(tmp_path), context=CONTEXT, require=["kld_mean <= 1", "cosine_min > 0.5"]
        )

        assert ["fail", "pass"] == [gate.status for gate in evaluation.candidates[0].gates]


class TestInvalidInputs:
    def evaluate_edited(self, llama, tmp_path, change):
        """Evaluate a changed copy of the quantized side."""
        folder = shutil.copytree(llama[1], tmp_path / "edited")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return quanterr.evaluate(llama[0], [folder], tokens=llama[3], context=CONTEXT)

    def test_missing_weight_is_taken_from_the_original_and_inconclusive(self, llama, tmp_path):
        name = "model.layers.0.mlp.up_proj.weight"
        evaluation = self.evaluate_edited(
            llama, tmp_path, lambda tensors: (tensors.pop(name), tensors.pop(f"{name}_scale"))
        )
        (candidate,) = evaluation.candidates

        assert ("inconclusive", [name]) == (evaluation.verdict, [item.layer_name for item in candidate.missing])
        assert f"1 tensor taken from the original: {name}" in evaluation.reasons[0]
        assert candidate.scores is not None

    def test_nan_is_inconclusive_and_its_first_block_is_named(self, llama, tmp_path):
        def spoil(tensors):
            tensors["model.layers.1.input_layernorm.weight"][3] = float("nan")

        evaluation = self.evaluate_edited(llama, tmp_path, spoil)

        assert ("inconclusive", "model.layers.1") == (evaluation.verdict, evaluation.candidates[0].not_finite)
        assert None is evaluation.candidates[0].scores
        json.loads(evaluation.to_json())

    def test_unused_tensor_is_inconclusive(self, llama, tmp_path):
        bias = "model.layers.0.mlp.up_proj.bias"
        evaluation = self.evaluate_edited(llama, tmp_path, lambda tensors: tensors.update({bias: torch.ones(48)}))

        assert "inconclusive" == evaluation.verdict
        assert f"1 tensor of the candidate not used: {bias}" in evaluation.reasons[0]

    def test_overflowing_perplexity_is_not_finite(self, llama, tmp_path):
        def blow_up(tensors):
            tensors["lm_head.weight"] *= 1e6

        evaluation = self.evaluate_edited(llama, tmp_path, blow_up)

        assert ("inconclusive", "the perplexity") == (evaluation.verdict, evaluation.candidates[0].not_finite)
        json.loads(evaluation.to_json())

    def test_original_must_have_every_tensor_its_config_needs(self, llama, tmp_path):
        folder = shutil.copytree(llama[2], tmp_path / "original")
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, folder / "model.safetensors")

        with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight, which the model of config\.json has"):
            quanterr.evaluate(folder, [llama[1]], tokens=llama[3], context=CONTEXT)

    def test_weight_with_another_shape_is_named_with_both_shapes(self, llama, tmp_path):
        folder = shutil.copytree(llama[2], tmp_path / "original")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))

        with pytest.raises(CheckpointError, match=r"stored as \[\d+, \d+\], the model of config.json has \["):
            quanterr.evaluate(folder, [llama[1]], tokens=llama[3], context=CONTEXT)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "nothing_known"}, "transformers has no model nothing_known"),
            ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "declares a quantized model"),
        ],
    )
    def test_unusable_config_is_named(self, llama, tmp_path, fields, message):
        folder = shutil.copytree(llama[0], tmp_path / "original")
        (folder / "config.json").write_text(json.dumps(fields))

        with pytest.raises(CheckpointError, match=message):
            quanterr.evaluate(folder, [llama[1]], tokens=llama[3])

    def test_missing_config_or_tokenizer_or_too_little_text_is_explained(self, llama, tmp_path):
        original, quantized, _, tokens = llama
        (tmp_path / "t.txt").write_text("some text")
        (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
        few = tmp_path / "few.safetensors"
        save_file({"ids": torch.zeros(40, dtype=torch.int32)}, few)
        large = tmp_path / "large.safetensors"
        save_file({"ids": torch.arange(97)}, large)

        bare = shutil.copytree(original, tmp_path / "bare", ignore=shutil.ignore_patterns("config.json"))
        with pytest.raises(
            CheckpointError, match=r"bare/config\.json: No such file .*; the folder of a model is needed"
        ):
            quanterr.evaluate(bare, [quantized], tokens=tokens)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing; give token ids with tokens instead"):
            quanterr.evaluate(original, [quantized], text=str(tmp_path / "t.txt"))
        empty = shutil.copytree(original, tmp_path / "empty")
        (empty / "tokenizer.json").touch()
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: transformers cannot read it: .*; give token ids"):
            quanterr.evaluate(empty, [quantized], text=str(tmp_path / "t.txt"))
        with pytest.raises(UsageError, match="not UTF-8 at byte 1"):
            quanterr.evaluate(original, [quantized], text=str(tmp_path / "latin.txt"))
        with pytest.raises(UsageError, match="40 tokens; at least 64 are needed for a context of 32"):
            quanterr.evaluate(original, [quantized], tokens=few, context=CONTEXT)
        with pytest.raises(UsageError, match="has token 96, the vocabulary has 96"):
            quanterr.evaluate(original, [quantized], tokens=large, context=CONTEXT)
        with pytest.raises(UsageError, match="give a text with text or chat, or token ids with tokens"):
            quanterr.evaluate(original, [quantized])

    def test_model_that_needs_more_than_tokens_is_an_error(self, llama, tmp_path, monkeypatch):
        from transformers import LlamaForCausalLM

        def picky(self, *args, **kwargs):
            raise ValueError("You have to specify pixel_values")

        monkeypatch.setattr(LlamaForCausalLM, "forward", picky)
        with pytest.raises(CheckpointError, match="LlamaForCausalLM cannot read tokens alone: You have to specify"):
            quanterr.evaluate(llama[0], [llama[1]], tokens=llama[3], context=CONTEXT)

    def test_stopped_run_has_no_result_and_leaves_no_thread(self, llama):
        stop = threading.Event()
        before = threading.active_count()
        stop.set()
        with pytest.raises(Interrupted, match="no scores: interrupted before the last block"):
            quanterr.evaluate(llama[0], [llama[1]], tokens=llama[3], context=CONTEXT, stop=stop)

        assert before == threading.active_count()


class TestTasks:
    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory):
        """A model with a tokenizer of words, a quantized copy, and questions of several lengths."""
        folder = tmp_path_factory.mktemp("tasks")
        original = save_model("llama", folder / "original")
        with_words(original)
        quantized, values = candidate(original)
        random = torch.Generator().manual_seed(5)
        questions = []
        for n in range(12):
            words = [f"w{w}" for w in torch.randint(0, 90, (n % 5 + 2,), generator=random).tolist()]
            choices = [f" w{w} w{w + 1}" for w in torch.randint(0, 88, (3,), generator=random).tolist()]
            questions.append({"question": " ".join(words), "choices": [*choices, " w7"], "answer": n % 4})
        path = folder / "words.jsonl"
        path.write_text("".join(f"{json.dumps(question)}\n" for question in questions))
        evaluation = quanterr.evaluate(original, [quantized], tokens=ids(folder), context=CONTEXT, tasks=[path])
        return evaluation, questions, original, values

    def test_answers_equal_plain_transformers(self, files):
        evaluation, questions, *folders = files
        answers = []
        for folder in folders:
            model = auto_of("llama").from_pretrained(folder).eval()
            choices = []
            for question in questions:
                likelihoods = []
                for choice in question["choices"]:
                    context = [int(word[1:]) for word in question["question"].split()]
                    behind = [int(word[1:]) for word in choice.split()]
                    with torch.inference_mode():
                        log = model(torch.tensor([context + behind])).logits[0].double().log_softmax(-1)
                    likelihoods.append(sum(float(log[len(context) - 1 + n, word]) for n, word in enumerate(behind)))
                choices.append(likelihoods.index(max(likelihoods)))
            answers.append(choices)
        right = [[a == q["answer"] for a, q in zip(choices, questions, strict=True)] for choices in answers]
        (task,) = evaluation.candidates[0].tasks

        assert ("words", 12) == (task.name, task.questions)
        assert (sum(right[0]) / 12, sum(right[1]) / 12) == (task.accuracy_original, task.accuracy)
        assert sum(x == y for x, y in zip(*answers, strict=True)) / 12 == task.agreement

    def test_gates_may_ask_for_the_worst_task(self, files):

        judged = judge(files[0], require=["agreement >= 0", "accuracy > 1"])

        assert ["pass", "fail"] == [gate.status for gate in judged.candidates[0].gates]

    @pytest.mark.parametrize(
        ("lost", "won", "p"), [(0, 0, 1), (5, 5, 1), (0, 5, 0.0625), (1, 9, 0.021484375), (600, 600, 1)]
    )
    def test_mcnemar_p_is_exact(self, lost, won, p):
        from quanterr.evaluation.texts.tasks import mcnemar

        assert p == mcnemar(lost, won) == mcnemar(won, lost)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("x", "line 1: no question; write it as"),
            ('{"question": "a", "choices": [" b"], "answer": 0}', "at least two texts"),
            ('{"question": "a", "choices": [" b", ""], "answer": 0}', "not empty"),
            (
                '{"question": "a", "choices": [" b", " c"], "answer": 2}',
                r"answer 2 is out of range \(2 choices, from 0\)",
            ),
            ("", "holds no question"),
        ],
    )
    def test_invalid_question_is_an_error(self, llama, tmp_path, line, message):
        (tmp_path / "t.jsonl").write_text(line)
        with pytest.raises(UsageError, match=message):
            quanterr.evaluate(llama[0], [llama[1]], tokens=llama[3], context=CONTEXT, tasks=[tmp_path / "t.jsonl"])


class TestHarness:
    """lm-evaluation-harness calls a model with requests that have args."""

    @pytest.fixture(scope="class")
    @classmethod
    def sides(cls, tmp_path_factory):
        """A model with a tokenizer, its quantized copy, and the same values as plain weights."""
        folder = tmp_path_factory.mktemp("harness")
        original = save_model("llama", folder / "original")
        with_words(original)
        return original, *candidate(original)

    def plain(self, folder, words):
        model = auto_of("llama").from_pretrained(folder, dtype=torch.float64).eval()
        with torch.inference_mode():
            return model(torch.tensor([words])).logits[0]

    def test_likelihoods_equal_plain_transformers(self, sides):
        from quanterr.lm_eval import StreamedModel

        original, quantized, values = sides
        requests = [SimpleNamespace(args=("w1 w2 w3", " w4 w5")), SimpleNamespace(args=("w9", " w8"))]
        for quantized_side, folder in ((None, original), (quantized, values)):
            likelihoods = StreamedModel(original, quantized_side, dtype="float64").loglikelihood(requests)
            for (total, greedy), words, n in zip(likelihoods, ([1, 2, 3, 4, 5], [9, 8]), (2, 1), strict=True):
                logits = self.plain(folder, words)[-n - 1 : -1]
                targets = torch.tensor(words[-n:])
                want = float(logits.log_softmax(-1).gather(1, targets[:, None]).sum())

                assert pytest.approx(want, rel=FLOAT64) == total
                assert greedy == bool((logits.argmax(-1) == targets).all())

    def test_text_is_scored_after_its_first_token(self, sides):
        from quanterr.lm_eval import StreamedModel

        words = list(range(3, 40))
        (likelihood,) = StreamedModel(sides[0], dtype="float64").loglikelihood_rolling(
            [SimpleNamespace(args=(" ".join(f"w{word}" for word in words),))]
        )
        logits = self.plain(sides[0], words)[:-1].log_softmax(-1)

        assert pytest.approx(float(logits.gather(1, torch.tensor(words[1:])[:, None]).sum()), rel=FLOAT64) == likelihood

    def test_harness_does_not_generate(self, sides):
        from quanterr.lm_eval import StreamedModel

        with pytest.raises(UsageError, match="does not generate"):
            StreamedModel(sides[0]).generate_until([])


NO_TEXTS = {
    "constant": (torch.full((96,), 7), "1 different token, one of them makes up 100%"),
    "few": (torch.arange(96) % 10, "10 different tokens"),
    "repeated": (torch.arange(16).repeat(6) + 3, "5 of 6 chunks repeat earlier ones"),
}


class TestTexts:
    """Ids that do not form a text give small intervals but no information."""

    @pytest.mark.parametrize("case", NO_TEXTS)
    def test_invalid_texts_are_inconclusive(self, llama, tmp_path, case):
        ids, expected_reason = NO_TEXTS[case]
        save_file({"ids": ids}, tmp_path / "ids.safetensors")
        evaluation = quanterr.evaluate(llama[0], [llama[1]], tokens=tmp_path / "ids.safetensors", context=16, **EXACTLY)

        assert "inconclusive" == evaluation.verdict
        assert any(expected_reason in reason for reason in evaluation.reasons), evaluation.reasons

    def test_invalid_texts_are_logged_where_the_original_is_measured_alone(self, llama, tmp_path, log):
        ids, reason = NO_TEXTS["constant"]
        save_file({"ids": ids}, tmp_path / "ids.safetensors")
        quanterr.evaluation.run.study(
            llama[0], tokens=tmp_path / "ids.safetensors", context=16, importance_out=tmp_path / "i.gguf", **EXACTLY
        )

        # The second error says that chunks repeat earlier ones.
        assert ["ERROR"] * 2 == [record.levelname for record in log]
        assert any(reason in record.getMessage() for record in log)


class TestModel:
    """A candidate's files describe its model, which is run as the original's files describe it."""

    def copy(self, folder, to, **config):
        """Copy a model with these changes to its configuration and a tokenizer of words."""
        shutil.copytree(folder, to)
        fields = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(fields | config))
        with_words(to)
        return to

    @pytest.fixture
    def original(self, llama, tmp_path):
        return self.copy(llama[0], tmp_path / "original")

    @pytest.fixture
    def candidate(self, llama, original, tmp_path):
        folder = self.copy(original, tmp_path / "quantized")
        for path in folder.glob("model*"):
            path.unlink()
        shutil.copy(llama[1] / "model.safetensors", folder)
        return folder

    def evaluate(self, llama, original, quantized, *rules):
        options = EXACTLY | {"tokens": llama[3], "context": CONTEXT, "require": rules}
        evaluation = quanterr.evaluate(original, [quantized], **options)
        return evaluation, evaluation.candidates[0].findings

    @pytest.mark.parametrize(("rules", "verdict"), [((), "pass"), (("kld_mean <= 1",), "inconclusive")])
    def test_original_as_candidate_is_reported_and_passes_no_gate(self, llama, rules, verdict):
        evaluation, (finding,) = self.evaluate(llama, llama[0], llama[0], *rules)

        assert ("identical", "warning") == (finding.code, finding.severity)
        assert verdict == evaluation.verdict
        assert not rules or ["original: " + finding.message] == evaluation.reasons

    def test_same_model_is_judged(self, llama, original, candidate):
        evaluation, findings = self.evaluate(llama, original, candidate, "kld_mean <= 1e9")

        assert ("pass", []) == (evaluation.verdict, findings)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rms_norm_eps", 0.1),
            ("num_attention_heads", 2),
            ("hidden_act", "gelu"),
            ("rope_parameters", {"rope_theta": 7}),
        ],
    )
    def test_another_configuration_is_reported_and_passes_no_gate(self, llama, original, candidate, key, value):
        fields = json.loads((candidate / "config.json").read_text())
        (candidate / "config.json").write_text(json.dumps(fields | {key: value}))
        evaluation, (finding,) = self.evaluate(llama, original, candidate, "kld_mean <= 1e9")

        assert ("config_mismatch", "warning") == (finding.code, finding.severity)
        assert ("inconclusive", [f"quantized: {finding.message}"]) == (evaluation.verdict, evaluation.reasons)

    def test_another_tokenizer_is_reported_and_passes_no_gate(self, llama, original, candidate):
        fields = json.loads((candidate / "tokenizer.json").read_text())
        fields["model"]["vocab"] |= {"w7": 8, "w8": 7}
        (candidate / "tokenizer.json").write_text(json.dumps(fields))
        evaluation, (finding,) = self.evaluate(llama, original, candidate, "kld_mean <= 1e9")

        assert "is another tokenizer than the original's" in finding.message
        assert "inconclusive" == evaluation.verdict

    def test_tokenizer_in_another_form_counts_as_the_same(self, llama, original, candidate):
        fields = json.loads((candidate / "tokenizer.json").read_text())
        del fields["padding"], fields["truncation"]
        (candidate / "tokenizer.json").write_text(json.dumps(fields, indent=7, sort_keys=True))

        assert [] == self.evaluate(llama, original, candidate)[1]

    def test_stored_evaluation_is_judged_the_same(self, llama, tmp_path):
        evaluation, _ = self.evaluate(llama, llama[0], llama[0])
        evaluation.save(tmp_path / "e.json")
        again = judge(quanterr.read_document(str(tmp_path / "e.json")), require=["kld_mean <= 1"])

        assert "inconclusive" == again.verdict


class TestUnknown:
    """A text contains words that the tokenizer does not know."""

    @pytest.mark.parametrize(("unknown", "verdict"), [(9, "pass"), (11, "inconclusive")])
    def test_more_than_a_tenth_unknown_tokens_is_inconclusive(self, llama, tmp_path, unknown, verdict):
        original = TestModel().copy(llama[0], tmp_path / "original")
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
        (original / "tokenizer_config.json").write_text(json.dumps(fields))
        words = [f"w{n % 90}" for n in range(100 - unknown)] + ["zzz"] * unknown
        (tmp_path / "t.txt").write_text(" ".join(words[(37 * n) % 100] for n in range(100)))
        evaluation = quanterr.evaluate(original, [llama[1]], text=tmp_path / "t.txt", context=20, **EXACTLY)

        assert unknown / 100 == evaluation.tokens.unknown
        assert verdict == evaluation.verdict
        assert (verdict == "pass") == ("tokens are unknown to the tokenizer" not in " ".join(evaluation.reasons))


class TestMassiveActivations:
    def test_spread_equals_the_inputs_in_plain_transformers(self, evaluation, llama):
        import transformers

        original, _, _, tokens = llama
        model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float64).eval()
        measured = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                keep = measured.setdefault(f"{name}.weight", [])
                module.register_forward_hook(lambda _, given, __, keep=keep: keep.append(given[0].flatten(0, -2)))
        with torch.inference_mode():
            half = CONTEXT // 2
            model(load_file(tokens)["ids"].view(-1, CONTEXT), use_cache=False, logits_to_keep=CONTEXT - half)
        norms = {name: torch.cat(inputs).norm(dim=-1) for name, inputs in measured.items()}
        want = {name: float(norm.max() / norm.log().mean().exp()) for name, norm in norms.items()}
        spreads = {weight.layer_name: weight.input_spread for weight in evaluation.candidates[0].weights}

        assert spreads.pop("model.embed_tokens.weight") is None
        assert want == pytest.approx(spreads, rel=FLOAT64)

    def test_outstanding_token_is_a_finding(self, tmp_path):
        """Only token 7 has the first number of its embedding, which an MLP squares."""
        original = save_model("llama", tmp_path / "original")
        tensors = load_tensors(original)
        embedding = tensors["model.embed_tokens.weight"]
        embedding[:, 0] = 0
        embedding[7] = 0
        embedding[7, 0] = 1
        for name in ("gate", "up"):
            tensors[f"model.layers.0.mlp.{name}_proj.weight"][:, 0] = 300
        save_file(tensors, original / "model.safetensors", {"format": "pt"})
        tokens = torch.randint(8, 96, (96,), generator=torch.Generator().manual_seed(1))
        tokens[[5, 40]] = 7
        save_file({"ids": tokens}, tmp_path / "ids.safetensors")
        options = {"tokens": tmp_path / "ids.safetensors", "context": CONTEXT}
        [candidate] = quanterr.evaluate(original, against=["int8_row"], **options).candidates
        [finding] = [finding for finding in candidate.findings if finding.code == "massive_activations"]

        assert ("info", "model.layers.0.mlp.down_proj.weight") == (finding.severity, finding.layer)
        assert "1 changed weight" in finding.message
        assert finding.evidence["spreads"][finding.layer] > 1000
        assert "pass" == candidate.verdict


@pytest.mark.parametrize(("context", "read"), [(16, 4), (300, 4), (512, 2), (4096, 2)])
def test_floor_reads_chunks_until_they_have_a_thousand_tokens(context, read):
    given = torch.zeros(1, context)
    batches = [Batch(n, given, given, context, n, n) for n in range(6)]
    architecture = SimpleNamespace(workload=CAUSAL)

    assert list(range(read)) == [n for n, batch in enumerate(batches) if floor._is_read(architecture, batch)]


def test_large_output_error_that_scores_hardly_show_is_a_warning(llama, tmp_path):
    """One weight of its many has the scale of another row."""
    original, _, _, tokens = llama
    tensors, name = load_tensors(original), "model.layers.1.mlp.down_proj.weight"
    (tmp_path / "other").mkdir()
    save_file(tensors | {name: 2 * tensors[name]}, tmp_path / "other/model.safetensors", {"format": "pt"})
    shutil.copy(original / "config.json", tmp_path / "other")
    [candidate] = quanterr.evaluate(original, tmp_path / "other", tokens=tokens, context=CONTEXT).candidates
    [finding] = [finding for finding in candidate.findings if finding.code == "large_output_errors"]

    assert ("warning", name, [name]) == (finding.severity, finding.layer, finding.evidence["layers"])
    assert f"1 of 1 changed weight, up to 100 %: {name}" in finding.message
    assert "compare" in finding.remedy
