"""A GGUF file is checked for the type in its name and metadata."""

import pytest
import torch
from support.gguf_stored import LLAMA, U32, Stored, key, write_gguf

import quanterr
from quanterr.findings.file_types import FILE_TYPES

NUMBERS = {name: number for number, name in FILE_TYPES.items()}
# The most bits that llama_tensor_get_type_impl gives to single weights of each mixture, in a model of one layer.
V_AND_DOWN = ("attn_v", "attn_qkv", "ffn_down")
ALL_BUT_UP = (*V_AND_DOWN, "attn_output")
MORE_BITS = {
    "Q2_K": dict.fromkeys(("attn_v", "attn_qkv"), "Q4_K") | dict.fromkeys(("attn_output", "ffn_down"), "Q3_K"),
    "Q2_K_S": dict.fromkeys(V_AND_DOWN, "Q4_K"),
    "Q3_K_M": dict.fromkeys(V_AND_DOWN, "Q5_K") | {"attn_output": "Q4_K"},
    "Q3_K_L": dict.fromkeys(ALL_BUT_UP, "Q5_K"),
    "Q4_0": {"ffn_down": "Q4_1"},
    "Q4_K_S": dict.fromkeys(V_AND_DOWN, "Q5_K"),
    "Q4_K_M": dict.fromkeys(V_AND_DOWN, "Q6_K"),
    "Q5_0": {"ffn_down": "Q5_1"},
    "Q5_K_M": dict.fromkeys(V_AND_DOWN, "Q6_K"),
    "IQ1_S": {"attn_v": "Q4_K", "attn_qkv": "Q4_K", "attn_output": "IQ2_XXS", "ffn_down": "Q2_K"},
    "IQ1_M": {"attn_v": "Q4_K", "attn_qkv": "Q4_K", "attn_output": "IQ2_XXS", "ffn_down": "Q2_K"},
    "IQ2_XXS": {"attn_v": "Q4_K", "attn_qkv": "Q4_K", "ffn_down": "Q2_K"},
    "IQ2_XS": {"attn_v": "Q4_K", "attn_qkv": "Q4_K", "ffn_down": "Q2_K"},
    "IQ2_S": {"attn_v": "Q4_K", "attn_qkv": "Q4_K", "attn_output": "IQ3_S", "ffn_down": "IQ3_S"},
    "IQ2_M": {"attn_v": "Q4_K", "attn_qkv": "Q4_K", "attn_output": "IQ3_S", "ffn_down": "IQ3_S"},
    "IQ3_XXS": dict.fromkeys(V_AND_DOWN, "Q4_K") | {"attn_q": "IQ2_S", "attn_k": "IQ2_S", "attn_output": "IQ3_S"},
    "IQ3_XS": {"attn_v": "Q4_K"} | dict.fromkeys(("attn_q", "attn_k", "ffn_up", "ffn_gate"), "IQ3_XXS"),
    "IQ3_S": {"attn_v": "Q4_K"},
    "IQ3_M": dict.fromkeys(ALL_BUT_UP, "Q4_K"),
    "IQ4_NL": dict.fromkeys(V_AND_DOWN, "Q5_K"),
    "IQ4_XS": dict.fromkeys(V_AND_DOWN, "Q5_K"),
}
# llama_ftype_get_default_type, where it differs from the name up to the size.
DEFAULT = {"IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "MXFP4_MOE": "MXFP4"}
GATED = {"attn_q": 4, "attn_k": 1, "attn_v": 1, "attn_output": 4, "ffn_gate": 11, "ffn_up": 11, "ffn_down": 11}
GPT2_TENSORS = {"attn_qkv": 12, "attn_output": 4, "ffn_up": 16, "ffn_down": 16}  # GPT-2 has no gate matrix


def default(name):
    base = name.rpartition("_")[0] if "_K_" in name else name
    return DEFAULT.get(name, base)


def weights(sizes, of, cols=256):
    """Return weights of one layer: rows in units of 8, each with the type that ``of`` gives."""
    rows = {f"blk.0.{name}.weight": (8 * n, of(name)) for name, n in sizes.items()}
    return [Stored(name, dtype, (n, cols)) for name, (n, dtype) in rows.items()]


def write(path, tensors, name=None):
    keys = () if name is None else (key("general.file_type", U32, NUMBERS[name]),)
    around = [Stored("token_embd.weight", "Q8_0", (512, 256)), Stored("blk.0.attn_norm.weight", "F32", (256,))]
    return write_gguf(path, [*around, *tensors], (*LLAMA, *keys))


def list_findings(path):
    return [
        (finding.severity, finding.message)
        for finding in quanterr.inspect(path).findings
        if finding.code == "misnamed_type"
    ]


@pytest.mark.parametrize("sizes", [GATED, GPT2_TENSORS], ids=["gated", "plain"])
@pytest.mark.parametrize("name", NUMBERS)
def test_every_mixture_of_llama_quantize_is_accepted(tmp_path, name, sizes):
    tensors = weights(sizes, lambda weight: MORE_BITS.get(name, {}).get(weight, default(name)))

    assert [] == list_findings(write(tmp_path / f"model-{name}.gguf", tensors, name))


def test_fallback_is_a_warning_with_its_reason(tmp_path):
    of = {"attn_v": "Q8_0", "ffn_down": "Q8_0"}
    tensors = weights(GATED, lambda name: of.get(name, "Q5_0"), 288)
    ((severity, message),) = list_findings(write(tmp_path / "model-q4_k_m.gguf", tensors, "Q4_K_M"))

    assert "warning" == severity
    assert message.startswith(
        "general.file_type states Q4_K_M and the name model-q4_k_m.gguf states Q4_K_M, but no weight is Q4_K"
    )
    assert "Q5_0 72%, Q8_0 28%; 288 columns do not fill blocks of 256" in message


def test_minority_type_is_a_warning(tmp_path):
    tensors = weights(GATED, lambda name: "Q4_K" if name == "attn_q" else "Q5_0")
    ((severity, message),) = list_findings(write(tmp_path / "m.gguf", tensors, "Q4_K_S"))

    assert ("warning", True) == (severity, "only 9.3% of the weights are Q4_K: Q5_0 91%, Q4_K 9%" in message)


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("Model-7B.Q5_K_M.gguf", "warning"),
        ("model-UD-Q5_K_XL.gguf", "info"),  # dynamic: somebody chose the type of each tensor
        ("model-IQ4_XS-00001-of-00001.gguf", "warning"),
        ("model-Q8_0.gguf", "warning"),
        ("model.i1-Q4_K_S.gguf", None),
        ("model-UD-Q4_K_XL.gguf", None),
        ("model-Q4_K_L.gguf", None),
        ("Q5_K_M-merge-Q4_K_M.gguf", None),  # if a name holds two types, the last one counts
        ("model-Q5_K_R4.gguf", None),  # a type that only another program writes
        ("model-Q7_K.gguf", None),  # a name without a type
        ("model.gguf", None),
    ],
)
def test_file_names_are_read(tmp_path, name, severity):
    findings = list_findings(write(tmp_path / name, weights(GATED, lambda _: "Q4_K"), "Q4_K_M"))

    assert [severity] * (severity is not None) == [finding for finding, _ in findings]


