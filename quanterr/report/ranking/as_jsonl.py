"""The ranking as JSON Lines: first the ranking, then a layer per line; ``record`` says which a line is."""

from typing import IO

from quanterr.report.model import dumps
from quanterr.report.ranking.model import Ranking


def write(ranking: Ranking, file: IO[str]) -> None:
    """Write it line by line; the first says in ``records`` how many layers follow."""
    fields = Ranking.model_fields.items()
    head = {info.alias or name: getattr(ranking, name) for name, info in fields if name != "layers"}
    file.write(dumps({"record": "ranking", **head, "records": {"layer": len(ranking.layers)}}) + "\n")
    for layer in ranking.layers:
        file.write(f'{{"record": "layer", {dumps(layer)[1:]}\n')
