"""Views as HTML pages: a self-contained file; scripts draw the maps and the table of all layers."""

from collections.abc import Iterator, Sequence
from typing import IO

from quanterr.documents.base import Finding
from quanterr.documents.comparison.page_data import DETAILED
from quanterr.documents.document import Result
from quanterr.documents.finding_codes import CODES
from quanterr.documents.gate_results import Gate
from quanterr.outputs.formatting import (
    LONG,
    describe_gate,
    describe_violation,
    format_observed,
    is_said_in_numbers,
    sentence,
)
from quanterr.outputs.page.chart import draw_chart
from quanterr.outputs.page.columns import make_columns
from quanterr.outputs.page.markup import (
    LAYER_SCRIPTS,
    Markup,
    cells_table,
    image,
    join_markup,
    link_layer,
    link_names,
    page,
    part,
    tag,
)
from quanterr.outputs.sections import (
    PAGE,
    BlockMap,
    Chart,
    Details,
    FactList,
    FigureGroup,
    Findings,
    Gates,
    Interactive,
    LayerName,
    Maps,
    Name,
    PageScripts,
    Part,
    Picture,
    Pictures,
    Section,
    Shares,
    Table,
    View,
    Whole,
)
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, format_exact, size

MAP_SCRIPTS = ("front", "layers")  # for documents whose data define the metrics of map and table
TOP = 50  # layers in tables of the page itself
MANY_ROWS, FIRST_ROWS = 20, 10  # a table with more rows shows only the first ones until it is unfolded
MAX_LISTED = 200  # findings and reasons
MAX_VIOLATIONS = 20
SIGNS = {"pass": "✓", "fail": "✕", "inconclusive": "?", "info": "›"}
SEVERITIES = ("error", "warning", "info")
FRONT = ("name", "bytes", "snr_db", "on_front")  # keys of a candidate in the script's data


def write(document: Result, file: IO[str], view: View | None = None, next_step: str = "") -> None:
    """Write the page of a document, from ``view`` if it is given; ``next_step`` is the command to propose."""
    view = view or document.view(TOP)
    sections = [section for section in view.sections if PAGE in section.media]
    body = join_markup(
        _header(view, sections),
        _next_step(next_step),
        tag("nav", *(tag("a", one.title, href=f"#{one.key}") for one in sections), aria_label="Sections"),
        *map(_section, sections),
        tag("p", view.about, class_="about"),
    )
    title = f"{view.word or view.heading}: {display(view.conclusion, 80)}"
    scripts, data = _pick_scripts(view.maps)
    file.write(page(document.noun, title, scripts, body, data))


def _header(view: View, sections: Sequence[Section]) -> Markup:
    """Return the top of a page: the verdict, its reasons and the compared files."""
    tone = _pick_tone(view)
    word = view.heading if view.word is None else f"{view.word.capitalize()}{', but' if view.doubts else ''}"
    title = tag("h1", tag("span", SIGNS[tone], class_="sign", aria_hidden="true"), word)
    reasons = tag("ul", *(tag("li", reason) for reason in _reasons(view, sections)), class_="reasons")
    return tag("section", title, reasons, _facts(view), class_=f"verdict {tone}")


def _next_step(command: str) -> Markup:
    """Return the section of the proposed command, with a button that copies it; nothing without a command."""
    if not command:
        return Markup("")
    button = tag("button", "Copy", type="button", class_="script")
    proposed = tag("div", tag("code", display(command, LONG)), button, class_="command")
    return tag("section", tag("h2", "Next command"), proposed, id="next")


def _reasons(view: View, sections: Sequence[Section]) -> Iterator[Markup | str]:
    """Yield doubts about the comparison, the conclusion, and the reasons with links to layers."""
    yield from (tag("strong", sentence(one)) for one in view.doubts)
    yield view.conclusion
    named = list(_list_named_layers(sections))[:MAX_LISTED] if view.maps else []  # maps come with details to link
    yield from (link_names(sentence(reason), named) for reason in view.reasons[:MAX_LISTED])
    if len(view.reasons) > MAX_LISTED:
        yield f"and {count(len(view.reasons) - MAX_LISTED, 'more reason')}"


