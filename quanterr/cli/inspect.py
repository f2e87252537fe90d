"""``quanterr inspect``: list a checkpoint's formats, sizes and problems."""

from typing import Annotated

import typer

from quanterr.cli.display import Display, deliver
from quanterr.cli.notices import announce, warn
from quanterr.cli.options import AllBut, Only, argument, with_options
from quanterr.cli.process import command_line
from quanterr.errors import Status
from quanterr.options import Option, ReadOptions
from quanterr.util.memory import require_memory_for_torch


@with_options
def inspect(
    checkpoint: Annotated[str, argument("CHECKPOINT", "A file, a folder, an index or org/name.")],
    options: Annotated[ReadOptions, Only(("lenient",))],
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "allow_partial", "top_layers"))],
    hardware: Annotated[
        str | None,
        Option(
            "Show how many tokens per second this memory bandwidth allows: H100, 4090, M3-max, 900GB/s.",
            metavar="NAME|GB/s",
        ),
    ] = None,
    values: Annotated[
        bool,
        Option("Read every weight once: NaN and infinity, zeros, repetitions, wrong scales, unused codes."),
    ] = False,
    verify: Annotated[
        bool,
        Option("Compare the SHA-256 of each file with the one that the Hugging Face hub states: hf://, downloads."),
    ] = False,
    runtimes: Annotated[
        str | None,
        Option(
            "Say whether programs load it: transformers, vllm, sglang, llama.cpp, ik_llama.cpp, comfyui, mlx, or all.",
            metavar="NAMES",
            flags="--for",
        ),
    ] = None,
    devices: Annotated[
        int, Option("Number of devices among which vLLM splits the model.", metavar="N", flags="--tp")
    ] = 1,
) -> None:
    """List a checkpoint's formats, sizes, bits per weight and problems. Reads headers only, unless asked for more.

    Exit status: 0 no error was found; 2 wrong usage; 3 an input is unreadable; 4 a weight is in no readable format,
    another error was found, or a program named with --for does not surely load it as stored; 5 memory or disk.
    """
    from quanterr.checkpoints import open_checkpoint
    from quanterr.documents.inspection.model import LOADS
    from quanterr.findings.runtimes.judging import ALL, choose_runtimes
    from quanterr.util.hardware import bandwidth_of

    if hardware is not None:
        bandwidth_of(hardware)  # raises before torch is imported
    wanted = (runtimes or "").split(",") if runtimes is not None else []
    choose_runtimes(wanted)  # raises before the checkpoint is opened
    to = show.targets([checkpoint])
    announce([checkpoint], quiet=show.quiet or show.as_json)
    require_memory_for_torch()
    with open_checkpoint(checkpoint, options.lenient) as found:
        from quanterr.inspection import inspect as run

        inspection = run(
            found,
            hardware=hardware,
            command=command_line(),
            values=values,
            verify=verify,
            runtimes=wanted,
            devices=devices,
        )
    warn(inspection.findings)
    deliver(inspection, to, show)
    is_asked = ALL not in wanted  # a table of all is no demand
    if inspection.problems or (is_asked and any(one.verdict != LOADS for one in inspection.loading)):
        raise typer.Exit(Status.INCONCLUSIVE)
