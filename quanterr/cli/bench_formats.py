"""``quanterr bench-formats``: compare recipes on synthetic weights."""

import sys
from typing import TYPE_CHECKING, Annotated

from quanterr.cli.display import TABLE_OPTIONS, Color, Display, guard_stdout
from quanterr.cli.options import with_options
from quanterr.options import BenchOptions
from quanterr.util import strict_json
from quanterr.util.memory import require_memory_for_torch

if TYPE_CHECKING:
    from quanterr.recipes.synthetic import BenchResult

SCHEMA, SCHEMA_VERSION = "quanterr.bench_formats", "1.0"


@with_options
def bench_formats(options: BenchOptions, show: Annotated[Display, TABLE_OPTIONS]) -> None:
    """Quantize synthetic weights by several recipes: show how each error depends on the distribution.

    \b
    [bold]quanterr bench-formats[/bold]
    [bold]quanterr bench-formats --to 'int4_g{32,64,128},nf4,nvfp4' --scales absmax,mse[/bold]
    [bold]quanterr bench-formats --to fp8_row --seed 7 --json | jq '.rows[] | select(.weights == "outlier columns")'[/bold]

    Weights are Gaussian, uniform, heavy-tailed (Student's t, 4 degrees of freedom), with 1 % of columns 20 times as
    large, and with rows of log-normal scale. The same seed gives the same weights. For your own weights, use quanterr
    sweep.
    """  # noqa: E501 - an example is one line
    require_memory_for_torch()
    from quanterr.recipes import PRESETS, parse_recipes
    from quanterr.recipes.synthetic import bench_formats as bench

    recipes = parse_recipes(options.to or PRESETS, options.scales)
    results = bench(recipes, options.rows, options.columns, options.seed)
    with guard_stdout():
        if show.as_json:
            shape = [options.rows, options.columns]
            fields = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "seed": options.seed, "shape": shape}
            print(strict_json.dumps({**fields, "rows": [row._asdict() for row in results]}), flush=True)
        else:
            _show(results, show.colors)


def _show(results: "list[BenchResult]", color: Color) -> None:
    from quanterr.outputs.sections import Column, Table
    from quanterr.outputs.terminal import make_console, print_table

    weight_names = list(dict.fromkeys(row.weights for row in results))
    names = list(dict.fromkeys(row.recipe for row in results))
    by_place = {(row.recipe, row.weights): row for row in results}
    rows = []
    for name in names:
        per_weight = [by_place[name, weight_name] for weight_name in weight_names]
        cells = ["exact" if row.snr_db is None else f"{row.snr_db:.2f}" for row in per_weight]
        rows.append([name, f"{per_weight[0].bits_per_weight:.4g}", *cells])
    columns = [Column("bits/w", 0), *(Column(weight_name, n + 1) for n, weight_name in enumerate(weight_names))]
    print_table(Table("SNR in dB on synthetic weights", "recipe", columns, rows), make_console(sys.stdout, color))
