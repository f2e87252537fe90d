"""Image pairs: PSNR by plain numpy, SSIM as scikit-image computes it, and images that are not compared."""

import io
import json
import re

import jsonschema
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from support import sample_documents
from support.hostile_names import SHORT_NAMES
from support.markup_checks import check_csv, check_json, check_junit, check_lines, check_markdown, check_text
from typer.testing import CliRunner

import quanterr
from quanterr.cli import app
from quanterr.errors import CheckpointError, Status, UsageError
from quanterr.outputs import OUTPUTS
from quanterr.outputs.terminal import make_console, show

# scikit-image 0.26.0: structural_similarity(x / 255, y / 255, gaussian_weights=True, sigma=1.5,
# use_sample_covariance=False, data_range=1.0, channel_axis=2) of make_pair(noise, seed), by noise and seed.
SSIM = {(1, 0): 0.9989887917430776, (8, 1): 0.9663448161616442, (60, 2): 0.4102712620140146}
FLOAT64 = 1e-9


def make_pair(noise, seed):
    """Return two images of 29 x 37 pixels that differ by uniform noise of at most this many steps."""
    random = np.random.default_rng(seed)
    x = np.clip(np.cumsum(random.integers(-9, 10, (29, 37, 3)), axis=1) + 128, 0, 255)
    y = np.clip(x + random.integers(-noise, noise + 1, x.shape), 0, 255)
    return x.astype(np.uint8), y.astype(np.uint8)


def save(path, pixels, **options):
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def measure_psnr(x, y):
    return 10 * np.log10(255**2 / np.mean((x.astype(float) - y) ** 2))


@pytest.fixture
def folders(tmp_path):
    """Nine pairs with growing noise."""
    for n in range(9):
        x, y = make_pair(n + 1, n)
        save(tmp_path / "a" / f"{n}.png", x)
        save(tmp_path / "b" / f"{n}.png", y)
    return tmp_path / "a", tmp_path / "b"


def run(*arguments):
    return CliRunner().invoke(app, ["images", *map(str, arguments)])


class TestMetrics:
    @pytest.mark.parametrize(("noise", "seed"), SSIM)
    def test_metrics_equal_numpy_and_scikit_image(self, tmp_path, noise, seed):
        x, y = make_pair(noise, seed)
        save(tmp_path / "a/1.png", x)
        save(tmp_path / "b/1.png", y)
        (pair,) = quanterr.compare_images(tmp_path / "a", tmp_path / "b").pairs

        assert pytest.approx(measure_psnr(x, y), abs=FLOAT64) == pair.psnr_db
        assert pytest.approx(SSIM[noise, seed], abs=FLOAT64) == pair.ssim
        assert (37, 29, False) == (pair.width, pair.height, pair.identical)

    def test_metrics_have_means_with_standard_errors_and_intervals_over_pairs(self, folders):
        images = quanterr.compare_images(*folders)
        levels = [measure_psnr(*make_pair(n + 1, n)) for n in range(9)]
        error = np.std(levels, ddof=1) / 3

        assert pytest.approx(np.mean(levels), abs=FLOAT64) == images.psnr_db.mean
        assert pytest.approx(error, abs=FLOAT64) == images.psnr_db.se
        assert pytest.approx(np.mean(levels) - 1.96 * error, abs=FLOAT64) == images.psnr_db.low
        assert pytest.approx(np.mean(levels) + 1.96 * error, abs=FLOAT64) == images.psnr_db.high
        assert pytest.approx(np.mean([pair.ssim for pair in images.pairs]), abs=FLOAT64) == images.ssim.mean
        assert ("pass", False) == (images.verdict, images.gated)

    def test_fewer_than_eight_pairs_have_no_interval(self, folders):
        for n in range(2):
            for folder in folders:
                (folder / f"{n}.png").unlink()
        images = quanterr.compare_images(*folders, require="lower(ssim) >= 0.1")

        assert (7, None, None) == (images.ssim.pairs, images.ssim.low, images.ssim.high)
        assert "pass" != images.verdict
        assert any("at least 8 pairs" in reason for reason in images.reasons)

    def test_grey_image_equals_its_colours_in_any_lossless_format(self, folders):
        x, _ = make_pair(1, 0)
        grey = x[..., 0].copy()
        save(folders[0] / "g.png", grey)
        save(folders[1] / "g.webp", np.stack([grey] * 3, 2), lossless=True)
        pair = next(pair for pair in quanterr.compare_images(*folders).pairs if pair.name == "g")

        assert (True, 1.0, None) == (pair.identical, pair.ssim, pair.psnr_db)

    def test_missing_lpips_gives_its_reason_and_fails_rules(self, folders, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))  # without weights, even if it is installed
        images = quanterr.compare_images(*folders, require=["lpips <= 1", "max(lpips) <= 1"])

        assert images.lpips is None
        assert re.search("installed|downloaded", images.lpips_absent)
        assert ["fail", "fail"] == [gate.status for gate in images.gates]


