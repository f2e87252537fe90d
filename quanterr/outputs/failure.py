"""Outputs of a run that failed: they hold the error, so that no later step takes an older result for the new one."""

import html
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from quanterr.documents.base import dumps
from quanterr.documents.kinds import FAILURE
from quanterr.outputs import BEGIN, END
from quanterr.outputs.csv import VERDICT, format_cell
from quanterr.outputs.files import Target, open_replacement
from quanterr.outputs.markdown import format_prose

WORD = "error"  # shown in place of a verdict


def write_failure(target: Target, message: str, status: int) -> None:
    """Replace the file of a target by one that holds the error; do nothing for pictures, devices and pipes.

    Raises:
        ResourceError: the file cannot be written.
    """
    make = MAKERS.get(target.output.name)
    if make is None or target.path is None or not _is_regular(target.path):
        return
    with open_replacement(str(target.path), "--output-report") as file:
        file.write(make(message, status).encode())


def _is_regular(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _make_json(message: str, status: int) -> str:
    return f"{dumps({'schema': FAILURE, 'status': status, 'error': message})}\n"


def _make_csv(message: str, status: int) -> str:
    cell = str(format_cell(message)).replace('"', '""')
    return f'{VERDICT},error\n{WORD},"{cell}"\n'


def _make_page(message: str, status: int) -> str:
    return (
        f'<!doctype html>\n<!-- {FAILURE} --><meta charset="utf-8"><title>quanterr: no result</title>\n'
        f"<p>quanterr ended with status {status}, without a result: {html.escape(message)}</p>\n"
    )


def _make_section(message: str, status: int) -> str:
    return f"{BEGIN}\nquanterr ended with status {status}, without a result: {format_prose(message)}\n{END}\n"


def _make_junit(message: str, status: int) -> str:
    counts: dict[str, str] = {"tests": "1", "failures": "0", "errors": "1"}
    root = Element("testsuites", {"name": f"quanterr: {WORD}"} | counts)
    suite = SubElement(root, "testsuite", {"name": "quanterr"} | counts)
    case = SubElement(suite, "testcase", classname="run", name="result")
    SubElement(case, "error", message=message, type="error").text = f"exit status {status}"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


MAKERS: Mapping[str, Callable[[str, int], str]] = {
    "json": _make_json,
    "jsonl": _make_json,
    "csv": _make_csv,
    "html": _make_page,
    "md": _make_section,
    "junit": _make_junit,
}
