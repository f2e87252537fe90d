"""Runs of the converters of mlx-lm, mlx-vlm and mlx-audio on a folder, without its tokenizer and image processor."""

import importlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_runs import Run
from originals import merge


class Mlx:
    """The installed mlx-lm."""

    def __init__(self) -> None:
        self.version = f"mlx-lm {version('mlx-lm')}"
        self.utils = importlib.import_module("mlx_lm.utils")
        # The package also has a function of this name. Its load and save also want a tokenizer.
        self.convert: Any = importlib.import_module("mlx_lm.convert")
        self.convert.load = self.load
        self.convert.save = self.save

    def load(self, path: str, **_: Any) -> Any:
        """Load a model as mlx_lm.utils.load does."""
        model, config = self.utils.load_model(Path(path), lazy=True)
        return model, None, config

    def save(self, path: Path, _source: str, model: Any, _tokenizer: Any, config: dict[str, Any]) -> None:
        """Save a model as mlx_lm.utils.save does."""
        self.utils.save_model(path, model, donate_model=True)
        self.utils.save_config(config, config_path=path / "config.json")

    def run(self, folder: Path, quantized: bool, options: dict[str, Any]) -> Run:
        """Convert a folder in float32; ``quantized``: to 4 bits in groups of 32."""
        import mlx.core as mx

        out = folder.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        self.convert.convert(
            str(folder), str(out), quantize=quantized, q_group_size=32, q_bits=4, dtype="float32", **options
        )
        stored = {}
        for path in sorted(out.glob("model*.safetensors")):
            stored |= mx.load(str(path))
        config = json.loads((out / "config.json").read_text())
        types = {name: self.type_of(name, stored, config.get("quantization", {})) for name in stored}
        return Run(config, {name: np.array(x) for name, x in stored.items()}, types)

    def type_of(self, name: str, stored: dict[str, Any], quantization: dict[str, Any]) -> Any:
        """Return whether a tensor is quantized, or how if the model's own code decides on it."""
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in stored:
            return None
        module_setting = quantization.get(module)
        return (
            {"bits": module_setting["bits"], "group_size": module_setting["group_size"]}
            if isinstance(module_setting, dict)
            else "affine"
        )


class _NoProcessor:
    """What processes images, which the converter copies."""

    def save_pretrained(self, _path: Path) -> None:
        """Save nothing."""


class MlxVlm(Mlx):
    """The installed mlx-vlm."""

    def __init__(self) -> None:
        self.version = f"mlx-vlm {version('mlx-vlm')}"
        self.utils = importlib.import_module("mlx_vlm.utils")
        self.convert: Any = importlib.import_module("mlx_vlm.convert")
        self.convert.fetch_from_hub = self.fetch
        self.load_config, self.utils.load_config = self.utils.load_config, self.read_config
        self.published: dict[str, Any] = {}

    def run(self, folder: Path, quantized: bool, options: dict[str, Any]) -> Run:
        """Convert a folder whose config.json has the fields ``config`` of the options, as published ones have."""
        self.published = options.get("config", {})
        return super().run(folder, quantized, {})

    def read_config(self, path: Path, **_: Any) -> dict[str, Any]:
        """Read config.json as mlx_vlm.utils.load_config does, and add the published fields."""
        return merge(self.load_config(path), self.published)

    def fetch(self, path: Path, **_: Any) -> Any:
        """Load a model as mlx_vlm.utils.fetch_from_hub does."""
        return self.utils.load_model(path, lazy=True), self.read_config(path), _NoProcessor()


class MlxAudio(Mlx):
    """The installed mlx-audio."""

    def __init__(self) -> None:
        self.version = f"mlx-audio {version('mlx-audio')}"
        self.convert: Any = importlib.import_module("mlx_audio.convert")