class TestNotCompared:
    """An image that is not compared is named with the reason, and the verdict is never a pass."""

    def check(self, folders, reason, name="x"):
        images = quanterr.compare_images(*folders, require="min(ssim) >= 0")
        (lost,) = images.not_compared

        assert (name, "inconclusive", 9) == (lost.name, images.verdict, len(images.pairs))
        assert reason in lost.reason
        assert any(lost.reason in text for text in images.reasons)

    @pytest.mark.parametrize("side", [0, 1])
    def test_image_without_a_counterpart_is_not_compared(self, folders, side):
        save(folders[side] / "x.png", make_pair(1, 0)[0])

        self.check(folders, f"no image of this name in {folders[1 - side]}")

    @pytest.mark.parametrize(
        ("pixels", "reason"),
        [
            (np.zeros((29, 38, 3), np.uint8), "the original is 37 x 29 pixels, the quantized 38 x 29"),
            (np.zeros((29, 37), np.uint16), "more than 8 bits"),
            (np.full((29, 37, 4), 200, np.uint8), "partly transparent"),
        ],
    )
    def test_image_with_another_size_or_mode_is_not_compared(self, folders, pixels, reason):
        save(folders[0] / "x.png", make_pair(1, 0)[0])
        save(folders[1] / "x.png", pixels)

        self.check(folders, reason)

    @pytest.mark.parametrize("damage", [lambda data: data[:200], lambda data: b"GIF89a", lambda data: b""])
    def test_damaged_image_is_not_compared(self, folders, damage):
        x, y = make_pair(8, 1)
        save(folders[0] / "x.png", x)
        save(folders[1] / "x.png", y)
        (folders[1] / "x.png").write_bytes(damage((folders[1] / "x.png").read_bytes()))

        self.check(folders, "cannot be read")

    def test_cmyk_and_animated_images_are_not_compared(self, folders):
        x, y = make_pair(8, 1)
        save(folders[0] / "x.png", x)
        Image.fromarray(y).convert("CMYK").save(folders[1] / "x.jpg")
        self.check(folders, "mode CMYK")
        (folders[1] / "x.jpg").unlink()
        Image.fromarray(y).save(folders[1] / "x.png", save_all=True, append_images=[Image.fromarray(x)])
        self.check(folders, "animated")

    def test_broken_link_is_not_compared(self, folders):
        save(folders[0] / "x.png", make_pair(1, 0)[0])
        (folders[1] / "x.png").symlink_to("nowhere.png")

        self.check(folders, "broken link")

    def test_two_images_with_the_same_name_are_not_compared(self, folders):
        save(folders[0] / "x.png", make_pair(1, 0)[0])
        save(folders[0] / "x.jpg", make_pair(1, 0)[0])
        save(folders[1] / "x.png", make_pair(1, 0)[0])

        self.check(folders, "several images of this name")

    def test_image_smaller_than_the_window_is_not_compared(self, folders):
        for folder in folders:
            save(folder / "x.png", np.zeros((10, 40, 3), np.uint8))

        self.check(folders, "smaller than the window of SSIM")

    def test_other_files_are_listed(self, folders):
        (folders[1] / "prompts.txt").write_text("a cat")
        images = quanterr.compare_images(*folders)

        assert (["prompts.txt"], "pass") == (images.other_files, images.verdict)
        assert "not read: prompts.txt" in run(*folders).stdout

    def test_folders_without_any_pair_are_inconclusive(self, tmp_path):
        save(tmp_path / "a/1.png", make_pair(1, 0)[0])
        save(tmp_path / "b/2.png", make_pair(1, 0)[0])
        images = quanterr.compare_images(tmp_path / "a", tmp_path / "b", require="min(ssim) >= 0")

        assert ("inconclusive", None, [], 2) == (images.verdict, images.ssim, images.pairs, len(images.not_compared))


