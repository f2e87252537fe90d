"""HTML of results in notebooks."""

from quanterr.documents.document import Result
from quanterr.outputs.page.environment import environment
from quanterr.outputs.sections import TERMINAL, Table, View

TOP = 10  # layers in a table


def render(result: Result) -> str:
    """Return the conclusion of a result and the tables that terminals also show."""
    view: View = result.view(TOP)
    shown = [section for section in view.sections if TERMINAL in section.media]
    tables = [part for section in shown for part in section.parts if isinstance(part, Table)]
    return environment().get_template("notebook.html").render(view=view, tables=tables)