def _list_named_layers(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the layers that findings and tables of problems name."""
    for section in sections:
        for one in section.parts:
            if isinstance(one, Findings):
                yield from (found.layer for _, found in one.found if found.layer is not None)
            elif isinstance(one, Table) and section.is_problem:
                yield from (row[0] for row in one.rows)


def _pick_scripts(maps: Maps | PageScripts | None) -> tuple[Sequence[str], JsonObject]:
    """Return the scripts of a page and their data."""
    if maps is None:
        return (), {}
    if isinstance(maps, PageScripts):
        return (*LAYER_SCRIPTS, *maps.scripts), maps.data()
    return (*LAYER_SCRIPTS, *MAP_SCRIPTS), _data(maps)


def _pick_tone(view: View) -> str:
    """Return the colour of the header; only gates that hold make it green."""
    if view.verdict != "pass":
        return view.verdict or "info"
    return "inconclusive" if view.doubts else "info" if view.done else "pass"


def _data(maps: Maps) -> JsonObject:
    """Return the data that the scripts show."""
    columns = make_columns(maps.rows())
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
    """Return the details of the first layers, shown when one is selected."""
    rows = [details.of(n) for n in range(min(layers, DETAILED))]
    return {"title": details.title, "heads": details.heads, "rows": rows}


def _facts(view: View) -> Markup:
    shown = [tag("dt", title) + tag("dd", *map(_cell, texts)) for title, texts in view.facts]
    return tag("dl", *map(Markup, shown), class_="sides")


def _cell(text: str) -> str:
    if isinstance(text, LayerName):
        return link_layer(text)
    return tag("span", sentence(text), class_="name") if isinstance(text, Name) else sentence(text)


def _section(section: Section) -> Markup:
    """Return a section that folds by its heading; figures, interactive parts and problems do not fold."""
    first = section.parts[0]
    if isinstance(first, Interactive):
        return part(first.file)
    if isinstance(first, FigureGroup):
        return _figures(first, section)
    content = [made for number, one in enumerate(section.parts) for made in _part(one, section, is_first=not number)]
    if section.is_problem:
        return tag("section", tag("h2", sentence(section.title)), *content, id=section.key, class_="problems")
    opened = {"open": ""} if section.is_open else {}
    heading = tag("summary", tag("h2", sentence(section.title)))
    return tag("details", heading, *content, id=section.key, class_="section", **opened)


def _figures(one: FigureGroup, section: Section) -> Markup:
    shown = [
        tag(
            "div",
            tag("p", title, class_="label"),
            tag("p", value, " ", tag("small", unit), class_="value"),
            tag("p", _cell(note) if note else "", class_="note"),
        )
        for title, value, unit, note in one.shown
    ] or [tag("div", tag("p", one.title, class_="note"))]
    return tag("section", *shown, id=section.key, class_="figures", aria_label=section.title)


def _part(one: Part, section: Section, is_first: bool) -> Iterator[Markup]:
    if isinstance(one, Table):
        if not section.is_problem and (not is_first or one.title != section.title):
            yield tag("h3", sentence(one.title))
        yield render_table(one)
        if one.more:
            yield tag("p", f"and {one.more:,} more, in the JSON", class_="about")
    elif isinstance(one, Findings):
        yield _findings(one)
    elif isinstance(one, Gates):
        yield _gates(one)
    elif isinstance(one, Shares):
        yield tag("div", *map(_render_whole, one.wholes), class_="coverage")
    elif isinstance(one, FactList):
        facts = [tag("dt", title) + tag("dd", sentence(text)) for title, text in one.shown]
        yield tag("dl", *map(Markup, facts), class_="facts")
    elif isinstance(one, Chart):
        yield draw_chart(one)
    elif isinstance(one, Pictures):
        yield from map(_show_pair, one.shown)
    elif not isinstance(one, BlockMap | FigureGroup | Interactive):
        yield from (tag("p", sentence(line), class_="warning" if one.warn else "about") for line in one.lines)


def _show_pair(one: Picture) -> Markup:
    caption = tag("figcaption", _cell(one.name), f": {one.note}")
    sides = (("original", one.original), ("quantized", one.quantized))
    return tag("figure", *(image(uri, alt) for alt, uri in sides), caption, class_="pair")


def render_table(one: Table) -> Markup:
    """Return a table without the columns that only terminals draw; minor rows, and most of a long table, are folded.

    A table without numbers stacks its rows on narrow screens.
    """
    kept = [n for n, column in enumerate(one.columns) if not column.legend]
    heads = [one.first, *(one.columns[n].header for n in kept)]
    right = [False, *(one.columns[n].right for n in kept)]
    rows = [[_cell(row[0]), *(_cell(row[n + 1]) for n in kept)] for row in one.rows]
    kind = "rows" if any(right) or not kept else "stack"
    major = len(rows) - one.minor
    title = f"{count(one.minor, 'row')} {one.minor_because}"
    if major > MANY_ROWS:
        major = FIRST_ROWS
        title = f"{count(len(rows) - major, 'more row')}"
    shown = cells_table(heads, rows[:major], kind, right) if major else Markup("")
    if major == len(rows):
        return shown
    folded = cells_table(heads, rows[major:], kind, right)
    return join_markup(shown, tag("details", tag("summary", title), folded, class_="minor"))


def _render_whole(one: Whole) -> Markup:
    """Return a strip of parts, whose widths a script sets, and a table of the shares."""
    strip = [tag("i", class_=share.key, data_share=str(share.bytes)) for share in one.shares]
    rows = [
        [join_markup(tag("i", class_=f"key {share.key}"), sentence(share.title)), f"{share.tensors:,}",
         size(share.bytes)]
        for share in one.shares
    ]  # fmt: skip
    table = cells_table(["", "tensors", "size"], rows, "short", [False, True, True])
    title = tag("h3", one.title, tag("span", one.note))
    return tag("div", title, tag("div", *strip, class_="strip", aria_hidden="true"), table)


def _gates(gates: Gates) -> Markup:
    if not gates.judged:
        return tag("p", "No gates set: nothing decides whether the error is small enough.", class_="none")
    failed = sum(gate.status == "fail" for _, gate in gates.judged)
    do = "does" if failed == 1 else "do"
    answer = f"{failed:,} of {count(len(gates.judged), 'gate')} {do} not hold." if failed else "All gates hold."
    heads = [tag("th", text, scope="col") for text in ("", "gate", "condition")]
    heads += [tag("th", text, scope="col", class_="number") for text in ("observed", "limit", "margin")]
    rows = [row for name, gate in sorted(gates.judged, key=lambda one: one[1].status) for row in _gate(name, gate)]
    listed = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="plain gates rows")
    return join_markup(tag("p", answer, class_="about"), tag("div", listed, class_="scroll"))


def _gate(name: str, gate: Gate) -> list[Markup]:
    """Return the row of a gate, and a second row that explains a violation."""
    word, tone = describe_gate(gate)
    patterns = f" for {sentence(', '.join(gate.layers))}" if gate.layers else ""
    titles = ([name] if name else []) + ([gate.id] if gate.id != gate.require else [])
    row = tag(
        "tr",
        tag("td", tag("span", word, class_=f"tag {tone}")),
        tag("th", ": ".join(map(display, titles)), scope="row"),
        tag("td", tag("code", sentence(gate.require)), patterns),
        tag("td", format_observed(gate.observed, gate.limit), class_="number", data_head="observed"),
        tag("td", format_exact(gate.limit), class_="number", data_head="limit"),
        tag("td", format_observed(gate.margin, 0), class_="number", data_head="margin"),
    )
    if gate.status == "pass" or is_said_in_numbers(gate):
        return [row]
    reason = [tag("p", f"Reason: {sentence(gate.reason)}", class_="remedy")] if gate.reason else []
    shown = [
        tag("li", link_names(describe_violation(violation), [violation.layer]))
        for violation in gate.violations[:MAX_VIOLATIONS]
        if violation.layer is not None  # otherwise the gate's message says it
    ]
    if len(gate.violations) > MAX_VIOLATIONS:
        shown.append(tag("li", f"and {len(gate.violations) - MAX_VIOLATIONS:,} more, in the JSON"))
    why = [tag("p", sentence(gate.message)), *reason, *([tag("ul", *shown)] if shown else [])]
    return [row, tag("tr", tag("td", ""), tag("td", *why, colspan="5"), class_="why")]


def _findings(findings: Findings) -> Markup:
    """Return a list of findings, the most severe first, with names of candidates if there are several."""
    if not findings.found:
        return tag("p", "No findings.", class_="none")
    ordered = sorted(findings.found, key=lambda one: SEVERITIES.index(one[1].severity))
    items = [render_finding(found, name) for name, found in ordered[:MAX_LISTED]]
    if len(ordered) > MAX_LISTED:
        more = f"and {count(len(ordered) - MAX_LISTED, 'more finding')}, in the JSON"
        items.append(tag("li", tag("span"), tag("p", more)))
    return tag("ul", *items, class_="findings")


def render_finding(found: Finding, of: str = "") -> Markup:
    """Return the list item of a finding; ``of`` names its candidate if there are several."""
    message = link_names(sentence(found.message), [found.layer] if found.layer else [])
    remedy = [tag("p", sentence(found.remedy), class_="remedy")] if found.remedy else []
    severity = tag("span", found.severity, class_=f"tag {found.severity}")
    whose = f"{display(of)}: " if of else ""
    return tag("li", severity, tag("div", tag("p", whose, message), *remedy, *_explain_code(found.code)))


def _explain_code(code: str) -> list[Markup]:
    """Return the guide's explanation of a finding; nothing for codes of newer versions."""
    row = CODES.get(code)
    if row is None:
        return []
    more = tag("p", row.remedy, " More: ", tag("code", f"quanterr explain {code}"))
    return [tag("details", tag("summary", tag("code", code)), tag("p", f"{row.meaning}."), more)]
