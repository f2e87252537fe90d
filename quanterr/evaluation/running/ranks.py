"""Several processes for one evaluation, as torchrun and srun start them: each takes its share of the micro-batches.

Every rank reads all weights, and keeps only the hidden states of its micro-batches. Rank 0 adds up the results; only it
answers tasks, measures the sensitivity, judges and writes files.
"""

import io
from collections.abc import Sequence

import torch

from quanterr.checkpoints import Checkpoint
from quanterr.errors import Interrupted
from quanterr.evaluation.denoisers.calls import Calls
from quanterr.evaluation.running.run import EXCHANGED, Measurements, RunBesideOriginal
from quanterr.evaluation.texts.tokens import Chunks, digest_of
from quanterr.util.rank_group import RankGroup
from quanterr.version import __version__


def agree(
    group: RankGroup | None, checkpoints: Sequence[Checkpoint], chunks: Sequence[Chunks] | Calls, *settings: object
) -> None:
    """Check that all ranks evaluate the same inputs.

    Raises:
        QuanterrError: a rank has other inputs.
    """
    if group is not None:
        group.agree(
            {
                "quanterr": __version__,
                "inputs": [checkpoint.identity for checkpoint in checkpoints],
                "tokens": [chunks.sha256] if isinstance(chunks, Calls) else [digest_of(each) for each in chunks],
                "settings": settings,
            }
        )


def run_with(running: RunBesideOriginal, group: RankGroup | None) -> None:
    """Run the evaluation, and add the results of all other ranks.

    Raises:
        Interrupted: the run was stopped.
        ElsewhereError: this is not rank 0, which has all results.
        QuanterrError: another rank has failed.
    """
    if group is None:
        running.run()
        return
    try:
        running.run()
    except Interrupted:
        group.check()
        raise
    for packed in group.gather(lambda: _pack(running.measurements())):
        with torch.serialization.safe_globals(EXCHANGED):
            running.merge(torch.load(io.BytesIO(packed), weights_only=True, map_location="cpu"))
    group.end()


def leave_to_rank_0(group: RankGroup | None) -> None:
    """Return in rank 0 or in the only process; the other ranks end here.

    Raises:
        ElsewhereError: this is not rank 0.
    """
    if group is not None:
        if group.rank:
            group.leave()
        group.end()


def _pack(measurements: Measurements) -> bytes:
    file = io.BytesIO()
    torch.save(measurements, file)
    return file.getvalue()
