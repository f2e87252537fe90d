"""Several processes for one evaluation, as torchrun and srun start them: each takes its share of the micro-batches.

Every rank reads every weight and keeps only its own hidden states. Rank 0 adds up what all have found. It alone answers
tasks, measures the sensitivity, judges and writes.
"""

import io
import time
from collections.abc import Sequence
from typing import Any

import torch

from quanterr.checkpoints import Checkpoint
from quanterr.errors import Interrupted
from quanterr.evaluation.calls import Calls
from quanterr.evaluation.lockstep import Lockstep
from quanterr.evaluation.tokens import Chunks, digest_of
from quanterr.util.rank_group import LOOK, RankGroup
from quanterr.version import __version__


def agree(
    company: RankGroup | None, checkpoints: Sequence[Checkpoint], chunks: Sequence[Chunks] | Calls, *settings: object
) -> None:
    """See that all ranks evaluate the same.

    Raises:
        QuanterrError: one of them does not.
    """
    if company is not None:
        company.agree(
            {
                "quanterr": __version__,
                "inputs": [checkpoint.identity for checkpoint in checkpoints],
                "tokens": [chunks.sha256] if isinstance(chunks, Calls) else [digest_of(each) for each in chunks],
                "settings": settings,
            }
        )


def run(lockstep: Lockstep, company: RankGroup | None) -> None:
    """Run it, with what all other ranks found.

    Raises:
        Interrupted: the run was stopped.
        ElsewhereError: this is another rank than 0, which has all.
        QuanterrError: another rank has failed.
    """
    if company is None:
        lockstep.run()
        return
    try:
        lockstep.run()
    except Interrupted:
        company.check()
        raise
    if company.rank:
        company.set(f"found/{company.rank}", _packed(lockstep.found()))
        company.leave()
    for other in range(1, company.world):
        while not company.has(key := f"found/{other}"):
            company.check()
            time.sleep(LOOK)
        lockstep.add(_unpacked(company.get(key)))
        company.delete(key)
    company.end()


def leave_to_rank_0(company: RankGroup | None) -> None:
    """Go on as rank 0, or as the only process; the others end.

    Raises:
        ElsewhereError: this is one of them.
    """
    if company is not None:
        if company.rank:
            company.leave()
        company.end()


def _packed(found: dict[str, object]) -> bytes:
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True, map_location="cpu")
