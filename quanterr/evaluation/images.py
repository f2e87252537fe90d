"""Comparison of the images of two folders in pairs, by PSNR, SSIM and, where it is installed, LPIPS."""

import base64
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from math import log10, sqrt
from pathlib import Path
from pickle import UnpicklingError  # raised for damaged weights
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from quanterr.documents.base import Tool
from quanterr.documents.gate_results import Reason, store_reasons
from quanterr.documents.images.model import (
    ImagePair,
    Images,
    Mean,
    NotCompared,
    WorstPair,
    find_copies,
    list_uncompared,
)
from quanterr.documents.images.values import MIN_PAIRS, VOCABULARY
from quanterr.documents.kinds import KINDS
from quanterr.documents.subjects import HALF_WIDTH
from quanterr.errors import CheckpointError, UsageError
from quanterr.gates import PreparedRules, prepare
from quanterr.options import ImageGateOptions
from quanterr.options.keywords import accept_fields_of
from quanterr.tensors.clock import Clock
from quanterr.util.text import display, escape_surrogates
from quanterr.version import __version__

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FORMATS = ("PNG", "JPEG", "WEBP")
LOSSLESS_MODES = ("RGB", "L", "P", "1")  # Pillow's modes of 8 bits or fewer that convert to RGB without loss
WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
BAND_ROWS = 16  # number of rows for which SSIM is computed at a time
MAX_PIXEL = 255.0
DEPTH_OFFSET = 24  # offset of the bit depth in a PNG
SHOWN_PAIRS, THUMBNAIL_PIXELS = 8, 256  # number of worst pairs that have pictures, and the longer side of a picture
ALEXNET = "alexnet-owt-7be5be79.pth"  # the file that torchvision's AlexNet_Weights.IMAGENET1K_V1 names
MIN_LPIPS_PIXELS = 32  # minimum side of an image that AlexNet's convolutions and poolings accept

Distance = Callable[[Tensor, Tensor], float]


class _Pixels(NamedTuple):
    values: Tensor  # uint8 of shape (height, width, 3)
    sha256: str


class Unreadable(Exception):
    """The reason why an image cannot be compared."""


class _Lpips(NamedTuple):
    """The function that measures LPIPS and its package, or the reason why there is none."""

    measure: Distance | None
    by: str | None
    absent: str | None


@accept_fields_of(ImageGateOptions)
def compare_images(
    original: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    **options: Any,
) -> Images:
    """Compare images of the same name (PNG, JPEG, WebP, 8 bits) in two folders, made from the same prompts and seeds.

    PSNR is 10 log10(255² / MSE) over all channels. SSIM is the mean over channels and over the pixels whose window
    lies within the image, with a Gaussian window of 11 x 11 and sigma 1.5, K1 0.01 and K2 0.03 (Wang, Bovik, Sheikh,
    Simoncelli: Image quality assessment, 2004). LPIPS (Zhang et al. 2018, version 0.1, AlexNet) needs lpips or
    torchmetrics, and its weights on this machine: nothing is downloaded.

    Rules are conditions such as ``min(ssim) >= 0.9``; a baseline is a stored result of the same original images.

    Raises:
        UsageError: Pillow is not installed, a folder holds no image, both are the same folder, or a rule is invalid,
            or the baseline has other images.
        CheckpointError: a folder is missing or cannot be read.
        ReportError: the baseline cannot be read.
    """
    return judge_images(original, quantized, prepare(ImageGateOptions(**options), KINDS["quanterr.images"]))