class TestIdentical:
    def test_identical_pair_satisfies_rules_and_is_left_out_of_the_mean_psnr(self, folders):
        (folders[1] / "0.png").write_bytes((folders[0] / "0.png").read_bytes())
        level = np.mean([measure_psnr(*make_pair(n + 1, n)) for n in range(1, 9)])
        for rule in ("psnr_db", "mean(psnr_db)"):
            verdicts = [
                quanterr.compare_images(*folders, require=f"{rule} >= {level + by}").verdict for by in (-1e-6, 1e-6)
            ]
            assert ["pass", "fail"] == verdicts, rule
        images = quanterr.compare_images(*folders, require="min(psnr_db) >= 1")

        assert ("pass", 8, 9) == (images.verdict, images.psnr_db.pairs, images.ssim.pairs)
        assert "1 identical" in images.brief()

    def test_identical_pairs_alone_are_inconclusive_and_one_folder_is_refused(self, folders):
        for n in range(9):
            (folders[1] / f"{n}.png").write_bytes((folders[0] / f"{n}.png").read_bytes())
        images = quanterr.compare_images(*folders, require="min(ssim) >= 0.5")

        assert "inconclusive" == images.verdict
        assert images.psnr_db is None
        assert any("every pair is identical" in reason for reason in images.reasons)
        with pytest.raises(UsageError, match="the same folder"):
            quanterr.compare_images(folders[0], folders[0])


