"""Several processes share one run on the loopback: the report is the same, and no process hangs.

MOMENTS=20 python -m pytest tests/comparison/test_ranks.py     as many moments at which a rank is killed; 2 otherwise
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import gguf
import pytest
from support.forked import call, signal_after, signalled_before, together
from support.gguf_stored import TEXT, Stored, key, write_gguf
from support.making import legacy, numbers, store
from support.simulated_device import UNKNOWN
from support.small_models import ids, save_model, with_words
from support.smoothed import FED, factors, int4, model

from quanterr.errors import Status

pytestmark = pytest.mark.slow  # each test starts several processes
MOMENTS = int(os.environ.get("MOMENTS", "2"))
LIMIT = 60  # seconds within which all ranks end after one has died
RECIPES = ("--to", "fp8_row,int4_g32:asym,nf4", "--device", "cpu")


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


# A rank that has its first piece waits until another has one, too: a fast one would have taken all.
SMALL_PIECES = """
import sys, time
from quanterr.comparison import ranks, scheduler
scheduler.CPU_CHUNK, scheduler.CHUNKS_AT_ONCE = 1 << 13, 2
scheduler.PIECE_ELEMENTS, scheduler.SMALL_ELEMENTS = 1 << 15, 1 << 12
claim = ranks.Ranks.claim
def claim_beside_another(own, key):
    is_own = claim(own, key)
    if is_own:
        own.group.set(f"begun/{own.rank}", b"")
    while is_own and not any(own.group.has(f"begun/{n}") for n in range(own.world) if n != own.rank):
        time.sleep(0.01)
    return is_own
ranks.Ranks.claim = claim_beside_another
finish = ranks.Ranks.finish
ranks.Ranks.finish = lambda own, parts: print(len(parts), file=sys.stderr) or finish(own, parts)
"""


def environment(rank, world, port):
    """Return the variables that torchrun sets."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {key: str(value) for key, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def start_within(seconds):
    """Return Python that makes ranks wait no longer for one that was killed before they met."""
    return f"from quanterr.util import rank_group; rank_group.MAX_START_SECONDS = {seconds:.1f}\n"


def run(world, *words, cwd, before=""):
    """Run all ranks and return status, standard output and standard error of each; a single one runs alone."""
    if world == 1:
        done = call(*words, cwd=cwd)
        return [(done.returncode, done.stdout, done.stderr)]
    return meet([words] * world, [cwd] * world, [before] * world)


