"""Makes the parts of README.md that come from the program, and puts them in place.

python tests/make_readme.py        tests/test_readme.py holds the file against them
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "examples"))


def session() -> str:
    """A real run on the synthetic model of examples/."""
    from quantize import Recipe, write_quantized
    from safetensors.torch import save_file
    from synthetic import make_model

    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder) / "original.safetensors"
        save_file(make_model(), original)
        write_quantized(original, Path(folder) / "quantized.safetensors", Recipe.named("int8_block"))
        words = ["compare", "original.safetensors", "quantized.safetensors", "--top-layers", "5", "-o", "report.json"]
        done = subprocess.run(
            [sys.executable, "-m", "quanterr", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")},
        )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(["```console", f"$ quanterr {' '.join(words)}", *lines, "```"])


def formats() -> str:
    """One row for each row of FORMATS."""
    from quanterr.formats import FORMATS

    rows = ["| format | what it is | codes | scale | usual SNR |", "|---|---|---|---|---|"]
    for row in FORMATS:
        parts = list(row.needs.values())
        names = ", ".join(
            f"`{name.format(weight='X.weight', module='X')}`" for part in parts[1:] for name in part.names
        )
        usual = f"{row.usual_db[0]}–{row.usual_db[1]} dB" if row.usual_db else ""
        codes = ", ".join(sorted(parts[0].dtypes))
        rows.append(f"| `{row.name}` | {row.summary} | {codes} | {names} | {usual} |")
    return "\n".join(rows)


def outputs() -> str:
    """One row for each row of OUTPUTS."""
    from quanterr.report import OUTPUTS

    rows = ["| `--to` | suffix of `-o` | what it is |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{row.name}` | `{row.suffix}` | {row.summary} |" for row in OUTPUTS)])


def block_map() -> str:
    """What a terminal shows of a made-up model."""
    import io

    from rich.console import Console
    from sample_reports import report_of, small

    from quanterr.report.block_map import block_maps

    console = Console(file=io.StringIO(), width=90, color_system=None)
    for picture in block_maps(report_of(small()), console.width, unicode=True):
        console.print(picture)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(["```", *(line for line in lines if line), "```"])


def metrics() -> str:
    """One row for each row of METRICS, then of AGGREGATES."""
    from quanterr.metrics import AGGREGATES, METRICS

    tables = []
    for title, rows in (("of a layer", METRICS), ("of the model and of each group", AGGREGATES)):
        lines = [f"| {title} | unit | better | definition |", "|---|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {m.better} | {_cell(m.formula)} |" for m in rows]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def exit_statuses() -> str:
    """One row for each status."""
    from quanterr.errors import MEANINGS

    rows = ["| status | meaning |", "|---|---|"]
    return "\n".join([*rows, *(f"| {status.value} | {meaning} |" for status, meaning in MEANINGS.items())])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "session": session,
    "formats": formats,
    "outputs": outputs,
    "map": block_map,
    "metrics": metrics,
    "exit-status": exit_statuses,
}


def between(text: str, part: str) -> str:
    """What stands between the markers of a part."""
    return text.split(f"<!-- {part}: made by tests/make_readme.py -->\n", 1)[1].split(f"\n<!-- /{part} -->", 1)[0]


def main() -> None:
    """Put every part in place."""
    text = README.read_text()
    for part, make in PARTS.items():
        text = text.replace(between(text, part), make(), 1)
    README.write_text(text)


if __name__ == "__main__":
    main()
