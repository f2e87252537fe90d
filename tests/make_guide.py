"""Generate the parts of README.md and of the guide that the program defines, and put them in place.

python tests/make_guide.py        tests/test_guide.py checks the files against them
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from forked import call

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "quanterr" / "guide").glob("*.md"))]
sys.path.insert(0, str(ROOT / "examples"))


@cache
def sessions() -> dict[str, str]:
    """Return sessions recorded on the synthetic model of examples/, by title."""
    from quantize import write_quantized
    from safetensors.torch import save_file
    from synthetic import make_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = folder / "original.safetensors"
        save_file(make_model(), original)
        for recipe, stem in (("int8_block", "quantized"), ("int8_row", "older")):
            write_quantized(original, folder / f"{stem}.safetensors", recipe)
        for recipe in ("fp8_tensor", "int8_block", "int8_row"):
            write_quantized(original, folder / f"{recipe}.safetensors", recipe)
        run("quanterr compare original.safetensors older.safetensors -q -o last-release.json", folder)
        commands = {
            "session": "quanterr compare original.safetensors quantized.safetensors -o report.json",
            "gate-session": "quanterr gate report.json --thresholds int8 --require 'share(snr_db >= 26) >= 0.75'",
            "diff-session": "quanterr diff last-release.json report.json",
            "inspect-session": "quanterr inspect quantized.safetensors",
            "rank-session": "quanterr rank original.safetensors fp8_tensor.safetensors int8_block.safetensors "
            "int8_row.safetensors",
            "sweep-session": "quanterr sweep original.safetensors --to 'int{4,8}_g32,int4_g16,fp8_row,nvfp4'",
        }
        made = {part: f"```console\n$ {line}\n{run(line, folder)}\n```" for part, line in commands.items()}
    return made


def run(line: str, folder: Path) -> str:
    """Run a command and return its output, including stderr where verdicts are printed."""
    done = call(*shlex.split(line)[1:], cwd=folder, merged="gate" in line)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{line}: {done.stdout}{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def functions() -> str:
    """Return a table of FUNCTIONS."""
    from quanterr.gates.expression import FUNCTIONS

    rows = ["| function | of |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{row.name}` | {row.summary} |" for row in FUNCTIONS)])


def report_metrics() -> str:
    """Return a table of REPORT_METRICS."""
    from quanterr.documents.comparison.values import REPORT_METRICS

    rows = ["| of the report | definition |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {row.summary} |" for name, row in REPORT_METRICS.items())])


def thresholds() -> str:
    """Return the annotated example of thresholds."""
    return f"```toml\n{(ROOT / 'examples/ci/thresholds.toml').read_text()}```"


def presets() -> str:
    """Return a table of presets and their limits."""
    from quanterr.gates.rules import PRESETS, read_rules

    rows = ["| preset | for | each layer | the model | codes of each layer |", "|---|---|---|---|---|"]
    for name, path in PRESETS.items():
        what = path.read_text().removeprefix("# ").partition(":")[0]
        each, model, codes, _ = (f"`{rule.condition.text}`" for rule in read_rules(name))
        rows.append(f"| `{name}` | {what} | {each} | {model} | {codes} |")
    return "\n".join(rows)


def formats() -> str:
    """Return a table of FORMATS, and the names of REFUSALS."""
    from quanterr.formats import FORMATS
    from quanterr.formats.base import names_for
    from quanterr.formats.shared.unsupported import REFUSALS

    rows = ["| format | what it is | codes | scale | usual SNR |", "|---|---|---|---|---|"]
    for row in FORMATS:
        parts = list(row.needs.values())
        names = [name for part in parts[1:] for name in names_for("X.weight", part.names)]
        shown = [f"`{name}`" for name in names if "weight_weight" not in name]  # X_weight_scale of stacked experts
        names = ", ".join([*shown[:6], "…"] if len(shown) > 6 else shown)
        usual = f"{row.usual_db[0]}–{row.usual_db[1]} dB" if row.usual_db else ""
        codes = ", ".join(sorted(parts[0].dtypes))
        rows.append(f"| `{row.name}` | {row.summary} | {codes} | {names} | {usual} |")
    refused = ", ".join(dict.fromkeys(row.name for row in REFUSALS))
    return "\n".join([*rows, "", f"Recognized, not supported (the report says what to do instead): {refused}."])


def conversions() -> str:
    """Return a table of the golden conversions that are compared completely."""
    from conversions import CONVERTERS, REFUSED, read_golden

    rows = ["| converter | models |", "|---|---|"]
    for converter in CONVERTERS:
        golden = read_golden(converter)
        (version,) = {document["converter"] for document in golden.values()}
        rows.append(f"| {version} | {', '.join(name for name in golden if f'{converter}-{name}' not in REFUSED)} |")
    return "\n".join(rows)


def findings_index() -> str:
    """Return a table of CODES with links to their sections."""
    from quanterr.documents.finding_codes import CODES

    rows = ["| finding | severity | what it says |", "|---|---|---|"]
    lines = (
        f"| [{name}](#{name}) | {', '.join(row.severities)} | {_cell(row.meaning)} |" for name, row in CODES.items()
    )
    return "\n".join([*rows, *lines])


def recipes() -> str:
    """Return a table of recipes."""
    from quanterr.recipes import list_recipes

    rows = ["| recipe | what it is |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {summary} |" for name, summary in list_recipes().items())])


def scores() -> str:
    """One row for each number that readers see of rankings, evaluations, plans, inspections and images."""
    from quanterr.documents.kinds import KINDS

    rows = ["| number | of | what it is | unit | better |", "|---|---|---|---|---|"]
    for kind in KINDS.values():
        for name, score in kind.values.VOCABULARY.scores.items():
            unit = "share" if score.unit == "%" else score.unit
            rows.append(f"| `{name}` | {kind.name.lower()} | {_cell(score.title)} | {unit} | {score.better} |")
    return "\n".join(rows)


def outputs() -> str:
    """Return a table of OUTPUTS."""
    from quanterr.outputs import OUTPUTS

    rows = ["| `--to` | suffix of `-o` | what it is |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{row.name}` | `{row.suffix}` | {row.summary} |" for row in OUTPUTS)])


def block_map() -> str:
    """Return the terminal's block map of a synthetic model."""
    import io

    from rich.console import Console
    from sample_reports import report_of, small

    from quanterr.documents.comparison.view import map_cells
    from quanterr.outputs.block_map import draw_block_maps

    console = Console(file=io.StringIO(), width=90, color_system=None)
    for picture in draw_block_maps(map_cells(report_of(small())), console.width, unicode=True):
        console.print(picture)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(["```", *(line for line in lines if line), "```"])