def judge_images(
    original: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    rules: PreparedRules,
    command: Iterable[str] = (),
) -> Images:
    """Compare two folders and judge the result by rules that were read before; see :func:`compare_images`."""
    clock = Clock()
    if find_spec("PIL") is None:
        raise UsageError('images are read by Pillow: pip install "quanterr[diffusion]"')
    folders = [Path(original), Path(quantized)]
    (left, other_left), (right, other_right) = map(_list_images, folders)
    if folders[0].samefile(folders[1]):
        raise UsageError(f"{display(str(folders[0]))}: both are the same folder; give the images of both models")
    lpips = _load_lpips()
    pairs, sources, lost, read_bytes = [], {}, [], 0
    for name in sorted(left.keys() | right.keys()):
        try:
            files = [_pick_file(result, name, folder) for result, folder in zip((left, right), folders, strict=True)]
            read_bytes += sum(file.stat().st_size for file in files)
            x, y = map(_read_image, files)
            pairs.append(_compare_pair(name, x, y, lpips.measure))
            sources[pairs[-1].name] = files
        except Unreadable as reason:
            lost.append(NotCompared(escape_surrogates(name), display(name), str(reason)))
    if small := next((pair for pair in pairs if pair.lpips is None and lpips.measure), None):
        absent = f"{small.display_name} is smaller than {MIN_LPIPS_PIXELS} x {MIN_LPIPS_PIXELS} pixels"
        lpips = _Lpips(None, None, absent)
        for pair in pairs:
            pair.lpips = None
    differ = sum(not pair.identical for pair in pairs)
    result = Images(
        tool=Tool(name="quanterr", version=__version__),
        verdict="pass",
        **store_reasons([Reason(VOCABULARY.done, "result")]),
        gated=False,
        original=escape_surrogates(str(original)),
        quantized=escape_surrogates(str(quantized)),
        psnr_db=_average([pair.psnr_db for pair in pairs if pair.psnr_db is not None], differ),
        ssim=_average([pair.ssim for pair in pairs], differ),
        lpips=_average([pair.lpips for pair in pairs if pair.lpips is not None], differ),
        lpips_by=lpips.by,
        lpips_absent=lpips.absent,
        gates=[],
        other_files=[escape_surrogates(name) for name in (*other_left, *other_right)],
        pairs=pairs,
        not_compared=lost,
        worst=[],
        run=clock.describe_run(command, "cpu", torch.get_num_threads(), read_bytes),
    )
    if reasons := [*list_uncompared(result), *find_copies(result)]:
        stored = store_reasons(Reason(text, "result") for text in reasons)
        result = replace(result, verdict="inconclusive", **stored)
    worst = [
        WorstPair(pair.name, *map(_draw, sources[pair.name]))
        for pair in result.worst_first[:SHOWN_PAIRS]
        if not pair.identical
    ]
    return rules.judge(replace(result, worst=worst))