def test_unquantized_file_is_a_warning(tmp_path):
    ((severity, message),) = list_findings(write(tmp_path / "m.gguf", weights(GATED, lambda _: "F32"), "Q8_0"))

    assert ("warning", True) == (severity, "no weight is Q8_0: F32 100%" in message)


def test_experts_trained_in_four_bits_do_not_contradict_the_name(tmp_path):
    path = write_gguf(
        tmp_path / "m-F16.gguf", weights(GATED, lambda _: "MXFP4"), (*LLAMA, key("general.file_type", U32, 1))
    )

    assert [] == list_findings(path)


def test_comparison_checks_the_quantized_side(tmp_path):
    sizes = dict.fromkeys(GATED, 1)
    before = write(tmp_path / "a.gguf", weights(sizes, lambda _: "F32"))
    after = write(tmp_path / "b.gguf", weights(sizes, lambda _: "Q8_0"), "Q4_K_M")

    codes = [finding.code for finding in quanterr.compare(before, after, device="cpu").findings]
    assert 1 == codes.count("misnamed_type")


def test_other_files_than_gguf_are_not_checked(tmp_path):
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(4, 64)}, tmp_path / "model-Q4_K_M.safetensors")
    assert [] == list_findings(tmp_path / "model-Q4_K_M.safetensors")
