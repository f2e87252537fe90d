"""The guide's table of formats and runtimes agrees with the verdicts about files of these formats."""

from fnmatch import fnmatchcase

import pytest
from loaders.cases import CASES
from support.loading_table import METHODS, SHOWN, answer, list_rows

import quanterr
from quanterr.findings.runtimes.judging import RUNTIMES
from quanterr.formats import FORMATS

BY_NAME = {runtime.name: runtime for runtime in RUNTIMES}


def test_each_format_has_an_answer_of_each_runtime():
    rows = list(list_rows())

    assert [row.name for row in FORMATS] == sorted(
        (name for names, _ in rows for name in names), key=[row.name for row in FORMATS].index
    )
    assert {len(SHOWN)} == {len(answers) for _, answers in rows}


@pytest.mark.parametrize("pattern", METHODS)
def test_each_method_is_of_a_format(pattern):
    assert any(fnmatchcase(row.name, pattern) for row in FORMATS)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("bitsandbytes NF4", "bnb_nf4"),
        ("torchao INT8", "torchao_int8"),
        ("HQQ", "hqq"),
        ("compressed-tensors packed INT4", "ct_pack"),
        ("codes of MLX", "mlx_affine"),
        ("GGUF", "gguf_q8_0"),
    ],
)
def test_answer_is_the_verdict_about_a_file(tmp_path, name, form):
    CASES[name].make(tmp_path)
    inspection = quanterr.inspect(
        next(tmp_path.glob("*.gguf"), tmp_path), runtimes=["transformers", "mlx", "llama.cpp"]
    )

    for verdict in inspection.loading:
        table_answer = answer(BY_NAME[verdict.runtime], form)
        assert table_answer in (str(verdict), "not known")
