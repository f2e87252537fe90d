"""Documents as one page: what a view holds, and maps and a table of all layers, which need its scripts."""

from collections.abc import Iterator, Sequence
from typing import IO

from quanterr.report.base import Finding
from quanterr.report.finding_codes import CODES
from quanterr.report.formatting import gate_words, judged, sentence
from quanterr.report.html_data import DETAILED
from quanterr.report.markup import (
    LAYER_SCRIPTS,
    Markup,
    cells_table,
    folding,
    headed,
    joined,
    layer_link,
    navigation,
    page,
    part,
    table,
    tag,
    with_links,
)
from quanterr.report.sections import Details, Findings, Gates, LayerName, Maps, Name, Part, Section, Shown, Table, View
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

SCRIPTS = (*LAYER_SCRIPTS, "front", "layers")
TOP = 50  # layers of a table that is in the page itself
FRONT = ("name", "bytes", "snr_db", "on_front")  # of a candidate, as the script knows it


def write(document: Shown, file: IO[str]) -> None:
    """Write the page."""
    view = document.view(TOP)
    maps = view.maps
    body = joined(
        headed(_tone(view), [*_doubts(view), view.conclusion, *map(sentence, view.reasons)], _facts(view), _word(view)),
        navigation(_links(view)),
        *([part("map")] if maps else []),
        *([part("front")] if maps and maps.front else []),
        *(folding(one.key, one.title, *_parts(one), is_open=not one.is_detail) for one in view.sections),
        *([part("layers")] if maps else []),
        tag("p", view.about, class_="about"),
    )
    title = f"{view.word or view.heading}: {display(view.conclusion, 80)}"
    scripts = SCRIPTS if maps else ()
    file.write(page(document.noun, title, scripts, body, _data(maps) if maps else {}))


def _tone(view: View) -> str:
    """Green is for gates that hold: what passes without limits is no approval."""
    if view.verdict != "pass":
        return view.verdict or "info"
    return "inconclusive" if view.doubts else "info" if view.done else "pass"


def _doubts(view: View) -> Iterator[Markup]:
    yield from (tag("strong", sentence(one)) for one in view.doubts)


def _word(view: View) -> str:
    return view.heading if view.word is None else f"{view.word.capitalize()}{', but' if view.doubts else ''}"


def _links(view: View) -> Iterator[tuple[str, str]]:
    if view.maps:
        yield "places", "Map"
    if view.maps and view.maps.front:
        yield "front", "Size and error"
    yield from ((section.key, section.title) for section in view.sections)
    if view.maps:
        yield "layers", "Layers"


def _data(maps: Maps) -> JsonObject:
    """What the scripts show."""
    columns = maps.data()
    return {
        **columns,
        "metrics": {key: metric._asdict() for key, metric in maps.metrics.items()},
        "titles": dict(maps.words),
        "order": maps.order,
        "colour": maps.colour,
        "front": [dict(zip(FRONT, point, strict=True)) for point in maps.front],
        "details": _details(maps.details, len(columns["columns"]["status"])) if maps.details else None,
    }


def _details(details: Details, layers: int) -> JsonObject:
    """What is shown where one of the first layers is chosen."""
    rows = [details.of(n) for n in range(min(layers, DETAILED))]
    return {"title": details.title, "heads": details.heads, "rows": rows}


def _facts(view: View) -> Markup:
    shown = [tag("dt", title) + tag("dd", *map(_cell, texts)) for title, texts in view.facts]
    return tag("dl", *map(Markup, shown), class_="sides")


def _cell(text: str) -> str:
    if isinstance(text, LayerName):
        return layer_link(text)
    return tag("span", sentence(text), class_="name") if isinstance(text, Name) else sentence(text)


def _parts(section: Section) -> Iterator[Markup]:
    for number, one in enumerate(section.parts):
        yield from _part(one, section, is_first=not number)


def _part(one: Part, section: Section, is_first: bool) -> Iterator[Markup]:
    if isinstance(one, Table):
        if not is_first or one.title != section.title:
            yield tag("h3", sentence(one.title))
        yield table_of(one)
        if one.more:
            yield tag("p", f"and {one.more:,} more, in the JSON", class_="about")
    elif isinstance(one, Findings):
        yield findings_of(one.found)
    elif isinstance(one, Gates):
        yield _gates(one)
    else:
        yield from (tag("p", sentence(line), class_="warning" if one.warn else "about") for line in one.lines)


def table_of(one: Table) -> Markup:
    """A table of a view."""
    heads = [one.first, *(column.header for column in one.columns)]
    right = [False, *(column.right for column in one.columns)]
    return cells_table(heads, [list(map(_cell, row)) for row in one.rows], "rows", right)


def _gates(gates: Gates) -> Markup:
    rows: list[Sequence[str]] = [
        [f"{display(name)}: {display(gate.require)}" if name else display(gate.require), gate_words(gate)[0],
         judged(gate.observed, gate.limit)]
        for name, gate in gates.judged
    ]  # fmt: skip
    return table(["gate", "", "observed"], rows, "rows", 1) if rows else tag("p", "No gates set.", class_="none")


def findings_of(found: Sequence[tuple[str, Finding]]) -> Markup:
    """A list of findings, each with the candidate that it is of; nothing where there is none."""
    items = [finding_item(one, name) for name, one in found]
    return tag("ul", *items, class_="findings") if items else Markup("")


def finding_item(found: Finding, of: str = "") -> Markup:
    """A finding as an item of a list; ``of`` a candidate, where there are several."""
    message = with_links(sentence(found.message), [found.layer] if found.layer else [])
    remedy = [tag("p", sentence(found.remedy), class_="remedy")] if found.remedy else []
    severity = tag("span", found.severity, class_=f"tag {found.severity}")
    whose = f"{display(of)}: " if of else ""
    return tag("li", severity, tag("div", tag("p", whose, message), *remedy, *_explained(found.code)))


def _explained(code: str) -> list[Markup]:
    """What the guide says of a finding; nothing of those of a newer version."""
    row = CODES.get(code)
    if row is None:
        return []
    more = tag("p", row.remedy, " More: ", tag("code", f"quanterr explain {code}"))
    return [tag("details", tag("summary", tag("code", code)), tag("p", f"{row.meaning}."), more)]
