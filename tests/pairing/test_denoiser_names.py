"""Denoisers with diffusers' names and with their authors' names are paired from headers alone."""

import json
from math import inf, log, log10

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.making import compare, finish, numbers, open_pairing, read_whole

import quanterr
from quanterr.pairing.converters.denoisers import families, find_held, naming_between

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

# diffusers' Chroma imports a class of FLUX from a deprecated module, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")

from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES  # noqa: E402
from make_denoiser_names import FILE, MODELS, document, pieces_of  # noqa: E402
from support.denoisers import FAMILIES, converter, make_model, scaled_fp8  # noqa: E402 - they import diffusers

COMFY = "model.diffusion_model."
ROUNDED = 20 / log(10) * 2**-24  # dB: each difference is rounded to float32 once
OF_TABLE = {family: row for row in families() for family, _, _ in MODELS.get(row.name, ())}
OF_TABLE |= {"SDXL": OF_TABLE["SD 1.5"], "Wan image to video": OF_TABLE["Wan"]}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A family, its diffusers folder, its tensors under the authors' names, and the converter between them."""
    folder = tmp_path_factory.mktemp("model")
    built, tensors = make_model(request.param, folder / "diffusers")

    def convert(authors):
        converted = converter(request.param)(checkpoint=dict(authors), config=dict(built.config))
        return {name: converted[name] for name in built.state_dict()}

    return request.param, folder / "diffusers", tensors, convert


def energy(x):
    return float(x.double().square().sum())


def snr(x, y):
    """Return the SNR in dB of tensors by name, in float64; infinite where they are equal."""
    errors = {name: energy(x[name].double() - y[name].double()) for name in x}
    return {name: 10 * log10(energy(x[name]) / error) if error else inf for name, error in errors.items()}


def check(report, expected):
    """Check that everything was compared, without warnings, and with the expected SNR."""
    assert ("pass", [], []) == (report.verdict, report.not_compared, report.findings)
    levels = {layer.layer_name: layer.snr_db for layer in report.layers}
    levels |= dict.fromkeys((layer.layer_name for layer in report.lossless), inf)
    assert expected == pytest.approx(levels, rel=0, abs=ROUNDED)


def with_prefix(tensors):
    return {name if name.startswith(COMFY) else COMFY + name: tensor for name, tensor in tensors.items()}


@pytest.mark.session
def test_quantized_file_in_author_names_compares_with_a_diffusers_folder(model, tmp_path):
    _, folder, tensors, convert = model
    written, values = scaled_fp8(tensors)
    save_file(with_prefix(written), tmp_path / "fp8.safetensors")
    report = quanterr.compare(folder, tmp_path / "fp8.safetensors", device="cpu")

    check(report, snr(convert(tensors), convert(values)))


