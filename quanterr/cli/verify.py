"""``quanterr verify``: check that files are those of a statement of origin."""

from dataclasses import replace
from typing import Annotated

import typer

from quanterr.cli.interrupt import Interrupt
from quanterr.cli.options import argument, with_options
from quanterr.cli.process import command_line
from quanterr.errors import Status, UsageError
from quanterr.options import INPUTS, CompareOptions, Option, ReadOptions
from quanterr.util.memory import require_memory_for_torch


@with_options
def verify(
    statement: Annotated[str, argument("STATEMENT", "The .intoto.json of compare --every-code.")],
    quantized: Annotated[str, argument("QUANTIZED", "The quantized checkpoint that it is about.")],
    reading: ReadOptions,
    original: Annotated[
        str | None, Option("Check the files of the original, too.", INPUTS, "PATH", "--original")
    ] = None,
    again: Annotated[bool, Option("Repeat the comparison; needs --original.", INPUTS)] = False,
) -> None:
    """Check a statement of origin: its checksum, and the SHA-256 of all files; --again repeats the comparison.

    \b
    [bold]quanterr verify origin.intoto.json quantized/ --original original/[/bold]

    A signature of the statement is checked by the program that made it: see quanterr guide origin.

    Exit status: 0 the files are those of the statement, which shows all tensors; 1 it names tensors that are not shown;
    2 wrong usage; 3 a file or the statement was changed, or cannot be read; 5 memory or disk.
    """
    from quanterr.documents.statement import SHOWN, read_statement
    from quanterr.util.text import count, display

    if again and original is None:
        raise UsageError("--again: the comparison needs the original; give --original PATH")
    stated = read_statement(statement)
    require_memory_for_torch()
    from quanterr.comparison.statement_check import check_files, compare_again

    predicate = stated.predicate
    options = CompareOptions(
        lenient=reading.lenient,
        cache=reading.cache,
        layers=predicate.patterns,
        importance=predicate.options.importance,
        command=command_line(),
    )
    files = [f"{count(check_files(quantized, stated.subject, 'quantized', options), 'file')} of the quantized side"]
    if original is not None:
        n = check_files(original, predicate.materials, "original", options)
        files.append(f"{n:,} of the original")
    if again and original is not None:
        with Interrupt() as interrupt:
            compare_again(stated, original, quantized, replace(options, stop=interrupt.stop))
    sizes = ", ".join(
        f"{size.tensors:,} {origin_class.replace('_', ' ')}" for origin_class, size in predicate.classes.items()
    )
    done = "; compared again, with the same result" if again else ""
    print(f"verified: {' and '.join(files)} as stated{done}; {display(predicate.verdict)}: {sizes}")
    if predicate.verdict != SHOWN:
        print("\n".join(display(reason, 1000) for reason in predicate.reasons))
        raise typer.Exit(Status.GATE_FAILED)
