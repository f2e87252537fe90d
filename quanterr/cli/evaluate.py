"""``quanterr evaluate``: measure how well the quantized model still performs."""

import sys
from os import PathLike, fspath
from typing import Annotated

from quanterr.cli.display import RESULT_OPTIONS, Display
from quanterr.cli.interrupt import Interrupt
from quanterr.cli.notices import announce
from quanterr.cli.options import Only, argument, with_options
from quanterr.cli.verdicts import finish
from quanterr.errors import UsageError
from quanterr.options import EvaluateOptions, RankOptions
from quanterr.util.text import display, named_path


@with_options
def evaluate(
    original: Annotated[str, argument("ORIGINAL", "The model's folder, local or in a remote store.")],
    recipes: Annotated[RankOptions, Only(("against",))],
    options: EvaluateOptions,
    show: Annotated[Display, RESULT_OPTIONS],
    candidates: Annotated[
        list[str] | None,
        argument(
            "QUANTIZED ...",
            "Quantized checkpoints. Optional with --sensitivity-out, --save-reference and other files to write.",
        ),
    ] = None,
) -> None:
    """Run the original's model with the weights of each side on a text: perplexity, divergence, agreement.

    \b
    [bold]quanterr evaluate original/ quantized/ --text wiki.test.raw[/bold]
    [bold]quanterr evaluate original/ a/ b.gguf --text wiki.test.raw --chunks 20 -o eval.html[/bold]
    [bold]quanterr evaluate bf16.gguf q4_k_m.gguf --text wiki.test.raw[/bold]
    [bold]quanterr evaluate original/ --against fp8_row,nvfp4,int4_g128 --text wiki.test.raw[/bold]
    [bold]quanterr evaluate original/ a/ --text prose=a.txt --text code=b.txt --chat conversations.jsonl[/bold]
    [bold]quanterr evaluate original/ --text calibration.txt --sensitivity-out s.json[/bold]
    [bold]quanterr evaluate original/ --text wiki.test.raw --save-reference reference/[/bold]
    [bold]quanterr evaluate a.gguf --reference reference/ --text wiki.test.raw[/bold]
    [bold]quanterr evaluate original/ quantized/ --draft small/ --text wiki.test.raw[/bold]
    [bold]quanterr evaluate original/ --kv q8_0 --kv k=q8_0,v=q4_0 --text wiki.test.raw[/bold]
    [bold]quanterr evaluate original/ quantized/ --tokens ids.safetensors --require 'upper(kld_mean) <= 0.01'[/bold]

    ORIGINAL is a folder with config.json, local or in a remote store (hf://org/name), or a GGUF file alone. Any format
    that compare reads runs through the original's model in transformers, with one block of each side in memory. Needs
    pip install "quanterr\\[evaluate]"; no model code is downloaded or run.

    Exit status: 0 all gates hold; 1 a gate does not hold; 2 wrong usage; 3 an input is unreadable; 4 a candidate lacks
    tensors, or has values that are not finite; 5 memory or disk; 70 a bug.
    """
    from quanterr.cli.opening import open_run
    from quanterr.cli.progress import Steps
    from quanterr.documents.gate_results import exit_status
    from quanterr.documents.kinds import KINDS
    from quanterr.gates import prepare
    from quanterr.outputs import CANDIDATE_OUTPUTS
    from quanterr.outputs.files import check_place

    paths, drafts = [original, *(candidates or [])], [fspath(draft) for draft in options.draft]
    texts = [named_path(fspath(text))[1] for text in (*options.text, *options.chat)]
    inputs = [*paths, *drafts, *texts, options.tokens, options.inputs, *options.tasks, options.baseline]
    to = show.targets(inputs, CANDIDATE_OUTPUTS)
    rules = prepare(options, KINDS["quanterr.evaluation"])
    by_products = {
        "--sensitivity-out": options.sensitivity,
        "--importance-out": options.importance_out,
        "--saliency-out": options.saliency_out,
    }
    written = {option: fspath(path) for option, path in by_products.items() if path is not None}
    for option, path in written.items():
        check_place(path, option, [fspath(path) for path in inputs if isinstance(path, str | PathLike)])
    if options.save_reference is not None:
        written["--save-reference"] = fspath(options.save_reference)
    announce(paths, show.quiet)
    keeps = any(kv not in ("none", "declared") for kv in options.kv)  # True: the original itself is a candidate
    alone = not (candidates or recipes.against or options.draft or keeps or options.reference)
    if alone:
        options.check_alone()
        if to:
            raise UsageError("-o: the original alone makes no report; give a candidate")
    with Interrupt(keeps=False) as interrupt:
        with open_run(paths, options, interrupt, show.quiet, Steps) as (checkpoints, asked):
            from quanterr.evaluation.beside_original import measure_alone
            from quanterr.evaluation.run import evaluate_candidates

            if alone:
                measure_alone(checkpoints[0], asked)
                print(f"quanterr: wrote {', '.join(map(display, written.values()))}", file=sys.stderr)
                return
            evaluation = evaluate_candidates(checkpoints[0], checkpoints[1:], recipes.against, asked, rules)
        status = exit_status(evaluation, show.allow_partial)
        finish(evaluation, to, show, status, options.baseline)
