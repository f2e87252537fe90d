"""Take the picture of README.md: the answer and the map of a page, of a synthetic model with three bad layers.

python tests/make_screenshot.py        writes examples/report-map.png; needs Chromium and its driver
"""

import base64
import io
import tempfile
from pathlib import Path
from random import Random

from msgspec.structs import replace
from PIL import Image
from support.browsing import BROWSER, DRIVER, start_browser
from support.sample_reports import Model, report_of

from quanterr.outputs.page import rendering as html

PICTURE = Path(__file__).resolve().parent.parent / "examples" / "report-map.png"
WIDTH = 1200
BLOCKS = 28
# Leaves the answer and the map, and returns the height of the page.
SHOW = """
for (const part of document.querySelectorAll("main > *")) {
  if (!part.matches(".verdict, #places") && !part.querySelector(".verdict, #places")) part.style.display = "none";
}
document.documentElement.dataset.theme = "light";
return document.body.scrollHeight + 20;
"""


def outliers() -> Model:
    """Return a language model in INT8 rows; outliers of three layers make most of the error."""
    random, weights = Random(4), []
    shapes = {
        "self_attn.q_proj": (2048, 2048),
        "self_attn.k_proj": (1024, 2048),
        "self_attn.v_proj": (1024, 2048),
        "self_attn.o_proj": (2048, 2048),
        "mlp.gate_proj": (6144, 2048),
        "mlp.up_proj": (6144, 2048),
        "mlp.down_proj": (2048, 6144),
    }
    hot = {(2, "mlp.down_proj"): 12.4, (3, "mlp.down_proj"): 15.1, (26, "mlp.down_proj"): 13.8}
    for n in range(BLOCKS):
        for module, shape in shapes.items():
            level = hot.get((n, module), random.gauss(38.5 if "attn" in module else 36.5, 0.8))
            weights.append((f"model.layers.{n}.{module}.weight", shape, "int8_row", level))
    return Model("llama", weights, [("model.embed_tokens.weight", (64000, 2048))])


def take(browser: object, path: Path) -> bytes:
    """Return a picture of the page at ``path`` as PNG, without the sections other than answer and map."""
    size = {"width": WIDTH, "height": 600, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    browser.implicitly_wait(5)
    browser.find_element("css selector", ".map td.cell")
    size["height"] = browser.execute_script(SHOW)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])


def main() -> None:
    """Write the picture, where there is a browser."""
    if BROWSER is None or DRIVER is None:
        print(f"{PICTURE.name} stays as it is: there is no Chromium with a driver here")
        return
    report = report_of(outliers())
    saved = sum(layer.tensor_elements * (16 - layer.bits_per_weight) / 8 for layer in report.layers)
    quantized = replace(report.quantized, bytes=report.quantized.bytes - round(saved))
    page = io.StringIO()
    html.write(replace(report, quantized=quantized), page)
    with tempfile.TemporaryDirectory() as folder, start_browser() as browser:
        path = Path(folder) / "report.html"
        path.write_text(page.getvalue(), encoding="utf-8")
        taken = Image.open(io.BytesIO(take(browser, path)))
    taken.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(PICTURE, optimize=True)  # a third of the size


if __name__ == "__main__":
    main()
