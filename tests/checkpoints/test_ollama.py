"""Models in Ollama's local store, opened by their names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_stored import LLAMA, Stored, write_gguf

import quanterr
from quanterr import open_checkpoint
from quanterr.errors import CheckpointError

TENSOR, JSON = "application/vnd.ollama.image.tensor", "application/vnd.ollama.image.json"
GOLDEN = Path(__file__).parents[1] / "golden"
OF_OLLAMA = {"scales": "weight.scale", "biases": "weight.bias"}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with llama3.2:1b and a model from the Hugging Face hub, laid out as by Ollama."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    for n, place in enumerate(("registry.ollama.ai/library/llama3.2/1b", "hf.co/someone/model-GGUF/Q8_0")):
        digest = f"{n:064x}"
        write_gguf(tmp_path / f"blobs/sha256-{digest}", [Stored(f"tensor{n}", "F32", (2, 4))], LLAMA)
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 1},
        ]
        (tmp_path / "manifests" / place).parent.mkdir(parents=True)
        (tmp_path / "manifests" / place).write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama3.2:1b", "tensor0"),
        ("library/llama3.2:1b", "tensor0"),
        ("registry.ollama.ai/library/llama3.2:1b", "tensor0"),
        ("hf.co/someone/model-GGUF:Q8_0", "tensor1"),
    ],
)
def test_model_name_opens_its_file(store, name, tensor):
    with open_checkpoint(f"ollama:{name}") as checkpoint:
        assert [tensor] == list(checkpoint.entries)


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:8b", "other"])
def test_missing_model_is_an_error_that_lists_the_existing_ones(store, name):
    with pytest.raises(
        CheckpointError, match=r"it has hf\.co/someone/model-GGUF:Q8_0, llama3\.2:1b; get it with `ollama "
    ):
        open_checkpoint(f"ollama:{name}")


@pytest.mark.parametrize("name", ["", "../../etc", "a/b/c/d", "a:../x", "a b"])
def test_invalid_name_is_an_error(store, name):
    with pytest.raises(CheckpointError, match=r"not a name of Ollama, such as ollama:llama3\.2:1b"):
        open_checkpoint(f"ollama:{name}")


def test_model_with_a_damaged_manifest_is_missing(store):
    (store / "manifests/registry.ollama.ai/library/llama3.2/1b").write_text('{"layers": [{"mediaType": 1}, 2]}')

    with pytest.raises(CheckpointError, match="not in the store of Ollama"):
        open_checkpoint("ollama:llama3.2:1b")


def golden_blobs(format, case, metadata):
    """Return blobs, as Ollama stores them, of the codes that MLX made, and what MLX reads from them."""
    stored, read = (load_file(GOLDEN / format / f"{case}{end}.safetensors") for end in ("", ".expected"))
    blobs = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        blobs.setdefault(f"{module}.weight", {})[f"{module}.{OF_OLLAMA.get(part, part)}"] = tensor
    return {name: (tensors, metadata) for name, tensors in blobs.items()}, read


def write_model(store, name, blobs, config, prefix=""):
    """Write a model of Ollama's MLX engine: a blob for each tensor, and its config.json."""
    layers = []
    for number, (tensor, (tensors, metadata)) in enumerate(blobs.items()):
        digest = f"{abs(hash((name, number))):064x}"
        save_file(tensors, store / f"blobs/sha256-{digest}", metadata=metadata)
        layers.append({"mediaType": TENSOR, "digest": f"sha256:{digest}", "size": 1, "name": prefix + tensor})
    digest = f"{abs(hash(name)):064x}"
    (store / f"blobs/sha256-{digest}").write_text(json.dumps(config))
    layers.append({"mediaType": JSON, "digest": f"sha256:{digest}", "size": 1, "name": f"{prefix}config.json"})
    (store / "manifests/registry.ollama.ai/library" / name).mkdir(parents=True)
    path = store / "manifests/registry.ollama.ai/library" / name / "latest"
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return layers


