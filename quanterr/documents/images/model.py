"""The comparison of two folders of images in pairs: data with a schema version."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from quanterr.documents.base import Model, RunInfo
from quanterr.documents.document import Document
from quanterr.documents.gate_results import Gate, Givers, Word
from quanterr.metrics.scores import Number, collect_scores, doc, score

PICTURE = r"^data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}$"

Picture = Annotated[str, Meta(pattern=PICTURE, description="data: URI of a JPEG")]


class ImagePair(Model):
    """Two images of the same name, without suffix, in both folders."""

    name: str
    display_name: Annotated[str, doc("name with unprintable characters escaped")]
    width: int
    height: int
    identical: Annotated[bool, doc("true: every pixel is equal, so the PSNR is infinite")]
    psnr_db: Annotated[Number, doc("peak signal-to-noise ratio [dB]; null: infinite, as identical")]
    ssim: Annotated[float, doc("structural similarity, mean over pixels and channels")]
    lpips: Annotated[Number, doc("perceptual distance; null: not measured, see `lpips_absent`")]
    original_sha256: Annotated[str, doc("SHA-256 of the original's pixels; identifies it")]


class NotCompared(Model):
    """An image that was not compared."""

    name: str
    display_name: str
    reason: str


class Mean(Model):
    """The mean of a metric over pairs."""

    mean: float
    se: Annotated[Number, doc("standard error over pairs; null: a single pair")]
    low: Annotated[Number, doc("lower end of the 95 % interval; null: fewer than eight pairs that differ")]
    high: Annotated[Number, doc("upper end of the 95 % interval; null: fewer than eight pairs that differ")]
    pairs: int


class WorstPair(Model):
    """Small pictures of one of the worst pairs."""

    name: str
    original: Picture
    quantized: Picture


class Images(Document, kw_only=True):
    """Images that the original model and the quantized one made, compared in pairs."""

    ITEMS: ClassVar[Mapping[str, str]] = {"pairs": "pair", "not_compared": "not_compared"}

    schema_: str = "quanterr.images"
    schema_version: str = "1.0"
    verdict: Word
    reasons: list[str]
    reasons_by: Givers = None
    gated: Annotated[bool, doc("true if gates were set; without gates, pass means compared, not approved")]
    original: Annotated[str, doc("path of the folder with the original model's images")]
    quantized: Annotated[str, doc("path of the folder with the quantized model's images")]
    psnr_db: Annotated[
        Mean | None, score("PSNR", "higher", "PSNR [dB] over the pairs that differ; null: none does", "dB")
    ]
    ssim: Annotated[Mean | None, score("SSIM", "higher", "SSIM over all pairs; null: no pair was compared")]
    lpips: Annotated[Mean | None, score("LPIPS", "lower", "LPIPS over all pairs; null: see `lpips_absent`")]
    lpips_by: Annotated[str | None, doc("package and version that computed LPIPS; null: see `lpips_absent`")]
    lpips_absent: Annotated[str | None, doc("why LPIPS was not measured; null: it was")]
    gates: list[Gate]
    other_files: Annotated[list[str], doc("files and folders other than PNG, JPEG and WebP")]
    pairs: Annotated[list[ImagePair], doc("by name")]
    not_compared: list[NotCompared]
    worst: Annotated[list[WorstPair], doc("the pairs of lowest SSIM, the worst first")]
    run: RunInfo

    @property
    def identical(self) -> int:
        """The number of pairs that are equal in every pixel."""
        return sum(pair.identical for pair in self.pairs)

    @property
    def worst_first(self) -> list[ImagePair]:
        """The pairs by SSIM, then PSNR, the lowest first; identical pairs come last."""
        return sorted(self.pairs, key=lambda pair: (pair.identical, pair.ssim, pair.psnr_db or 0.0))


SCORES = collect_scores(Images)


def list_uncompared(images: Images) -> list[str]:
    """Return why the verdict on images can only be inconclusive, apart from what :func:`find_copies` returns."""
    nothing = [] if images.pairs else ["no pair of images was compared"]
    return [*nothing, *(f"{pair.display_name}: not compared: {pair.reason}" for pair in images.not_compared)]


def find_copies(images: Images) -> list[str]:
    """Return a reason if all pairs are identical, as if nothing was quantized or one folder is a copy."""
    if not images.pairs or images.identical < len(images.pairs):
        return []
    return ["every pair is identical: one folder is a copy of the other, or the model was not quantized"]


def find_difference(old: Images, new: Images) -> str | None:
    """Return why two results are not comparable, such as different original images of one name; None if they are."""
    known = {pair.name: pair.original_sha256 for pair in old.pairs}
    for pair in new.pairs:
        if known.get(pair.name, pair.original_sha256) != pair.original_sha256:
            return f"it has other original images: {pair.display_name} differs"
    return None
