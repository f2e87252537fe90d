"""An original that is itself quantized: the apparent losses of its codes and scales prove nothing."""

import gguf
import pytest
from support.gguf_stored import Stored, architecture, write_gguf
from support.making import numbers

import quanterr

Q4, Q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
NAMES = [f"blk.{n}.ffn_up.weight" for n in range(4)]
X = {name: numbers(256, 256, seed=n).float().numpy() for n, name in enumerate(NAMES)}


def make_codes(x, ggml_type):
    return {name: (gguf.quants.quantize(value, ggml_type), ggml_type) for name, value in x.items()}


def values(codes):
    return {name: gguf.quants.dequantize(*code) for name, code in codes.items()}


def compare(folder, x, y):
    paths = []
    for side, codes in (("x", x), ("y", y)):
        tensors = [
            Stored(name, ggml_type.name, (256, 256), data.tobytes()) for name, (data, ggml_type) in codes.items()
        ]
        paths.append(write_gguf(folder / f"{side}.gguf", tensors, architecture("llama")))
    return quanterr.compare(*paths, device="cpu")


OF_VALUES, OF_COARSE_VALUES = make_codes(X, Q4), make_codes(values(make_codes(X, Q8)), Q4)


def test_quantized_original_is_a_warning_and_its_candidate_is_not_blamed(tmp_path):
    report = compare(tmp_path, OF_VALUES, OF_COARSE_VALUES)
    (finding,) = report.findings

    assert ("quantized_original", "warning", NAMES) == (finding.code, finding.severity, finding.evidence["layers"])
    assert "the original is itself quantized, and no finer than the quantized checkpoint: 4 weights in gguf_q4_0" in (
        finding.message
    )
    assert f"both differ by {finding.evidence['snr_db']:.1f} to " in finding.message


@pytest.mark.parametrize(
    "y", [make_codes(values(make_codes(X, Q8)), Q4), make_codes(X, Q8)], ids=["made from Q8_0", "the same"]
)
def test_finer_original_is_accepted(tmp_path, y):
    assert not {"quantized_original"} & {finding.code for finding in compare(tmp_path, make_codes(X, Q8), y).findings}


def test_weight_with_another_source_is_damaged(tmp_path):
    y = make_codes(values(OF_VALUES), Q8) | {NAMES[2]: make_codes(X, Q8)[NAMES[2]]}
    findings = {finding.code: finding for finding in compare(tmp_path, OF_VALUES, y).findings}

    assert ("error", NAMES[2]) == (findings["excess_error"].severity, findings["excess_error"].layer)
    assert "quantized_original" not in findings
