"""Files of llama.cpp's and mlx-lm's own converters are written back as their originals: names, orders and numbers.

Each golden conversion records the converter's effect on every element, so what a stored tensor stands for is known.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.conversions import REFUSED, TRANSFORMED, list_conversions, materialize, put_back, read_conversion

import quanterr
from quanterr.errors import CheckpointError

NAMES = [name for name in list_conversions() if name not in REFUSED]
# The rows that the converter keeps of tensors whose other rows belong to no token or position.
KEPT_ROWS = {
    "llama.cpp-gemma3": ("language_model.model.embed_tokens.weight", slice(0, 96)),
    "llama.cpp-xlm_roberta": ("embeddings.position_embeddings.weight", slice(2, 128)),
}
# Findings that are expected: floats that were quantized are no cast of the original's; some codes of 8 bits of this
# conversion are off by one step.
RIGHT, REMARKED = {"unquantized_changed"}, {"mlx-granitemoe": "group_outlier"}
# Factors of Falcon-H1 are numbers that only its config.json has.
NEEDS_CONFIG = "llama.cpp-falcon_h1"


def convert(name, folder, with_config=True):
    """Return a conversion, its files, and the path of what the converter wrote."""
    conversion = read_conversion(name)
    files = materialize(conversion, folder)
    if not with_config:
        (files.original / "config.json").unlink()
    return conversion, files, files.quantized / "model.gguf" if conversion.is_gguf else files.quantized


def write_back(conversion, files, stored, output):
    """Write a converted file as its original, without the tensors that the converter dropped, and return it."""
    quanterr.dequantize(stored, output, like=files.original, dtype="f32", exclude=conversion.dropped)
    return load_file(output / "model.safetensors")


def is_restored(made, wanted, is_changed):
    """Return whether written values are those that stored tensors stand for, to the roundings of their dtype.

    bfloat16 rounds by up to 2^-8 of a number. Numbers are changed back in float32, which rounds twice, and once more
    where the result is near 0, as the logarithm of a number near 1 is.
    """
    relative = (2.0**-8 if made.dtype == torch.bfloat16 else 0.0) + (2.0**-23 if is_changed else 0.0)
    bound = relative * np.abs(wanted) + (3 * 2.0**-24 if is_changed else 0.0)
    return made.shape == wanted.shape and bool((np.abs(made.double().numpy() - wanted) <= bound).all())


def list_changed(conversion):
    """Return the original's tensors whose numbers the converter changes."""
    changed = (tensor for tensor in conversion.tensors.values() if tensor["op"] != "identity")
    return {source for tensor in changed for source, *_ in tensor["source"]}


