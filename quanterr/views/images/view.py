"""The view of a comparison of images: means, the worst pairs as pictures, and images that were not compared."""

from collections.abc import Iterator, Sequence

from quanterr.documents.gate_results import list_reasons
from quanterr.documents.images.model import SCORES, ImagePair, Images, Mean
from quanterr.documents.images.values import MIN_PAIRS
from quanterr.metrics.scores import Score
from quanterr.outputs.formatting import format_db, format_in_units, format_number, sentence
from quanterr.outputs.sections import (
    PAGE,
    Case,
    CellColumn,
    Column,
    Gates,
    Lines,
    Name,
    Picture,
    Pictures,
    Section,
    Suite,
    Table,
    View,
    fill,
)
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, itemize
from quanterr.views.diff.candidates.items import ItemWords
from quanterr.views.parts import make_view

MEAN_COLUMNS = (Column("mean", 0), Column("95 % interval", 1), Column("pairs", 2))
PAIR_COLUMNS: Sequence[CellColumn[ImagePair]] = (
    (Column("SSIM", 0), lambda pair: format_number(pair.ssim)),
    (Column("PSNR dB", 1), lambda pair: "identical" if pair.identical else format_db(pair.psnr_db)),
    (Column("LPIPS", 2), lambda pair: "-" if pair.lpips is None else format_number(pair.lpips)),
    (Column("size", 3), lambda pair: f"{pair.width} x {pair.height}"),
)
MAX_SUMMARIZED = 3  # pairs in the summary
REASON_COLUMNS = (Column("reason", 0, right=False),)
CSV_COLUMNS = (
    *("quanterr_verdict", "list", "name", "width", "height", "identical", "psnr_db", "ssim", "lpips"),
    *("psnr_db_se", "ssim_se", "lpips_se", "reason"),
)
CSV_PAIR = ("name", "width", "height", "identical", *SCORES)
ABOUT = (
    "± is a standard error over pairs. The mean PSNR leaves out identical pairs, whose PSNR is infinite. Images of "
    "one seed can differ much and still be as good: read PSNR, SSIM and LPIPS as distance, not as quality."
)


def view(images: Images, top: int) -> View:
    """Return the view of a comparison of images, with ``top`` of the worst pairs."""
    facts = [("original", [Name(images.original)]), ("quantized", [Name(images.quantized)])]
    answer, sections = conclusion(images), _make_sections(images, top)
    notes = [line for part in _list_notes(images) for line in part.lines]
    worst = [f"worst: {display(pair.name)}: {_describe(pair)}" for pair in images.worst_first[:MAX_SUMMARIZED]]
    return make_view(
        images,
        "Images",
        answer,
        facts,
        sections,
        ABOUT,
        None,
        list_reasons(images),
        "compared",
        summary=[*notes, *worst],
    )


def conclusion(images: Images) -> str:
    """Return the number of compared pairs, and the means."""
    shown = [f"{score.title} {format_in_units(score, mean.mean, mean.se, 4)}" for _, score, mean in _list_means(images)]
    same = f"{images.identical:,} identical" if images.identical else ""
    lost = f"{len(images.not_compared):,} not compared" if images.not_compared else ""
    return ", ".join(filter(None, [count(len(images.pairs), "pair"), same, lost, *shown]))


def _list_means(images: Images) -> Iterator[tuple[str, Score, Mean]]:
    for name, score in SCORES.items():
        mean: Mean | None = getattr(images, name)
        if mean is not None:
            yield name, score, mean


def _make_sections(images: Images, top: int) -> Iterator[Section]:
    means = []
    for _, score, mean in _list_means(images):
        interval = "-" if mean.low is None or mean.high is None else f"{mean.low:.4g} to {mean.high:.4g}"
        means.append([score.title, format_in_units(score, mean.mean, mean.se), interval, f"{mean.pairs:,}"])
    yield Section(
        "scores", "Means over pairs", [Table("Means over pairs", "metric", MEAN_COLUMNS, means), *_list_notes(images)]
    )
    if images.gates:
        yield Section("gates", "Gates", [Gates([("", gate) for gate in images.gates])])
    if images.not_compared:
        lost = [[Name(image.name), Name(image.reason)] for image in images.not_compared]
        title = f"{count(len(lost), 'image')} not compared"
        yield Section("not-compared", title, [Table(title, "image", REASON_COLUMNS, lost)], is_problem=True)
    if images.worst:
        shown = {pair.name: pair for pair in images.pairs}
        pictures = [
            Picture(Name(image.name), _describe(shown[image.name]), image.original, image.quantized)
            for image in images.worst
            if image.name in shown
        ]
        yield Section("pictures", "Worst pairs: original, quantized", [Pictures(pictures)], (PAGE,))
    worst = images.worst_first[:top]
    if worst:
        title, more = "Worst pairs by SSIM", len(images.pairs) - len(worst)
        rows = [(Name(pair.name), pair) for pair in worst]
        yield Section("worst", title, [Table(title, "image", *fill(PAIR_COLUMNS, rows), more)])


def _list_notes(images: Images) -> Iterator[Lines]:
    lines = []
    if images.identical:
        lines.append(f"{count(images.identical, 'pair')} identical: the PSNR is infinite, and left out of its mean")
    if images.lpips is None and images.lpips_absent:
        lines.append(f"no LPIPS: {sentence(images.lpips_absent)}")
    if len(images.pairs) - images.identical < MIN_PAIRS:
        lines.append(f"no 95 % interval from fewer than {MIN_PAIRS} pairs that differ")
    if images.other_files:
        lines.append(f"neither PNG, JPEG nor WebP, not read: {itemize(images.other_files, 3)}")
    if lines:
        yield Lines(lines)


def _describe(pair: ImagePair) -> str:
    level = "" if pair.psnr_db is None else f", PSNR {format_db(pair.psnr_db, ' dB')}"
    return f"SSIM {format_number(pair.ssim)}{level}"


def rows(images: Images) -> Iterator[JsonObject]:
    """Yield the rows of CSV: the means, then each pair, then images that were not compared."""
    means = {name: mean.mean for name, _, mean in _list_means(images)}
    errors = {f"{name}_se": mean.se for name, _, mean in _list_means(images)}
    yield {"list": "images", **means, **errors, "reason": "; ".join(images.reasons)}
    for pair in images.pairs:
        yield {"list": "pairs"} | {name: getattr(pair, name) for name in CSV_PAIR}
    for image in images.not_compared:
        yield {"list": "not_compared", "name": image.name, "reason": image.reason}


def suites(images: Images) -> list[Suite]:
    """Return one JUnit suite, with a test that every image was compared, and a test for each gate."""
    problem, message, text = "", "", "\n".join(map(sentence, images.reasons))
    if images.verdict == "inconclusive":
        problem, message = "error", f"inconclusive: {sentence(images.reasons[0])}"
    case = Case("images", "every image was compared", problem, message, text, conclusion(images))
    return [Suite("images", [case], images.gates)]


ITEM_WORDS = ItemWords(
    "further from the original",
    "nearer to it",
    columns=(
        (Column("old SSIM", 1), lambda pair: f"{pair.old_ssim:.4g}"),
        (Column("new SSIM", 2), lambda pair: f"{pair.new_ssim:.4g}"),
        (Column("change", 0), lambda pair: f"{pair.change:+.3g}"),
    ),
    ends=lambda pair: (pair.old_ssim, pair.new_ssim, pair.change),
    about="From two stored results. ± is a standard error computed as if the two had compared different images.",
)