class TestCommand:
    @pytest.mark.parametrize(("rule", "status"), [("min(ssim) >= 0.1", 0), ("min(ssim) >= 0.9999", 1)])
    def test_command_exits_with_the_gate_status(self, folders, rule, status):
        assert status == run(*folders, "-q", "--require", rule).exit_code

    def test_lost_image_is_inconclusive(self, folders):
        (folders[1] / "0.png").unlink()

        assert Status.INCONCLUSIVE == run(*folders, "-q").exit_code
        assert Status.OK == run(*folders, "-q", "--allow-partial").exit_code

    def test_wrong_rules_empty_folders_and_missing_folders_are_refused(self, folders, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(UsageError, match="no metric of a pair named snr"):
            quanterr.compare_images(*folders, require="snr >= 1")
        with pytest.raises(UsageError, match="holds no image"):
            quanterr.compare_images(folders[0], tmp_path / "empty")
        with pytest.raises(UsageError, match="give a folder"):
            quanterr.compare_images(folders[0] / "0.png", folders[1])
        with pytest.raises(CheckpointError, match="No such file"):
            quanterr.compare_images(folders[0], tmp_path / "missing")


class TestBaseline:
    @pytest.fixture
    def old(self, folders, tmp_path):
        quanterr.compare_images(*folders).save(tmp_path / "old.json")
        return tmp_path / "old.json"

    def test_baseline_compares_means_over_the_same_originals(self, folders, old):
        assert Status.OK == run(*folders, "-q", "--baseline", old).exit_code
        before = quanterr.read_document(str(old)).ssim.mean
        save(folders[1] / "8.png", make_pair(60, 8)[1])
        change = quanterr.compare_images(*folders).ssim.mean - before
        statuses = [
            run(*folders, "-q", "--baseline", old, "--require", f"delta(ssim) >= {change + by}").exit_code
            for by in (-FLOAT64, FLOAT64)
        ]

        assert change < -0.01
        assert [Status.OK, Status.GATE_FAILED] == statuses
        assert Status.GATE_FAILED == run(*folders, "-q", "--baseline", old).exit_code
        assert "fail" == quanterr.compare_images(*folders, baseline=old).verdict

    def test_baseline_with_other_images_is_refused(self, folders, old):
        for folder in folders:
            (folder / "8.png").unlink()

        with pytest.raises(UsageError, match="baseline: only one of both compares 8: means over other images"):
            quanterr.compare_images(*folders, baseline=old)

    def test_baseline_with_another_original_is_refused(self, folders, old):
        save(folders[0] / "8.png", make_pair(9, 9)[0])
        with pytest.raises(UsageError, match="baseline: it has other original images: 8 differs"):
            quanterr.compare_images(*folders, baseline=old)

    def test_baseline_with_other_identical_pairs_is_refused_for_psnr(self, folders, old):
        (folders[1] / "0.png").write_bytes((folders[0] / "0.png").read_bytes())
        with pytest.raises(UsageError, match="0 is identical in only one of both"):
            quanterr.compare_images(*folders, require="delta(psnr_db) >= -100", baseline=old)

        assert "pass" == quanterr.compare_images(*folders, baseline=old).verdict


class TestDocument:
    @pytest.fixture
    def images_and_path(self, folders, tmp_path):
        images = quanterr.compare_images(*folders, require="min(ssim) >= 0.1")
        images.save(tmp_path / "i.json")
        return images, tmp_path / "i.json"

    def test_document_is_read_back_unchanged_and_follows_its_schema(self, images_and_path):
        images, path = images_and_path
        schema = json.loads(CliRunner().invoke(app, ["schema", "images"]).stdout)

        assert images.to_json() == quanterr.read_document(str(path)).to_json()
        jsonschema.validate(json.loads(path.read_text()), schema)

    def test_stored_images_are_judged_again(self, images_and_path):
        _, path = images_and_path
        statuses = [
            CliRunner().invoke(app, ["gate", str(path), "--require", f"min(ssim) >= {limit}"]).exit_code
            for limit in (0.1, 0.9999)
        ]

        assert [Status.OK, Status.GATE_FAILED] == statuses

    def test_page_shows_the_worst_pairs_first_and_loads_nothing(self, images_and_path):
        images, _ = images_and_path
        file = io.StringIO()
        next(output for output in OUTPUTS if output.name == "html").write(images, file)
        page = file.getvalue()
        sources = re.findall(r'<img src="([^"]*)"', page)

        assert [str(n) for n in range(8, 0, -1)] == [pair.name for pair in images.worst]
        assert sources == [uri for pair in images.worst for uri in (pair.original, pair.quantized)]
        assert "img-src data:" in page
        assert not re.findall(r'(?:src|href)="(?!data:|#)', page)

    def test_document_with_any_picture_but_a_jpeg_is_refused(self, images_and_path):
        images, path = images_and_path
        text = re.sub(r'"checksum": "[^"]*",\n', "", path.read_text())
        path.write_text(text.replace(images.worst[0].original, "https://example.org/x.jpg"))
        with pytest.raises(quanterr.QuanterrError):
            quanterr.read_document(str(path))

    def test_diff_follows_ssim_and_needs_the_same_originals(self, images_and_path, folders):
        images, _ = images_and_path
        save(folders[1] / "8.png", make_pair(60, 8)[1])
        new = quanterr.compare_images(*folders)
        (change,) = quanterr.diff(images, new).candidates

        assert (["8"], [], 8) == ([item.layer for item in change.worse], change.better, change.unchanged)
        save(folders[0] / "8.png", make_pair(9, 9)[0])
        with pytest.raises(UsageError, match="other original images"):
            quanterr.diff(images, quanterr.compare_images(*folders))


CHECKS = {
    "json": check_json,
    "jsonl": check_json,
    "csv": check_csv,
    "md": check_markdown,
    "html": check_text,
    "junit": check_junit,
}


@pytest.mark.parametrize("name", SHORT_NAMES, ids=lambda name: ascii(name[:16]))
def test_name_is_only_text(name):
    made = sample_documents.images()
    pair, worst, lost = made.pairs[0], made.worst[0], made.not_compared[0]
    pair.name = pair.display_name = worst.name = lost.name = lost.display_name = lost.reason = name
    named = {"original": name, "quantized": name, "lpips_absent": name, "reasons": [name], "other_files": [name]}
    made = replace(made, **named)
    pages = {}
    for output in OUTPUTS:
        file = io.StringIO()
        output.write(made, file)
        CHECKS[output.name](file.getvalue())
        pages[output.name] = file.getvalue()
    file = io.StringIO()
    show(made.view(10), make_console(file, "never"), verbose=True)

    check_lines(file.getvalue() + made.brief())
    tame = io.StringIO()
    next(output for output in OUTPUTS if output.name == "html").write(sample_documents.images(), tame)
    assert pages["html"].count("<img") == tame.getvalue().count("<img") == 2
    assert pages["html"].count("<script") == tame.getvalue().count("<script")