def list_wrong(conversion, files, made):
    """Return the names of tensors whose written values are not what the stored tensors stand for."""
    wanted = {key: x for key, x in put_back(conversion, files.read).items() if key not in conversion.dropped}
    cut, rows = KEPT_ROWS.get(conversion.name, ("", slice(None)))
    changed = list_changed(conversion)
    assert wanted.keys() == made.keys()
    return [
        key
        for key, x in wanted.items()
        if not is_restored(*((made[key][rows], x[rows]) if key == cut else (made[key], x)), key in changed)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_converted_file_is_written_as_its_original(name, tmp_path):
    conversion, files, stored = convert(name, tmp_path)

    assert [] == list_wrong(conversion, files, write_back(conversion, files, stored, tmp_path / "out"))


@pytest.mark.parametrize("name", sorted({*TRANSFORMED, "llama.cpp-qwen3_vl_moe"} - {NEEDS_CONFIG}))
def test_converted_file_is_written_as_its_original_without_a_config(name, tmp_path):
    conversion, files, stored = convert(name, tmp_path, with_config=False)

    assert [] == list_wrong(conversion, files, write_back(conversion, files, stored, tmp_path / "out"))


def test_missing_config_is_requested_if_it_has_necessary_factors(tmp_path):
    conversion, files, stored = convert(NEEDS_CONFIG, tmp_path, with_config=False)

    with pytest.raises(
        CheckpointError, match=r"multiplied it by embedding_multiplier .* put the original's config\.json"
    ):
        write_back(conversion, files, stored, tmp_path / "out")


@pytest.mark.parametrize("name", KEPT_ROWS)
def test_rows_that_the_converter_leaves_out_are_the_originals(name, tmp_path):
    conversion, files, stored = convert(name, tmp_path)
    made = write_back(conversion, files, stored, tmp_path / "out")
    key, rows = KEPT_ROWS[name]
    whole = load_file(files.original / "model.safetensors")[key]
    left_out = torch.ones(len(whole), dtype=bool)
    left_out[rows] = False

    assert torch.equal(whole[left_out].to(made[key].dtype), made[key][left_out])


def test_file_that_lacks_a_change_of_its_converter_is_refused(tmp_path):
    conversion = read_conversion("llama.cpp-gemma2")
    files = materialize(conversion, tmp_path, left_out={"blk.0.attn_norm.weight"})
    message = "values plus one, as llama.cpp expects for gemma2, but its values fit the original better as values as in"

    with pytest.raises(CheckpointError, match=f"1 tensor cannot be written: .*input_layernorm.weight: {message}"):
        write_back(conversion, files, files.quantized / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama.cpp-llama", "llama.attention.head_count"),
        ("llama.cpp-qwen3_5", "qwen35.ssm.group_count"),
        ("llama.cpp-gpt_neox", "gptneox.attention.head_count"),
        ("llama.cpp-internlm2", "internlm2.attention.head_count_kv"),
    ],
)
def test_order_that_the_metadata_do_not_show_is_refused(name, key, tmp_path):
    conversion = read_conversion(name)
    files = materialize(replace(conversion, keys=conversion.keys | {key: 5}), tmp_path)
    (files.original / "config.json").unlink()

    with pytest.raises(CheckpointError, match="the numbers of heads in the file's metadata do not fit"):
        write_back(conversion, files, files.quantized / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("name", ["llama.cpp-gemma2", "llama.cpp-qwen3_5", "mlx-gpt2_published", "mlx-qwen3_5"])
def test_original_is_written_in_the_form_of_its_conversion(name, tmp_path):
    conversion = read_conversion(name)
    files = materialize(conversion, tmp_path, quantization="F32" if conversion.is_gguf else "BF16")
    stored = files.quantized / "model.gguf" if conversion.is_gguf else files.quantized
    quanterr.dequantize(files.original, tmp_path / "out", like=stored, dtype="f32", exclude=conversion.dropped)
    made = load_file(tmp_path / "out/model.safetensors")

    assert [] == [key for key, x in files.read.items() if not is_restored(made[key], x.astype(float), is_changed=True)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlx-qwen3_5", "input_layernorm.weight: mlx-lm stores it plus one: give the model that it was made from"),
        ("mlx-falcon_h1", "embed_tokens.weight: mlx-lm stores it times embedding_multiplier: give the model"),
        ("mlx-mamba", r"conv1d.weight: MLX stores kernels as \[out, …, in\]: give the model"),
    ],
)
def test_changed_numbers_of_a_file_without_its_original_are_refused(name, message, tmp_path):
    files = materialize(read_conversion(name), tmp_path)

    with pytest.raises(CheckpointError, match=message):
        quanterr.dequantize(files.quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unchanged_file_of_mlx_needs_no_original(tmp_path):
    files = materialize(read_conversion("mlx-gemma2"), tmp_path)
    quanterr.dequantize(files.quantized, tmp_path / "out", dtype="f32")
    made = load_file(tmp_path / "out/model.safetensors")

    assert files.read.keys() == made.keys()
    assert [] == [key for key, x in files.read.items() if not np.array_equal(made[key].float().numpy(), x)]


def test_tensors_of_another_file_are_counted(tmp_path):
    conversion, files, stored = convert("llama.cpp-qwen3_vl", tmp_path)
    made = quanterr.dequantize(stored, tmp_path / "out", like=files.original)

    assert {"in the file of the projector (mmproj)": len(conversion.dropped)} == made.left_out


def measure(report, left_out):
    """Return the SNR of each layer that is quantized: rounding of unquantized numbers is far above 100 dB."""
    return {
        layer.layer_name: layer.snr_db
        for layer in report.layers
        if layer.snr_db < 100 and layer.layer_name not in left_out
    }


# Values of all others are checked above; comparisons of them differ only by names.
@pytest.mark.session
@pytest.mark.parametrize("name", sorted({*TRANSFORMED, *KEPT_ROWS, *REMARKED}))
def test_written_file_compares_as_the_converted_file_does(name, tmp_path):
    conversion, files, stored = convert(name, tmp_path)
    write_back(conversion, files, stored, tmp_path / "out")
    converted, written = (quanterr.compare(files.original, path, device="cpu") for path in (stored, tmp_path / "out"))
    # Their SNR differs if it is computed in the form that the converter stores; tests above compare their values.
    other = {*list_changed(conversion), *KEPT_ROWS.get(name, ())[:1]}

    assert {finding.code for finding in written.findings if finding.severity != "info"} <= {*RIGHT, REMARKED.get(name)}
    assert {item.layer_name for item in written.not_compared} <= set(conversion.dropped)
    assert pytest.approx(measure(converted, other)) == measure(written, other)