@pytest.mark.session
def test_quantized_file_in_diffusers_names_compares_with_the_author_file(model, tmp_path):
    family, _, tensors, convert = model
    written, values = scaled_fp8(convert(tensors))
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, tmp_path / "fp8.safetensors")
    save_file(tensors, tmp_path / "original.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    pieces = pieces_of(family, shapes, dict(FAMILIES[family][1]))

    with open_pairing(tmp_path / "original.safetensors", tmp_path / "fp8.safetensors") as plan:
        assert {"scaled_fp8"} == {leftover.name for leftover in plan.leftovers} - not_in_diffusers(pieces)
        values_by_name = {pair.name: read_whole(pair.quantized).clone() for pair in plan.pairs}

    assert {with_own_prefix(name, shapes) for name, held in pieces.items() if held} == values_by_name.keys()
    for name, held in pieces.items():
        parts = [values[piece.name].chunk(1 if piece.part is None else 2)[piece.part or 0] for piece in held]
        prefixed = with_own_prefix(name, shapes)
        assert not parts or torch.equal(torch.cat(parts).flatten(), values_by_name[prefixed].flatten()), name


def not_in_diffusers(pieces):
    return {name for name, held in pieces.items() if not held}


def with_own_prefix(name, names):
    return name if name in names else COMFY + name


def test_table_agrees_with_diffusers_converters(model):
    family, _, tensors, _ = model
    if family not in OF_TABLE:
        assert all(name in tensors for name in load_folder(model))  # both sides have diffusers' names
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = pieces_of(family, shapes, dict(FAMILIES[family][1]))
    held = find_held(OF_TABLE[family], tensors)
    pieces_by_name = {
        name: held[prefixed].pieces if (prefixed := with_own_prefix(name, tensors)) in held else (name,)
        for name in expected
    }

    assert {name: tuple(map(str, pieces)) for name, pieces in expected.items()} == pieces_by_name


def load_folder(model):
    return load_file(next(model[1].glob("*.safetensors")))


def test_no_name_is_ambiguous_between_authors_and_diffusers():
    for family in families():
        parameters = {piece.partition(":")[0] for pieces in family.tensors.values() for piece in pieces}

        assert parameters.isdisjoint(family.tensors)
        assert not any(name.endswith((".weight", ".bias")) for name in family.tensors)


def test_table_is_up_to_date_with_make_denoiser_names():
    wanted = json.loads(FILE.read_text())["source"].split()[1].rstrip(":")
    if diffusers.__version__ != wanted:
        pytest.skip(f"the names were made from diffusers {wanted}; it is {diffusers.__version__}")

    assert document() == FILE.read_text()


def flux_pair(folder):
    """Write FLUX.1 as a diffusers folder, and return its tensors under the authors' names."""
    _, tensors = make_model("FLUX.1", folder / "diffusers")
    return folder / "diffusers", tensors


def compared_with(folder, original, tensors):
    save_file(tensors, folder / "quantized.safetensors")
    return quanterr.compare(original, folder / "quantized.safetensors", device="cpu")


def exchange(tensor, *order):
    """Return the tensor with its equal parts in another order."""
    parts = tensor.chunk(len(order))
    return torch.cat([parts[n] for n in order])


def list_found(report):
    return {(finding.severity, finding.code, finding.layer) for finding in report.findings}


class TestWrongFiles:
    def test_exchanged_key_and_value_rows_are_noticed(self, tmp_path):
        original, tensors = flux_pair(tmp_path)
        name = "double_blocks.0.img_attn.qkv.weight"
        report = compared_with(tmp_path, original, tensors | {name: exchange(tensors[name], 0, 2, 1)})

        assert {
            ("error", "swapped_weight", f"transformer_blocks.0.attn.to_{projection}.weight") for projection in "kv"
        } == list_found(report)

    def test_scale_and_shift_in_diffusers_order_are_noticed(self, tmp_path):
        original, tensors = flux_pair(tmp_path)
        name = "final_layer.adaLN_modulation.1.weight"
        report = compared_with(tmp_path, original, tensors | {name: exchange(tensors[name], 1, 0)})

        assert {("error", "permuted", "norm_out.linear.weight")} == list_found(report)

    def test_joined_tensor_without_all_rows_is_noticed(self, tmp_path):
        original, tensors = flux_pair(tmp_path)
        name = "single_blocks.0.linear1.weight"
        report = compared_with(tmp_path, original, tensors | {name: tensors[name][:-32].clone()})

        assert "inconclusive" == report.verdict
        assert 4 == sum(item.side == "original" for item in report.not_compared)

    def test_tensor_stored_under_both_names_is_noticed(self, tmp_path):
        original, tensors = flux_pair(tmp_path)
        twice = {"x_embedder.linear": tensors["img_in.weight"], "net.img_in.weight": tensors["img_in.weight"]}
        report = compared_with(tmp_path, original, tensors | {name: value.clone() for name, value in twice.items()})
        (left,) = [item for item in report.not_compared if item.layer_name == "x_embedder.weight"]

        assert left.reason.startswith("two weights could hold it: ")


def test_tensor_left_out_by_diffusers_changes_nothing(tmp_path):
    _, tensors = make_model("Z-Image", tmp_path / "diffusers")
    save_file(tensors | {"norm_final.weight": torch.ones(256)}, tmp_path / "authors.safetensors")
    reports = [
        quanterr.compare(*pair, device="cpu")
        for pair in (
            (tmp_path / "diffusers", tmp_path / "authors.safetensors"),
            (tmp_path / "authors.safetensors", tmp_path / "diffusers"),
        )
    ]

    assert ["pass", "pass"] == [report.verdict for report in reports]
    assert [[], []] == [report.not_compared for report in reports]


@pytest.mark.parametrize("family", ["Wan", "FLUX.1", "SD 1.5"])
def test_gguf_file_has_the_author_names(family, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    q8 = gguf.GGMLQuantizationType.Q8_0
    _, tensors = make_model(family, tmp_path / "diffusers")
    writer = gguf.GGUFWriter(tmp_path / "q8.gguf", "flux")
    for name, tensor in tensors.items():
        while tensor.dim() > 1 and len(tensor) == 1:  # in ggml's order of axes
            tensor = tensor[0]
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name.removeprefix(COMFY), gguf.quants.quantize(tensor.numpy(), q8), raw_dtype=q8)
        else:
            writer.add_tensor(name.removeprefix(COMFY), tensor.half().numpy())
    finish(writer)
    report = quanterr.compare(tmp_path / "diffusers", tmp_path / "q8.gguf", device="cpu")

    assert ("pass", []) == (report.verdict, report.not_compared)
    assert 1 == report.coverage.original_compared_fraction == report.coverage.quantized_compared_fraction
    assert {"dense", "gguf_q8_0"} == {layer.format for layer in report.layers}
    assert min(layer.snr_db for layer in report.layers) > 35


@pytest.mark.parametrize(
    "names",
    [
        (["model.layers.0.self_attn.q_proj.weight"], ["model.layers.0.self_attn.qkv_proj.weight"]),
        (["layers.0.attention.wq.weight"], ["model.layers.0.self_attn.q_proj.weight"]),
        (["double_blocks.0.img_attn.qkv.weight"], ["double_blocks.0.img_attn.to_q.weight"]),
        (["double_blocks.0.img_attn.qkv.weight"], []),
    ],
)
def test_other_names_need_no_table(names):
    assert naming_between(*names) is None
    assert naming_between(*names[::-1]) is None


def test_nunchaku_splits_the_author_tensors_differently(tmp_path):
    joined, first, second = numbers(96, 32), numbers(224, 32, seed=1), numbers(32, 160, seed=2)
    original = {
        "double_blocks.0.img_attn.qkv.weight": joined,
        "single_blocks.0.linear1.weight": first,
        "single_blocks.0.linear2.weight": second,
    }
    quantized = {
        "transformer_blocks.0.qkv_proj.weight": joined,
        "single_transformer_blocks.0.qkv_proj.weight": first[:96],
        "single_transformer_blocks.0.mlp_fc1.weight": first[96:],
        "single_transformer_blocks.0.out_proj.weight": second[:, :32],
        "single_transformer_blocks.0.mlp_fc2.weight": second[:, 32:],
    }
    report = compare(tmp_path, original, quantized)

    assert ("pass", [], []) == (report.verdict, report.not_compared, report.layers)
    assert original.keys() == {layer.layer_name for layer in report.lossless}


VAES = [name for name in MODELS if name.startswith("VAE")]


@pytest.mark.parametrize("family", ["LTX-2", "Cosmos-Predict2", *VAES])
def test_listed_names_are_all_converted(family):
    ((name, config, make),) = MODELS[family]
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    pieces = {piece.name for held in pieces_of(name, make(), config).values() for piece in held}

    assert getattr(diffusers, name)(**config).state_dict().keys() == pieces


def vae_pair(family):
    """Return random tensors of a VAE in its authors' names, and the same as diffusers' converter names them."""
    ((name, config, make),) = MODELS[family]
    authors = {key: numbers(*shape, seed=n) for n, (key, shape) in enumerate(make().items())}
    convert = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    return authors, {key: value.contiguous() for key, value in convert(checkpoint=dict(authors), config=config).items()}


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
@pytest.mark.parametrize("family", VAES)
def test_vae_in_author_names_equals_its_diffusers_model(family, prefix, tmp_path):
    authors, converted = vae_pair(family)
    save_file({prefix + name: value for name, value in authors.items()}, tmp_path / "authors.safetensors")
    save_file(converted, tmp_path / "diffusers.safetensors")

    for pair in (("authors", "diffusers"), ("diffusers", "authors")):
        with open_pairing(*(tmp_path / f"{side}.safetensors" for side in pair)) as plan:
            assert [] == plan.leftovers
            assert len(authors) == len(plan.pairs)
            assert all(
                torch.equal(read_whole(each_pair.original), read_whole(each_pair.quantized)) for each_pair in plan.pairs
            )


def test_blocks_of_a_vae_in_the_wrong_order_are_noticed(tmp_path):
    authors, converted = vae_pair("VAE with 4 levels")
    first, last = "decoder.up_blocks.1.resnets.1.conv1.weight", "decoder.up_blocks.1.resnets.2.conv1.weight"
    report = compare(tmp_path, authors, converted | {first: converted[last], last: converted[first]})

    assert {"decoder.up.2.block.1.conv1.weight", "decoder.up.2.block.2.conv1.weight"} == {
        layer.layer_name for layer in report.layers
    }
    assert "inconclusive" == report.verdict