def _list_images(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """Return the images of a folder by name without suffix, and the names of its other files and folders."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{display(str(folder))}: is a file; give a folder of images")
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{display(str(folder))}: {error.strerror}") from error
    images: dict[str, list[Path]] = {}
    others = []
    for entry in entries:
        if entry.suffix.lower() in SUFFIXES and not entry.is_dir():
            images.setdefault(entry.stem, []).append(entry)
        else:
            others.append(entry.name)
    if not images:
        raise UsageError(f"{display(str(folder))}: holds no image (PNG, JPEG, WebP)")
    return images, others


def _pick_file(images: Mapping[str, list[Path]], name: str, folder: Path) -> Path:
    files = images.get(name, [])
    if not files:
        raise Unreadable(f"no image of this name in {display(str(folder))}")
    if len(files) > 1:
        names = ", ".join(display(file.name) for file in files)
        raise Unreadable(f"several images of this name in {display(str(folder))}: {names}")
    if not files[0].is_file():
        raise Unreadable(f"{display(str(files[0]))}: is a broken link, or not a regular file")
    return files[0]


def _read_image(path: Path) -> _Pixels:
    """Return the pixels of an image.

    Raises:
        Unreadable: it is damaged, animated, transparent, or has more than 8 bits.
    """
    with _open(path) as image:
        stored, shape = bytearray(image.tobytes()), (image.height, image.width, 3)
    sha256 = hashlib.sha256(repr(shape).encode() + stored).hexdigest()
    return _Pixels(torch.frombuffer(stored, dtype=torch.uint8).view(shape), sha256)


def _open(path: Path) -> "Image.Image":
    """Return an image as RGB, rotated as its EXIF data say."""
    from PIL import Image, ImageOps

    where = display(str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with path.open("rb") as file:
                head = file.read(DEPTH_OFFSET + 1)
            with Image.open(path, formats=FORMATS) as image:
                if image.format == "PNG" and head[DEPTH_OFFSET] > 8:  # Pillow would drop the lower bits of colours
                    raise Unreadable(f"{where}: has more than 8 bits per channel")
                if getattr(image, "n_frames", 1) > 1:
                    raise Unreadable(f"{where}: is animated")
                image.load()
                upright = ImageOps.exif_transpose(image)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # decoders raise errors of many classes for damaged bytes
        raise Unreadable(f"{where}: cannot be read: {display(str(error))}") from error
    if upright.has_transparency_data:
        if upright.convert("RGBA").getchannel("A").getextrema()[0] != 255:
            raise Unreadable(f"{where}: is partly transparent")
    elif upright.mode not in LOSSLESS_MODES:
        raise Unreadable(f"{where}: has colours of mode {upright.mode}; save it as RGB with 8 bits per channel")
    return upright.convert("RGB")


def _compare_pair(name: str, original: _Pixels, quantized: _Pixels, measure: Distance | None) -> ImagePair:
    x, y = original.values, quantized.values
    if x.shape != y.shape:
        sizes = [f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in (x, y)]
        raise Unreadable(f"the original is {sizes[0]} pixels, the quantized {sizes[1]}")
    height, width = x.shape[:2]
    if min(height, width) < WINDOW:
        raise Unreadable(f"{width} x {height} pixels are smaller than the window of SSIM, {WINDOW} x {WINDOW}")
    a, b = (pixels.permute(2, 0, 1).double() for pixels in (x, y))
    error = float((a - b).square().mean())
    is_large = min(height, width) >= MIN_LPIPS_PIXELS
    return ImagePair(
        name=escape_surrogates(name),
        display_name=display(name),
        width=width,
        height=height,
        identical=not error,
        psnr_db=10 * log10(MAX_PIXEL**2 / error) if error else None,
        ssim=measure_ssim(a, b) if error else 1.0,
        lpips=measure(a, b) if measure and is_large else None,
        original_sha256=original.sha256,
    )


def measure_ssim(x: Tensor, y: Tensor) -> float:
    """Return the mean SSIM of two images, float64 of shape (channels, height, width) from 0 to 255.

    The formula, window and constants follow Wang et al. 2004; only windows within the image count. torchmetrics also
    counts windows beyond the border, and needs gigabytes for an image of 1024 x 1024.
    """
    at = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-at.square() / (2 * SIGMA**2))
    window: list[float] = (weights / weights.sum()).tolist()
    c1, c2 = (K1 * MAX_PIXEL) ** 2, (K2 * MAX_PIXEL) ** 2
    height, width = x.shape[1] - WINDOW + 1, x.shape[2] - WINDOW + 1
    total = 0.0
    for start in range(0, height, BAND_ROWS):  # bands of rows stay in the processor's cache
        a, b = (image[:, start : min(start + BAND_ROWS, height) + WINDOW - 1] for image in (x, y))
        ma, mb = _smooth(a, window), _smooth(b, window)
        product, squares = ma * mb, ma * ma + mb * mb
        variances = _smooth(a * a + b * b, window) - squares
        covariance = _smooth(a * b, window) - product
        total += float(((2 * product + c1) * (2 * covariance + c2) / ((squares + c1) * (variances + c2))).sum())
    return total / (x.shape[0] * height * width)


def _smooth(image: Tensor, window: list[float]) -> Tensor:
    """Return the weighted sums over all windows within an image; torch's convolution is slow in float64."""
    for dim in (1, 2):
        n = image.shape[dim] - len(window) + 1
        sums = image.narrow(dim, 0, n) * window[0]
        for k, weight in enumerate(window[1:], 1):
            sums.add_(image.narrow(dim, k, n), alpha=weight)
        image = sums
    return image


def _load_lpips() -> _Lpips:
    """Load LPIPS from lpips or torchmetrics, unless that would download AlexNet's weights."""
    package = next((name for name in ("lpips", "torchmetrics") if find_spec(name)), None)
    if package is None:
        return _Lpips(None, None, "neither lpips nor torchmetrics is installed")
    if not Path(torch.hub.get_dir(), "checkpoints", ALEXNET).is_file():
        return _Lpips(None, None, f"{ALEXNET} is not in the checkpoints of torch's hub folder; nothing is downloaded")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision warns about an argument that these packages still use
            if package == "lpips":
                network = import_module("lpips").LPIPS(net="alex", verbose=False)
            else:
                network = import_module("torchmetrics.image.lpip").LearnedPerceptualImagePatchSimilarity("alex")
    except (ImportError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        return _Lpips(None, None, f"{package} cannot load it: {display(str(error))}")
    network.eval()

    @torch.no_grad()
    def measure(x: Tensor, y: Tensor) -> float:
        a, b = (image.float()[None] / (MAX_PIXEL / 2) - 1 for image in (x, y))
        return float(network(a, b))

    return _Lpips(measure, f"{package} {version(package)}", None)


def _average(values: list[float], differ: int) -> Mean | None:
    """Return the mean over pairs, with an interval if enough pairs differ."""
    if not values:
        return None
    mean = fmean(values)
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    if error is None or differ < MIN_PAIRS:
        return Mean(mean, error, None, None, len(values))
    return Mean(mean, error, mean - HALF_WIDTH * error, mean + HALF_WIDTH * error, len(values))


def _draw(path: Path) -> str:
    """Return a small JPEG of an image as a data: URI."""
    with _open(path) as image:
        image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