def metrics() -> str:
    """Return a table of METRICS, then of AGGREGATES."""
    from quanterr.documents.comparison.aggregate import AGGREGATES
    from quanterr.documents.comparison.layer import METRICS

    tables = []
    for title, rows in (("of a layer", METRICS), ("of the model and of each group", AGGREGATES)):
        lines = [f"| {title} | shown as | unit | better | definition |", "|---|---|---|---|---|"]
        lines += [f"| `{m.name}` | {_cell(m.title)} | {m.unit} | {m.better} | {_cell(m.formula)} |" for m in rows]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def exit_statuses() -> str:
    """Return a table of exit statuses."""
    from quanterr.errors import MEANINGS

    rows = ["| status | meaning |", "|---|---|"]
    return "\n".join([*rows, *(f"| {status.value} | {meaning} |" for status, meaning in MEANINGS.items())])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def steps() -> str:
    """Return the ten steps of the guide."""
    text = (ROOT / "quanterr/guide/adding-a-format.md").read_text()
    return text[text.index("1. **") :].strip()


PARTS: dict[str, Callable[[], str]] = {
    "adding-a-format": steps,
    "findings-index": findings_index,
    "session": lambda: sessions()["session"],
    "gate-session": lambda: sessions()["gate-session"],
    "diff-session": lambda: sessions()["diff-session"],
    "inspect-session": lambda: sessions()["inspect-session"],
    "rank-session": lambda: sessions()["rank-session"],
    "sweep-session": lambda: sessions()["sweep-session"],
    "recipes": recipes,
    "scores": scores,
    "functions": functions,
    "report-metrics": report_metrics,
    "thresholds": thresholds,
    "presets": presets,
    "formats": formats,
    "conversions": conversions,
    "outputs": outputs,
    "map": block_map,
    "metrics": metrics,
    "exit-status": exit_statuses,
}


def parts_of(page: Path) -> list[str]:
    """Return the names of the generated parts of a page."""
    return re.findall(r"<!-- ([a-z-]+): made by tests/make_guide.py -->", page.read_text())


def between(text: str, part: str) -> str:
    """Return the text between the markers of a part."""
    return (
        text.split(f"<!-- {part}: made by tests/make_guide.py -->\n", 1)[1]
        .split(f"<!-- /{part} -->", 1)[0]
        .rstrip("\n")
    )


def main() -> None:
    """Generate every part."""
    for page in PAGES:
        text = page.read_text()
        for part in parts_of(page):
            head, tail = f"<!-- {part}: made by tests/make_guide.py -->\n", f"<!-- /{part} -->"
            before, _, rest = text.partition(head)
            text = f"{before}{head}{PARTS[part]()}\n{tail}{rest.partition(tail)[2]}"
        page.write_text(text)


if __name__ == "__main__":
    main()
