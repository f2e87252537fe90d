"""``quanterr images``: compare two folders of decoded images in pairs."""

from typing import Annotated

from quanterr.cli.display import RESULT_OPTIONS, Display
from quanterr.cli.options import argument, with_options
from quanterr.cli.process import command_line
from quanterr.cli.verdicts import finish
from quanterr.options import ImageGateOptions
from quanterr.util.memory import require_memory_for_torch


@with_options
def images(
    original: Annotated[str, argument("ORIGINAL", "The folder of the original model's images.")],
    quantized: Annotated[str, argument("QUANTIZED", "The folder of the quantized model's images.")],
    gates: ImageGateOptions,
    show: Annotated[Display, RESULT_OPTIONS],
) -> None:
    """Compare the images of two models in pairs of the same name: PSNR, SSIM, and LPIPS where installed.

    \b
    [bold]quanterr images original/ fp8/ -o images.html[/bold]
    [bold]quanterr images original/ fp8/ --require 'min(ssim) >= 0.9' --require 'lower(psnr_db) >= 25'[/bold]
    [bold]quanterr images original/ fp8/ --baseline last-release.json[/bold]

    PNG, JPEG and WebP, made with the same prompts, seeds and settings; the suffix may differ. LPIPS needs lpips or
    torchmetrics, and its weights on this machine: nothing is downloaded. Needs pip install "quanterr\\[diffusion]".

    Exit status: 0 all gates hold; 1 a gate does not hold; 2 wrong usage, or a folder without images; 3 a folder is
    unreadable; 4 an image was not compared (missing on one side, damaged, of another size), or all pairs are identical.
    """
    from quanterr.documents.gate_results import exit_status
    from quanterr.documents.kinds import KINDS
    from quanterr.gates import prepare

    to = show.targets([original, quantized, gates.baseline])
    rules = prepare(gates, KINDS["quanterr.images"])
    require_memory_for_torch()
    from quanterr.evaluation.images import judge_images

    document = judge_images(original, quantized, rules, command_line())
    status = exit_status(document, show.allow_partial)
    finish(document, to, show, status, gates.baseline)
