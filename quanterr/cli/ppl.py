"""``quanterr ppl``: perplexity from the log-probabilities of a server."""

from typing import Annotated

from quanterr.cli.display import Display, guard_stdout
from quanterr.cli.options import Only, argument, with_options
from quanterr.options import Option
from quanterr.util import strict_json
from quanterr.util.text import count, display


@with_options
def ppl(
    logprobs: Annotated[str, argument("LOGPROBS", "A JSONL file of log-probabilities.")],
    show: Annotated[Display, Only(("as_json",))],
    baseline: Annotated[
        str | None, Option("Log-probabilities of the original on the same tokens.", metavar="FILE")
    ] = None,
) -> None:
    """Compute perplexity and its standard error from the log-probabilities of a server.

    \b
    [bold]quanterr ppl quantized.jsonl --baseline original.jsonl[/bold]

    Each line is the JSON of one chunk or request: a list of natural logarithms, {"logprobs": [...]}, or the response of
    an OpenAI-compatible server with logprobs.
    """
    from quanterr.documents.evaluation.logprobs import compute_perplexity, compute_ratio, read_logprobs

    lines = read_logprobs(logprobs)
    perplexity = compute_perplexity(logprobs, lines)
    fields = {"schema": "quanterr.ppl", **perplexity._asdict()}
    tokens = count(perplexity.tokens, "token")
    texts = [f"{display(logprobs)}: PPL {perplexity.ppl:.5g} ± {perplexity.ppl_se:.2g} over {tokens}"]
    if baseline is not None:
        others = read_logprobs(baseline)
        base, change = compute_perplexity(baseline, others), compute_ratio(lines, others)
        fields |= {"baseline": base._asdict(), **change._asdict()}
        texts.append(f"{display(baseline)}: PPL {base.ppl:.5g} ± {base.ppl_se:.2g}")
        texts.append(f"ratio {change.ratio:.5g}; ln ratio {change.ln_ratio:.4g} ± {change.ln_ratio_se:.2g}")
    with guard_stdout():
        print(strict_json.dumps(fields) if show.as_json else "\n".join(texts), flush=True)
