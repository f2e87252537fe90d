"""``quanterr rank``: compare several candidates with one original in one pass."""

from typing import TYPE_CHECKING, Annotated

from quanterr.cli.display import RESULT_OPTIONS, Display
from quanterr.cli.interrupt import Interrupt, decide_status
from quanterr.cli.next_steps import suggest_after_rank
from quanterr.cli.notices import announce, warn
from quanterr.cli.options import Original, argument, with_options
from quanterr.cli.process import command_line
from quanterr.cli.verdicts import finish
from quanterr.errors import Status
from quanterr.options import JudgedOptions, RankOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from quanterr.cli.opening import Opened
    from quanterr.documents.ranking.model import Ranking
    from quanterr.outputs.files import Target

    Asked = TypeVar("Asked", bound=JudgedOptions)


@with_options
def rank(
    original: Original,
    candidates: Annotated[list[str], argument("Q1 Q2 ...", "The checkpoints to rank.")],
    options: RankOptions,
    show: Annotated[Display, RESULT_OPTIONS],
) -> None:
    """Compare several quantized checkpoints with one original and rank them by error and size.

    \b
    [bold]quanterr rank original.safetensors fp8.safetensors int8.safetensors[/bold]
    [bold]quanterr rank original/ recipes/*.safetensors -l attn,mlp -o ranking.json[/bold]
    [bold]quanterr rank org/name q4.gguf q5.gguf q6.gguf --json | jq '.front, .swaps'[/bold]
    [bold]quanterr rank org/name q4.gguf q5.gguf --evaluation eval.json -o ranking.svg -o ranking.md[/bold]
    [bold]quanterr rank original/ fp8/ int8/ --keep-original 200MiB -o ranking.html[/bold]
    [bold]quanterr rank original/ mine.safetensors --against fp8_row,nvfp4[/bold]

    The original is read once, whatever the number of candidates. All errors are over the same layers. Candidates that
    compare would call inconclusive have no rank, nor have damaged files among two or more that can be read.

    Exit status: 0 all candidates compared completely, and all gates hold for each; 1 a gate does not hold; 2 wrong
    usage; 3 an input is unreadable; 4 a candidate is inconclusive; 5 memory, device or disk; 70 a bug.
    """
    from quanterr.documents.evaluation.model import Evaluation
    from quanterr.documents.reading import read_stored
    from quanterr.findings.runtimes.judging import choose_runtimes
    from quanterr.gates import prepare
    from quanterr.outputs import CANDIDATE_OUTPUTS
    from quanterr.ranking.making import name_candidates

    if not options.against:
        name_candidates(candidates)  # so that an error in the names comes before the run, not after it
    inputs = [options.baseline, options.importance, options.sensitivity, options.evaluation]
    to = show.targets([original, *candidates, *inputs], CANDIDATE_OUTPUTS)
    if options.evaluation is not None:
        read_stored(options.evaluation, Evaluation)  # so that an unreadable file is reported before the run
    rules = prepare(options)
    choose_runtimes([*options.runtimes, *rules.runtimes])  # so that an unknown runtime is reported before the run

    def ranking(opened: "Opened", asked: RankOptions) -> "Ranking":
        from quanterr.comparison.ranking import rank_candidates

        return rank_candidates(opened[0], opened[1:], asked, rules)

    run(ranking, options, [original, *candidates], to, show, 1 if options.against else 2)


def run(
    make: "Callable[[Opened, Asked], Ranking]",
    options: "Asked",
    paths: list[str],
    to: "list[Target]",
    show: Display,
    needs: int | None = None,
) -> None:
    """Make a ranking, write it, print it, and exit with its status."""
    from quanterr.cli.opening import open_run

    announce(paths, show.quiet)
    with Interrupt() as interrupt:
        with open_run(paths, options, interrupt, show.quiet, needs=needs) as opened:
            ranking = make(*opened)
        warn(finding for candidate in ranking.candidates for finding in candidate.findings)
        status = decide_status(ranking, show.allow_partial, interrupt)
        if any(candidate.unreadable for candidate in ranking.candidates):
            status = status if status > Status.INCONCLUSIVE else Status.UNREADABLE  # an interrupted run says so
        finish(ranking, to, show, status, options.baseline, suggest_after_rank(ranking, paths, command_line()))
