"""``quanterr sweep``: rank recipes on the original, without writing a file."""

from typing import TYPE_CHECKING, Annotated

from quanterr.cli.display import RESULT_OPTIONS, Display
from quanterr.cli.options import Original, with_options
from quanterr.cli.rank import run
from quanterr.options import SweepOptions

if TYPE_CHECKING:
    from quanterr.cli.opening import Opened
    from quanterr.documents.ranking.model import Ranking


@with_options
def sweep(original: Original, options: SweepOptions, show: Annotated[Display, RESULT_OPTIONS]) -> None:
    """Quantize the original on the fly by several recipes and rank them by error and size.

    \b
    [bold]quanterr sweep original/[/bold]
    [bold]quanterr sweep original/ --to fp8_row,int8_row,nvfp4,gguf_q4_k,nf4 -l attn,mlp -o sweep.html[/bold]
    [bold]quanterr sweep original/ --to 'int4_g{32,64,128}' --scales absmax,mse[/bold]
    [bold]quanterr sweep original/ --sample 10%[/bold]
    [bold]quanterr sweep original/ --to fp8_row --require 'snr_db >= 30'[/bold]

    No checkpoint is written. Each recipe passes the same readers and checks as a file on disk, with the same numbers as
    that file. Matrices X.weight are quantized; norms and routers are not, nor embeddings and heads unless -l names
    them. quanterr formats --recipes lists the recipes.

    Exit status: the same as quanterr rank.
    """
    from quanterr.gates import prepare
    from quanterr.outputs import CANDIDATE_OUTPUTS
    from quanterr.util.hardware import bandwidth_of

    if options.hardware is not None:
        bandwidth_of(options.hardware)  # raises before the run
    to = show.targets([original, options.baseline, options.importance, options.sensitivity], CANDIDATE_OUTPUTS)
    rules = prepare(options)

    def ranking(opened: "Opened", asked: SweepOptions) -> "Ranking":
        from quanterr.comparison.ranking import sweep_recipes

        return sweep_recipes(opened[0], asked, rules)

    run(ranking, options, [original], to, show)