class TestModelsOfTheMlxEngine:
    @pytest.mark.parametrize(
        ("format", "case", "metadata"),
        [
            ("mlx_affine", "mlx_4_bits", {"quant_type": "int4", "group_size": "64"}),
            ("mlx_affine", "mlx_8_bits", {"quant_type": "Q8", "group_size": "32"}),
            ("mlx_mxfp8", "mlx_shapes", {"quant_type": "mxfp8", "group_size": "32"}),
            ("mlx_nvfp4", "mlx_shapes", {"quant_type": "nvfp4", "group_size": "16"}),
        ],
    )
    def test_every_tensor_has_the_values_that_mlx_reads(self, store, tmp_path, format, case, metadata):
        blobs, read = golden_blobs(format, case, metadata)
        write_model(store, "small", blobs, {"model_type": "llama"})
        save_file(read, tmp_path / "original.safetensors")
        report = quanterr.compare(tmp_path / "original.safetensors", "ollama:small", device="cpu")

        assert [] == report.not_compared
        assert read.keys() == {layer.layer_name for layer in report.lossless}
        assert {format} == {layer.format for layer in report.lossless}

    def test_global_scale_multiplies_the_values(self, store, tmp_path):
        blobs, read = golden_blobs("mlx_nvfp4", "mlx_shapes", {"quant_type": "nvfp4", "group_size": "16"})
        for name, (tensors, _) in blobs.items():
            tensors[f"{name}.global_scale"] = torch.tensor(0.25)
        write_model(store, "small", blobs, {})
        save_file({name: x / 4 for name, x in read.items()}, tmp_path / "original.safetensors")
        report = quanterr.compare(tmp_path / "original.safetensors", "ollama:small", device="cpu")

        assert read.keys() == {layer.layer_name for layer in report.lossless}

    def test_blobs_decide_between_bits_and_groups_without_an_original(self, store):
        codes = {"a.weight": torch.ones(4, 16, dtype=torch.uint32), "a.weight.scale": torch.ones(4, 2)}
        tensors = codes | {"a.weight.bias": torch.zeros(4, 2)}
        for quant_type, group, bits in (("int4", "64", 4), ("int8", "32", 8)):
            for n, metadata in enumerate(
                (
                    {"quant_type": quant_type, "group_size": group},
                    {"a.weight.quant_type": quant_type, "a.weight.group_size": group},
                )
            ):
                write_model(
                    store, f"{quant_type}{n}", {"a.weight": (tensors, metadata)}, {"quantization_config": {"bits": 3}}
                )
                (weight,) = quanterr.inspect(f"ollama:{quant_type}{n}").weights

                assert (bits, 16 * 32 // bits * 4) == (weight.code_bits, weight.elements)
                assert [] == quanterr.inspect(f"ollama:{quant_type}{n}").findings

    def test_stacked_experts_are_compared_with_each_expert(self, store, tmp_path):
        stacked = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        original = {f"layers.0.mlp.experts.{n}.down_proj.weight": stacked[n].contiguous() for n in range(3)}
        save_file(original, tmp_path / "original.safetensors")
        write_model(
            store, "moe", {"layers.0.mlp.experts": ({"layers.0.mlp.experts.down_proj.weight": stacked}, {})}, {}
        )
        report = quanterr.compare(tmp_path / "original.safetensors", "ollama:moe", device="cpu")

        assert original.keys() == {layer.layer_name for layer in report.lossless}

    def test_denoiser_of_an_image_model_is_opened(self, store):
        blob = {"transformer/a.weight": ({"a.weight": torch.ones(2, 2)}, {})}
        layers = write_model(store, "image", blob, {"model_type": "x"})
        layers += write_model(store, "vae", {"vae/b.weight": ({"b.weight": torch.ones(2, 2)}, {})}, {})[:1]
        manifest = store / "manifests/registry.ollama.ai/library/image/latest"
        manifest.write_text(json.dumps({"layers": layers}))
        with open_checkpoint("ollama:image") as checkpoint:
            assert ["a.weight"] == list(checkpoint.entries)

    def test_config_of_the_model_is_read(self, store):
        write_model(store, "small", {"a.weight": ({"a.weight": torch.ones(2, 2)}, {})}, {"model_type": "llama"})
        with open_checkpoint("ollama:small") as checkpoint:
            assert {"config.json": {"model_type": "llama"}} == checkpoint.config

    def test_missing_blob_is_an_error_that_names_it(self, store):
        write_model(store, "small", {"a.weight": ({"a.weight": torch.ones(2, 2)}, {})}, {})
        for path in store.glob("blobs/*"):
            path.unlink()
        with pytest.raises(CheckpointError, match="sha256-"):
            open_checkpoint("ollama:small")
