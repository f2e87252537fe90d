"""``quanterr dequantize``: write a checkpoint back as plain floats."""

import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from quanterr.cli.interrupt import Interrupt
from quanterr.cli.notices import announce
from quanterr.cli.options import argument, with_options
from quanterr.cli.progress import show_bytes
from quanterr.options import OUTPUT, DequantizeOptions, Option
from quanterr.util.memory import require_memory_for_torch
from quanterr.util.text import count, display, size


@with_options
def dequantize(
    model: Annotated[str, argument("MODEL", "The quantized checkpoint.")],
    options: DequantizeOptions,
    output: Annotated[
        str,
        Option(
            "A folder for shards, index, config and tokenizer; or a .safetensors file.", OUTPUT, "PATH", "--output -o"
        ),
    ],
    quiet: Annotated[bool, Option("Print nothing but errors.", OUTPUT, flags="--quiet -q")] = False,
) -> None:
    """Write a checkpoint back as plain floats (safetensors), from any format that quanterr reads.

    \b
    [bold]quanterr dequantize model-fp8/ -o model-bf16/[/bold]
    [bold]quanterr dequantize model.gguf --like original/ -o restored/[/bold]
    [bold]quanterr dequantize flux-nf4.safetensors -o flux.safetensors --dtype f32[/bold]

    Reads and writes in pieces, so memory does not grow with the model. The output appears when it is complete; the same
    command goes on after an interruption. quanterr compare MODEL OUTPUT shows the rounding to the dtype, and nothing
    else.

    Exit status: 0 written; 2 wrong usage; 3 an input is unreadable, or a tensor cannot be written; 5 memory or disk.
    """
    announce([model, *([] if options.like is None else [str(options.like)])], quiet)
    require_memory_for_torch()
    from quanterr.dequantization.run import dequantize_checkpoint

    with Interrupt(keeps=False) as interrupt, ExitStack() as stack:
        shown = None if quiet else stack.enter_context(closing(show_bytes(sys.stderr.isatty())))
        result = dequantize_checkpoint(model, Path(output), replace(options, on_progress=shown, stop=interrupt.stop))
    if quiet:
        return
    decoded = ", ".join(f"{display(name)}: {count(n, 'weight')}" for name, n in result.formats.items()) or "nothing"
    rounded = "" if result.rounding_db is None else f"; rounded to the dtype at {result.rounding_db:.2f} dB"
    print(f"wrote {display(result.path)}: {size(result.nbytes)} in {count(len(result.files), 'file')}")
    print(f"decoded {decoded}; copied {count(result.copied, 'tensor')}{rounded}")
    for reason, n in result.left_out.items():
        print(f"left out {count(n, 'tensor')} of the original: {reason}")
