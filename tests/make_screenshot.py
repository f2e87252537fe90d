"""Take the screenshots of the HTML report for README.md, from synthetic models, one with a bad layer.

python tests/make_screenshot.py        writes examples/report*.png; needs Chromium and its driver
"""

import base64
import io
import tempfile
from pathlib import Path

from browsing import started
from sample_reports import Model, mixed, report_of, small

from quanterr.outputs.page import rendering as html

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PICTURES = (
    # name, model, theme, element at the top, height
    ("report.png", small(), "light", "body", 800),
    ("report-map.png", mixed(), "dark", "#places", 596),
)
WIDTH = 1200


def take(browser: object, folder: Path, model: Model, theme: str, top: str, height: int) -> bytes:
    """Return a screenshot as PNG."""
    page = io.StringIO()
    html.write(report_of(model), page)
    path = folder / "report.html"
    path.write_text(page.getvalue(), encoding="utf-8")
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    browser.implicitly_wait(5)
    browser.find_element("css selector", ".map td.cell")
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.execute_script("document.querySelector(arguments[0]).scrollIntoView()", top)
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])


def main() -> None:
    """Take all screenshots."""
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        for name, model, theme, top, height in PICTURES:
            (EXAMPLES / name).write_bytes(take(browser, Path(folder), model, theme, top, height))


if __name__ == "__main__":
    main()
