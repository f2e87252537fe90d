"""``quanterr sweep``: what other formats would cost, without writing a file."""

from typing import TYPE_CHECKING, Annotated

from quanterr.cli.common import OF_RESULTS, Display, Original, help_of
from quanterr.cli.options import with_options
from quanterr.cli.rank import run
from quanterr.errors import UsageError
from quanterr.options import SweepOptions

if TYPE_CHECKING:
    from quanterr.report.ranking.model import Ranking

HELP = help_of("""Quantize the original on the fly by several recipes and rank them: error, size, what each choice buys.

\b
[bold]quanterr sweep original/[/bold]
[bold]quanterr sweep original/ --to fp8_row,int8_row,nvfp4,gguf_q4_k,nf4 -l attn,mlp -o sweep.html[/bold]
[bold]quanterr sweep original/ --to 'int4_g{32,64,128}' --scales absmax,mse[/bold]
[bold]quanterr sweep original/ --sample 10%[/bold]
[bold]quanterr sweep original/ --to fp8_row --require 'snr_db >= 30'[/bold]

No file is written. Each recipe goes through the readers and checks of a file on disk, and its numbers are those of
that file. Matrices X.weight are quantized; norms and routers stay as they are, and so do embeddings and heads unless
-l names them. quanterr formats --recipes lists the recipes.

Exit status: as of quanterr rank.
""")


@with_options
def sweep(original: Original, options: SweepOptions, show: Annotated[Display, OF_RESULTS]) -> None:
    """What other formats would cost."""
    from quanterr.gates import prepare
    from quanterr.report.hardware import bandwidth_of

    if options.hardware is not None:
        bandwidth_of(options.hardware)  # a mistake in it costs no run
    to = show.targets([original, options.baseline, options.importance, options.sensitivity])
    rules = prepare(options)
    if options.sample is not None and rules.rules:
        raise UsageError("--require: needs all rows; leave --sample out")

    def ranking(asked: SweepOptions) -> "Ranking":
        from quanterr.comparison.ranking import sweep_recipes

        return sweep_recipes(original, asked, rules)

    run(ranking, options, [original], to, show)
