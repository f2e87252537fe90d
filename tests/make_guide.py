"""Generate the parts of README.md and of the guide that the program defines, and put them in place.

python tests/make_guide.py        tests/guide/test_guide.py checks the files against them
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from support.forked import call

from quanterr.metrics.scores import Score

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "quanterr" / "guide").glob("*.md"))]
sys.path.insert(0, str(ROOT / "examples"))


# Commands that pages show with their output.
COMMANDS = {
    "session": "quanterr compare original.safetensors quantized.safetensors -o report.json",
    "verdict-session": "quanterr compare original.safetensors quantized.safetensors --require 'global(nmse) <= 0.003'",
    "finding-session": "quanterr explain scale_factor",
    "format-session": "quanterr explain fp8_block",
    "metric-session": "quanterr explain clipped_pct",
    "gate-session": "quanterr gate report.json --thresholds int8 --require 'share(snr_db >= 26) >= 0.75'",
    "diff-session": "quanterr diff last-release.json report.json",
    "inspect-session": "quanterr inspect quantized.safetensors",
    "rank-session": "quanterr rank original.safetensors fp8_tensor.safetensors int8_block.safetensors "
    "int8_row.safetensors",
    "sweep-session": "quanterr sweep original.safetensors --to 'int{4,8}_g32,int4_g16,fp8_row,nvfp4'",
    "plan-session": "quanterr plan original.safetensors --bits 5 --to int4_g32,fp8_row,int8_row",
    "resume-session": "quanterr compare original.safetensors quantized.safetensors --resume journal -q",
    "render-session": "quanterr render report.json -o report.html -o report.csv -q",
    "settings-session": "QUANTERR_COMPARE_LAYERS_TO_COMPARE=attn quanterr compare original.safetensors "
    "quantized.safetensors -q",
    "mistake-session": "quanterr compare original.safetensors quantized.safetensors -l atn",
    "specification-session": "quanterr formats eetq",
    "number-session": "quanterr explain floor",
    "automation-session": "quanterr compare original.safetensors quantized.safetensors --thresholds int8 -q "
    "-o report.json",
}


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
        made = {part: f"```console\n$ {line}\n{run(line, folder)}\n```" for part, line in COMMANDS.items()}
    return made


def run(line: str, folder: Path) -> str:
    """Run a command, after the setting of a variable if the line has one, and return what a terminal would show."""
    before, _, words = line.partition("quanterr ")
    done = call(*shlex.split(words), cwd=folder, merged=True, env=dict([before.strip().split("=")]) if before else {})
    if done.returncode not in (0, 1, 2):
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


def classes() -> str:
    """Return a table of the classes of tensors by their origin."""
    from quanterr.documents.comparison.origin import CLASSES

    rows = ["| class | what is shown |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {shown} |" for name, shown in CLASSES.items())])


def thresholds() -> str:
    """Return the annotated example of thresholds."""
    return f"```toml\n{(ROOT / 'examples/ci/thresholds.toml').read_text()}```"


def presets() -> str:
    """Return a table of presets and their limits."""
    from quanterr.gates.rules import PRESETS, read_rules

    rows = ["| preset | for | each layer | the model | codes of each layer |", "|---|---|---|---|---|"]
    for name, path in PRESETS.items():
        what = path.read_text().removeprefix("# ").partition(":")[0]
        layer_rule, model, codes, _ = (f"`{rule.condition.text}`" for rule in read_rules(name))
        rows.append(f"| `{name}` | {what} | {layer_rule} | {model} | {codes} |")
    return "\n".join(rows)


def formats() -> str:
    """Return a table of FORMATS, and the names of REFUSALS."""
    from quanterr.formats import FORMATS
    from quanterr.formats.shared.unsupported import REFUSALS

    rows = ["| format | what it is | usual SNR [dB] |", "|---|---|---|"]
    for row in FORMATS:
        usual = f"{row.usual_db[0]}–{row.usual_db[1]}" if row.usual_db else ""
        rows.append(f"| `{row.name}` | {row.summary} | {usual} |")
    refused = ", ".join(dict.fromkeys(row.name for row in REFUSALS))
    return "\n".join([*rows, "", f"Recognized, not supported (the report names a remedy): {refused}."])


def loading() -> str:
    """Return a table of what the commonest runtimes do with each format."""
    from support.loading_table import SHOWN, list_rows

    from quanterr.findings.runtimes.judging import RUNTIMES

    versions = {runtime.name: runtime.version for runtime in RUNTIMES}
    titles = [f"{name} {versions[name].rpartition(' ')[2]}" for name in SHOWN]
    rows = [f"| format | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for names, answers in list_rows():
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(answers)} |")
    return "\n".join(rows)


def conversions() -> str:
    """Return a table of the golden conversions that are compared completely."""
    from support.conversions import CONVERTERS, REFUSED, read_golden

    rows = ["| converter | models |", "|---|---|"]
    for converter in CONVERTERS:
        golden = read_golden(converter)
        (version,) = {document["converter"] for document in golden.values()}
        rows.append(f"| {version} | {', '.join(name for name in golden if f'{converter}-{name}' not in REFUSED)} |")
    return "\n".join(rows)


def findings_index() -> str:
    """Return links to the sections of CODES, by the gravest severity that a finding can have."""
    from quanterr.documents.finding_codes import CODES

    by_severity: dict[str, list[str]] = {"error": [], "warning": [], "info": []}
    for name, row in CODES.items():
        gravest = next(severity for severity in by_severity if severity in row.severities)
        by_severity[gravest].append(f"[{name}](#{name})")
    return "\n\n".join(f"**Up to {severity}**: {', '.join(links)}." for severity, links in by_severity.items())


def findings() -> str:
    """Return the sections of all codes under their headings, without the examples, which ``quanterr explain`` shows."""
    from quanterr.documents.finding_codes import HEADINGS

    sections = []
    for title, codes in HEADINGS.items():
        sections.append(f"## {title}")
        for name, row in codes.items():
            sections.append(f"### {name}\n\n**{row.severity}**: {row.meaning}.\n\n{row.remedy}")
    return "\n\n".join(sections)


def recipes() -> str:
    """Return a table of recipes."""
    from quanterr.recipes import list_recipes

    rows = ["| recipe | what it is |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {summary} |" for name, summary in list_recipes().items())])


def scores() -> str:
    """Return a table of the numbers that readers see of rankings, evaluations, plans, inspections and images."""
    from quanterr.documents.kinds import KINDS

    rows = ["| of | number | shown as | better |", "|---|---|---|---|"]
    for document_kind in KINDS.values():
        for name, score in document_kind.values.VOCABULARY.scores.items():
            rows.append(f"| {document_kind.name.lower()} | `{name}` | {_title(score)} | {score.better} |")
    return "\n".join(rows)


def outputs() -> str:
    """Return a table of the outputs."""
    from quanterr.outputs import CANDIDATE_OUTPUTS

    rows = ["| `--to` | suffix of `-o` | what it is |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{row.name}` | `{row.suffix}` | {row.summary} |" for row in CANDIDATE_OUTPUTS)])


def block_map() -> str:
    """Return the terminal's block map of a synthetic model."""
    import io

    from rich.console import Console
    from support.sample_reports import report_of, small

    from quanterr.outputs.block_map import draw_block_maps
    from quanterr.views.comparison.view import map_cells

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
        lines = [f"| {title} | shown as | better | definition |", "|---|---|---|---|"]
        lines += [f"| `{m.name}` | {_title(m)} | {m.better} | {_cell(m.formula)} |" for m in rows]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def exit_statuses() -> str:
    """Return a table of exit statuses."""
    from quanterr.errors import MEANINGS

    rows = ["| status | meaning |", "|---|---|"]
    return "\n".join([*rows, *(f"| {status.value} | {meaning} |" for status, meaning in MEANINGS.items())])


def _title(score: Score) -> str:
    """Return a number's heading with its unit: SNR [dB]."""
    unit = "share" if score.unit == "%" else score.unit
    return _cell(score.title) + (f" [{unit}]" if unit else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "findings-index": findings_index,
    "findings": findings,
    **{part: lambda part=part: sessions()[part] for part in COMMANDS},
    "recipes": recipes,
    "scores": scores,
    "functions": functions,
    "report-metrics": report_metrics,
    "classes": classes,
    "thresholds": thresholds,
    "presets": presets,
    "formats": formats,
    "loading": loading,
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
