"""Views as HTML pages that work offline; their scripts draw the maps and the table of all layers."""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from quanterr.documents.document import Result
from quanterr.outputs.page.columns import MAX_DETAILED, make_columns
from quanterr.outputs.page.environment import MAX_LISTED, environment
from quanterr.outputs.sections import PAGE, Findings, Maps, PageScripts, Section, Table, View
from quanterr.util.strict_json import JsonObject

FOLDER = Path(__file__).parent
# Scripts for every page with layers.
LAYER_SCRIPTS = ("data", "dom", "address", "metrics", "scale", "map", "table", "filters", "drawer")
MAP_SCRIPTS = ("front", "layers")  # scripts for documents whose data define the metrics of map and table
TOP = 50  # number of layers listed in the page's own tables
FRONT_KEYS = ("name", "bytes", "snr_db", "on_front")  # keys of a candidate in the script's data


def write(document: Result, file: IO[str], view: View | None = None, next_step: str = "") -> None:
    """Write the page of a document, from ``view`` if it is given; ``next_step`` is the command to propose."""
    view = view or document.view(TOP)
    sections = [section for section in view.sections if PAGE in section.media]
    scripts, data = _pick_scripts(view.maps)
    style, script = _read_file("style.css"), "\n".join(_read_file(f"scripts/{name}.js") for name in scripts)
    linked = list(_list_named_layers(sections))[:MAX_LISTED] if view.maps else []  # maps come with details to link
    template = environment().get_template("page.html")
    packed = zlib.compress(json.dumps(data, allow_nan=False, separators=(",", ":")).encode(), 6)
    page = template.render(
        noun=document.noun,
        view=view,
        tone=_pick_tone(view),
        summary=[line for line in view.summary if not any(line in texts for _, texts in view.facts)],
        linked=linked,
        sections=sections,
        next_step=next_step,
        style=style,
        script=script,
        hash_of=_compute_hash,
        data=base64.b64encode(packed).decode(),
    )
    file.write(page)


def _read_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _compute_hash(text: str) -> str:
    """Return the hash by which the page's content security policy allows a style or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _pick_tone(view: View) -> str:
    """Return the colour of the header; only gates that hold make it green."""
    if view.verdict != "pass":
        return view.verdict or "info"
    return "inconclusive" if view.doubts else "info" if view.done else "pass"


def _list_named_layers(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the layers that findings and tables of problems name."""
    for section in sections:
        for part in section.parts:
            if isinstance(part, Findings):
                yield from (finding.layer for _, finding in part.listed if finding.layer is not None)
            elif isinstance(part, Table) and section.is_problem:
                yield from (row[0] for row in part.rows)


def _pick_scripts(maps: Maps | PageScripts | None) -> tuple[Sequence[str], JsonObject]:
    """Return the scripts of a page and their data."""
    if maps is None:
        return (), {}
    if isinstance(maps, PageScripts):
        return (*LAYER_SCRIPTS, *maps.scripts), maps.data()
    return (*LAYER_SCRIPTS, *MAP_SCRIPTS), _make_data(maps)


def _make_data(maps: Maps) -> JsonObject:
    """Return the data that the scripts show, with the details of the first layers."""
    columns = make_columns(maps.rows())
    details = None
    if maps.details:
        detailed = min(len(columns["columns"]["status"]), MAX_DETAILED)
        rows = [maps.details.of(n) for n in range(detailed)]
        details = {"title": maps.details.title, "heads": maps.details.heads, "rows": rows}
    return {
        **columns,
        "metrics": {key: metric._asdict() for key, metric in maps.metrics.items()},
        "titles": dict(maps.words),
        "order": maps.order,
        "colour": maps.colour,
        "front": [dict(zip(FRONT_KEYS, point, strict=True)) for point in maps.front],
        "details": details,
    }