def meet(lines, folders, befores=None):
    """Run ranks with different words, folders, or Python code that is executed first."""
    port = free_port()
    runs = zip(lines, folders, befores or [""] * len(lines), strict=True)
    return together(
        (words, environment(rank, len(lines), port), cwd, before) for rank, (words, cwd, before) in enumerate(runs)
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Weights of different sizes, one of them as large as all others together."""
    folder = tmp_path_factory.mktemp("ranks")
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": numbers(64 + 8 * n, 256, seed=n) for n in range(12)}
    tensors["model.layers.12.mlp.up_proj.weight"] = numbers(1296, 256, seed=99)
    tensors["model.norm.weight"] = numbers(256, seed=100)
    return store(folder / "x.safetensors", tensors)


@pytest.fixture(scope="module")
def alone(original):
    """The result of a single process."""
    return without_run(call("sweep", original, *RECIPES, "--json").stdout)


def without_run(text):
    return json.loads(text) | {"run": None}


class TestEvaluate:
    """Ranks share micro-batches."""

    @pytest.fixture(scope="class")
    @classmethod
    def words(cls, tmp_path_factory):
        pytest.importorskip("transformers", reason='pip install "quanterr[evaluate]"')
        folder = tmp_path_factory.mktemp("evaluate")
        mixtral, bert, draft = (save_model(name, folder / name) for name in ("mixtral", "bert", "llama"))
        for model_folder in (mixtral, draft):
            with_words(model_folder)
        more = (
            "--against",
            "fp8_row,int4_g32",
            "--tokens",
            ids(folder),
            "--context",
            16,
            "--batch",
            2,
            "--dtype",
            "float64",
            "--json",
        )
        return {"mixtral": (mixtral, "--draft", draft, *more), "bert": (bert, *more)}

    @pytest.mark.parametrize(("name", "world"), [("mixtral", 4), ("bert", 3)])
    def test_evaluation_by_several_ranks_equals_one_process(self, words, tmp_path, name, world):
        of_one_process, many = (self.evaluate(n, *words[name], cwd=tmp_path / str(n)) for n in (1, world))
        output_errors = [document.pop("output errors") for document in (of_one_process, many)]
        for evaluation in (of_one_process, many):
            del evaluation["checksum"]  # the checksum covers their digits

        assert of_one_process == many
        # Sums over micro-batches are added in another order.
        assert pytest.approx(output_errors[0], rel=1e-9) == output_errors[1]

    @staticmethod
    def evaluate(world, *words, cwd):
        """Return the output of rank 0, with output errors and by-products under the names of weights."""
        cwd.mkdir()
        done = run(world, "evaluate", *words, "--saliency-out", "s.json", "--importance-out", "i.gguf", cwd=cwd)
        assert {Status.OK} == {status for status, _, _ in done}, done
        assert not "".join(out + err for _, out, err in done[1:])
        document = without_run(done[0][1])
        rows = [
            row | {"of": candidate["name"]} for candidate in document["candidates"] for row in candidate.pop("weights")
        ]
        salient = json.loads((cwd / "s.json").read_text())["weights"]
        return document | {
            "output errors": {(row["of"], row["layer_name"]): row["output_error"] for row in rows},
            "salient": {row["layer_name"]: (row["inputs"], row["columns"]) for row in salient},
            "importance": (cwd / "i.gguf").stat().st_size,
        }

    def test_ranks_with_other_tokens_are_an_error(self, words, tmp_path):
        words_of_bert = ["evaluate", *words["bert"]]
        done = meet([words_of_bert, [*words_of_bert, "--chunks", 4]], [tmp_path] * 2)

        assert [Status.USAGE] * 2 == [status for status, _, _ in done]
        assert "rank 1 differs from rank 0 in tokens" in done[0].stderr
        assert ("", "") == done[1][1:]


@pytest.mark.parametrize("world", [2, 5])
def test_only_rank_0_prints_and_the_result_equals_one_process(original, alone, tmp_path, world):
    done = run(world, "sweep", original, *RECIPES, "--json", cwd=tmp_path)

    assert {Status.OK} == {status for status, _, _ in done}, done
    assert alone == without_run(done[0][1])
    assert {("", "")} == {texts for _, *texts in ((s, o, e) for s, o, e in done[1:]) for texts in [tuple(texts)]}


@UNKNOWN
def test_each_rank_has_its_own_device(original, tmp_path):
    words = (
        "sweep",
        original,
        "--to",
        "fp8_row,int4_g32:asym",
        "--device",
        "auto",
        "--json",
        "-l",
        r"re:layers\.[0-3]\.",
    )
    on_one_device, two = (
        meet(
            [words] * world,
            [tmp_path] * world,
            [f"from support.simulated_device import enter; enter({world})\n"] * world,
        )
        for world in (1, 2)
    )

    assert {Status.OK} == {status for status, _, _ in (*on_one_device, *two)}, two
    assert "sim:0 (simulated)" == json.loads(two[0].stdout)["run"]["device"]
    assert without_run(on_one_device[0].stdout) == without_run(two[0].stdout)


def with_folded_scales(folder):
    """Write weights with scales folded into the norm before them, a wrong row and an importance matrix."""
    x, s = model(), factors(128)
    x |= {f"model.layers.{n}.mlp.up_proj.weight": numbers(200 + n, 128, seed=n) for n in range(1, 9)}
    norm = "model.layers.0.input_layernorm.weight"
    y = {name: int4(weight) if weight.dim() > 1 else weight for name, weight in x.items()}
    y |= {norm: x[norm] / s} | {name: int4(x[name] * s) for name in FED}
    y["model.layers.3.mlp.up_proj.weight"][17] *= -3
    matrix = {f"blk.{n}.ffn_up.weight": numbers(1, 128, seed=n).float().square() for n in range(9)}
    (folder / "m.dat").write_bytes(legacy({name: means.numpy() for name, means in matrix.items()}))
    return [store(folder / f"{side}.safetensors", tensors) for side, tensors in (("x", x), ("y", y))]


def with_experts(folder):
    """Write single experts and the stacks of a GGUF file, each with its importance."""
    names = [f"model.layers.{{}}.mlp.experts.{expert}.up_proj.weight" for expert in range(3)]
    x, stacks, matrix = {}, [], {}
    for n in range(6):
        stack = numbers(3, 40 + 8 * n, 64, seed=n).float()
        x |= {name.format(n): stack[expert].clone() for expert, name in enumerate(names)}
        raw = gguf.quants.quantize(stack.numpy(), gguf.GGMLQuantizationType.Q4_0)
        stack_name = f"blk.{n}.ffn_up_exps.weight"
        stacks.append(Stored(stack_name, "Q4_0", tuple(stack.shape), raw.tobytes()))
        matrix[stack_name] = numbers(3, 64, seed=n).float().square()
    (folder / "m.dat").write_bytes(legacy({name: means.numpy() for name, means in matrix.items()}))
    quantized = write_gguf(folder / "y.gguf", stacks, [key("general.architecture", TEXT, "llama")])
    return [store(folder / "x.safetensors", x), quantized]


@pytest.mark.parametrize("made", [with_folded_scales, with_experts])
def test_results_from_pairing_are_the_same_on_every_rank(tmp_path, made):
    words = ("compare", *made(tmp_path), "--importance", tmp_path / "m.dat", "--device", "cpu", "-q", "-o", "-")
    (_, alone, messages), *_ = run(1, *words, cwd=tmp_path)
    assert alone, messages
    done = run(3, *words, cwd=tmp_path)

    assert without_run(alone) == without_run(done[0][1])
    document = json.loads(alone)
    assert document["aggregate"]["weighted_snr_db"] is not None
    if made is with_folded_scales:
        assert {"folded_scales", "scale_factor"} <= {finding["code"] for finding in document["findings"]}
    else:
        assert {"gguf_q4_0"} == {layer["format"] for layer in document["layers"]}


def test_sampled_sweep_is_shared_among_ranks(original, tmp_path):
    words = ("sweep", original, *RECIPES, "--sample", "20%", "--json")
    (_, alone, _), *_ = run(1, *words, cwd=tmp_path)
    (status, shared, _), *others = run(3, *words, cwd=tmp_path)

    assert (0, without_run(alone)) == (status, without_run(shared))
    assert json.loads(alone)["run"]["read_bytes"] == json.loads(shared)["run"]["read_bytes"]
    assert [(0, "", "")] * 2 == others


def test_ranks_with_other_samples_are_an_error(original, tmp_path):
    lines = [("sweep", original, *RECIPES, "--sample", share, "-q") for share in ("20%", "30%")]
    done = meet(lines, [tmp_path] * 2)

    assert {Status.USAGE} == {status for status, _, _ in done}
    assert "rank 1 differs from rank 0 in sample" in done[0][2]


def test_huge_weight_is_shared_among_ranks(original, alone, tmp_path):
    """The pieces are small enough for this weight."""
    words = ("sweep", original, *RECIPES, "-o", "s.json", "-q", "--resume", "j", "-l", "12")
    done = run(3, *words, cwd=tmp_path, before=SMALL_PIECES)
    expected = [layer for layer in alone["layers"] if ".12." in layer["layer_name"]]

    assert {Status.OK} == {status for status, _, _ in done}, done
    assert "1" in "".join(err for _, _, err in done[1:]).split()  # another rank computed a part of the weight
    assert expected == without_run((tmp_path / "s.json").read_text())["layers"]


def test_torchrun_starts_ranks(original, alone, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    done = subprocess.run(
        [*command, "-m", "quanterr", "sweep", original, *RECIPES, "--json", "-o", tmp_path / "sweep.json"],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )

    assert 0 == done.returncode, done.stderr
    assert alone == without_run((tmp_path / "sweep.json").read_text())


def test_journals_from_earlier_ranks_are_resumed(original, alone, tmp_path):
    words = ("sweep", original, *RECIPES, "--json", "--resume", "journal")
    run(3, *words, cwd=tmp_path)
    journals = sorted(tmp_path.glob("journal*"))
    assert ["journal", "journal.1", "journal.2"] == [path.name for path in journals]
    for path in journals[1:]:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: len(lines) // 2]))
    done = run(3, *words, cwd=tmp_path)

    assert {Status.OK} == {status for status, _, _ in done}, done
    assert alone == without_run(done[0][1])


def test_srun_starts_ranks(original, alone, tmp_path):
    """The test sets Slurm's variables, as no Slurm runs here."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SLURM_STEP_NUM_TASKS": "2"}
    words = ["sweep", original, *RECIPES, "--json"]
    done = together(
        (words, meeting | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, tmp_path, "") for rank in range(2)
    )

    assert alone == without_run(done[0].stdout)
    assert "" == done[1].stdout


@pytest.mark.parametrize("world", [1, 2])
def test_journals_from_more_ranks_are_read_too(original, alone, tmp_path, world):
    words = ("sweep", original, *RECIPES, "--json", "--resume", "journal")
    run(3, *words, cwd=tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("journal*")}
    done = run(world, *words, cwd=tmp_path)

    assert alone == without_run(done[0][1])
    assert sizes == {path.name: path.stat().st_size for path in tmp_path.glob("journal*")}  # no work was repeated


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_ranks_resume_their_run(original, alone, tmp_path, moment):
    """Each rank is killed once it has recorded a few weights, unless it ends earlier because another was killed."""
    words = ("sweep", original, *RECIPES, "-q", "-o", "s.json", "--resume", "journal")
    before = start_within(20) + signalled_before("quanterr.comparison.journal.Journal.add", moment + 1)
    killed = run(3, *words, cwd=tmp_path, before=before)
    assert -signal.SIGKILL in {rank.status for rank in killed}
    assert {Status.OK} == {status for status, _, _ in run(3, *words, cwd=tmp_path)}

    assert alone == without_run((tmp_path / "s.json").read_text())


def test_failed_gate_sets_the_status_for_rank_0_only(original, tmp_path):
    done = run(2, "sweep", original, *RECIPES, "-q", "--require", "snr_db >= 99", cwd=tmp_path)

    assert [Status.GATE_FAILED, Status.OK] == [status for status, _, _ in done]


def test_node_with_another_file_is_named(original, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    shutil.copy(original, tmp_path / "a/x.safetensors")
    store(tmp_path / "b/x.safetensors", {"model.layers.0.mlp.up_proj.weight": numbers(64, 256)})
    done = meet([("sweep", "x.safetensors", *RECIPES, "-o", "s.json")] * 2, [tmp_path / name for name in "ab"])
    stderrs = [rank.stderr for rank in done]

    assert [Status.USAGE] * 2 == [status for status, _, _ in done]
    assert re.search(
        "rank 1 differs from rank 0 in inputs, contents, plan|rank 0 differs from rank 1 in inputs", stderrs[0]
    )
    assert "" == stderrs[1]
    assert not (tmp_path / "a/s.json").exists()


def test_file_missing_on_one_node_ends_all_ranks(original, tmp_path):
    names = (original, original, "missing.safetensors")
    done = meet([("sweep", name, *RECIPES, "-q") for name in names], [tmp_path] * 3)
    stderrs = [rank.stderr for rank in done]

    assert [Status.UNREADABLE] * 3 == [status for status, _, _ in done]
    assert "quanterr: rank 2: missing.safetensors: no such file" in stderrs[0]
    assert ["", ""] == stderrs[1:]


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_dying_rank_ends_all_ranks(original, alone, tmp_path, moment):
    """One rank is killed before all have connected, while they compute, or when they are nearly done."""
    chosen = random.Random(moment)
    victim = chosen.randrange(3)
    befores = [start_within(5)] * 3  # later than any of these moments
    befores[victim] += signal_after(chosen.uniform(0.5, 1.5) if moment % 2 else chosen.uniform(0, 0.5))
    words = ("sweep", original, *RECIPES, "-q", "-o", "s.json")
    started = time.monotonic()
    statuses = [rank.status for rank in meet([words] * 3, [tmp_path] * 3, befores)]
    others = [status for n, status in enumerate(statuses) if n != victim]

    assert time.monotonic() - started < LIMIT
    written = json.loads((tmp_path / "s.json").read_text()) if (tmp_path / "s.json").exists() else None
    if written is not None and written["schema"] == alone["schema"]:  # the run was over before the signal
        assert alone == written | {"run": None}
        assert statuses[0] in (Status.OK, -signal.SIGKILL)
    else:
        assert -signal.SIGKILL == statuses[victim]
        assert {Status.OK, Status.ENVIRONMENT} >= set(others)
        assert victim == 0 or Status.OK not in others  # rank 0 may be killed after it has released the others
        assert victim == 0 or Status.ENVIRONMENT == written["status"]  # the rank wrote an error instead of the report
