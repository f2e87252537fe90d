"""Images and sounds of conversations, which are files that a model's own processor reads.

A part of a message is {"type": "image", "path": "cat.png"} or {"type": "audio", "path": "hello.wav"}, a path from the
folder of the conversations.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from quanterr.errors import UsageError
from quanterr.evaluation.models.folder import ModelFolder
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display


def _read_image(path: Path, _: Any) -> Any:
    return import_module("PIL.Image").open(path).convert("RGB")


def _read_sound(path: Path, processor: Any) -> Any:
    """Return one channel, (samples,) float32, at the rate that the processor takes."""
    from transformers.audio_utils import load_audio

    if not path.is_file():
        raise FileNotFoundError("no such file")  # load_audio would take the path of a missing file for encoded sound
    samples = load_audio(str(path), sampling_rate=processor.feature_extractor.sampling_rate)
    if not len(samples):
        raise ValueError("it has no samples")  # an extractor would turn it into silence
    return samples


class _Medium(NamedTuple):
    """A kind of file: the processor's attribute that takes it, a function that reads it, and the packages for that."""

    reader: str
    read: Callable[[Path, Any], Any]
    needs: str


_MEDIA = {
    "image": _Medium("image_processor", _read_image, "pillow"),
    "audio": _Medium("feature_extractor", _read_sound, "soundfile soxr (an older transformers: librosa)"),
}


def is_part(part: object) -> bool:
    """Return whether a part of a message is a text, or names the file of an image or a sound."""
    if not isinstance(part, dict):
        return False
    part_type = part.get("type")
    return part_type in ("text", *_MEDIA) and isinstance(part.get("text" if part_type == "text" else "path"), str)


def list_parts(message: JsonObject) -> list[JsonObject]:
    """Return the parts of a message; a message that is a text has one part."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def open_media(part: JsonObject, folder: Path, processor: Any, where: str) -> JsonObject:
    """Return a part of a message with its file read, as ``processor`` takes it.

    Raises:
        UsageError: the file cannot be read, or the model has no input for it.
    """
    part_type = str(part["type"])
    if part_type == "text":
        return part
    medium, path = _MEDIA[part_type], folder / str(part["path"])
    if not hasattr(processor, medium.reader):
        raise UsageError(f"{where}: {display(str(path))}: the model takes no {part_type}")
    try:
        return {"type": part_type, part_type: medium.read(path, processor)}
    except ImportError as error:
        raise UsageError(f"{where}: {display(str(path))}: to read it, pip install {medium.needs}") from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of many classes for damaged bytes
        raise UsageError(
            f"{where}: {display(str(path))}: no {part_type} that can be read: {display(str(error), 300)}"
        ) from error


def make_processor(folder: ModelFolder, where: str) -> Any:
    """Return the processor of a model.

    Raises:
        UsageError: transformers cannot build it.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many classes if files of a processor are missing
        raise UsageError(
            f"{where}: has images or sounds, but {display(folder.address)} has no processor that transformers can "
            f"build: {display(str(error), 300)}"
        ) from error
