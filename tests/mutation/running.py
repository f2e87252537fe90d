"""The families: each job makes pairs, compares them and throws them away."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mutation import (
    alone,
    both_sides,
    commands,
    configs,
    excuses,
    golden,
    methods,
    real,
    scales,
    sources,
    unquantized,
    unusual,
)
from mutation.judging import Outcome
from mutation.layouts import LAYOUTS, STACKS
from mutation.pairs import Bench


class Job(NamedTuple):
    """The pairs that one process makes."""

    name: str
    outcomes: Callable[[Bench], Iterator[Outcome]]


def run(name: str, keep: Path | None = None) -> list[Outcome]:
    """Return all outcomes of the job of that name."""
    job = next(job for job in JOBS if job.name == name)
    with tempfile.TemporaryDirectory() as folder:
        return list(job.outcomes(Bench(Path(folder), keep)))


JOBS = [
    *(Job(f"sound {layout.name}", partial(scales.sound_pairs, layout=layout)) for layout in (*LAYOUTS, *STACKS)),
    *(Job(layout.name, partial(scales.outcomes, layout=layout)) for layout in (*LAYOUTS, *STACKS)),
    *(Job(f"methods {layout.name}", partial(methods.outcomes, layout=layout)) for layout in LAYOUTS),
    Job("real GPTQ", real.gptq),
    Job("real harsh GPTQ", real.harsh),
    Job("real fused", real.fuse),
    *(Job(f"real {name}", partial(real.damage, name=name)) for name in real.LAYOUTS),
    Job("real undeclared GPTQ", real.quantize_undeclared),
    *(
        Job(f"excuses {excuses.case_name(*case)}", partial(excuses.outcomes, declared=case[0], file=case[1]))
        for case in excuses.CASES
    ),
    Job("commands", commands.outcomes),
    Job("folds", unquantized.folds),
    Job("unusual", unusual.outcomes),
    Job("biases", unquantized.biases),
    Job("corrections", unquantized.corrections),
    *(Job(name, partial(unquantized.casts, name=name)) for name in unquantized.CASTS),
    *(Job(f"configs {name}", partial(configs.outcomes, name=name)) for name in configs.LAYOUT_NAMES),
    *(Job(f"sources {name}", partial(sources.outcomes, name=name)) for name in sources.LAYOUT_NAMES),
    *(Job(f"alone {layout.name}", partial(alone.outcomes, name=layout.name)) for layout in (*LAYOUTS, *STACKS)),
    *(Job(f"both experts {name}", partial(both_sides.experts, name=name)) for name in both_sides.EXPERT_LAYOUT_NAMES),
    *(Job(f"both sides {name}", partial(both_sides.outcomes, name=name)) for name in both_sides.LAYOUT_NAMES),
    *(Job(f"golden {golden.name_of(case)}", partial(golden.outcomes, case=case)) for case in golden.cases()),
]
