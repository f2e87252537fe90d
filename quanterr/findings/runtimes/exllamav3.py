"""What ExLlamaV3 loads.

Reference: turboderp-org/exllamav3@1.6.5 exllamav3/model/config.py, exllamav3/modules/linear.py Linear.load,
exllamav3/architecture/.
"""

from collections.abc import Iterator

from quanterr.documents.loading import DIFFERS, REFUSES, LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import EXLLAMA
from quanterr.findings.runtimes.model import PLAIN, Container, Layout, Runtime, is_one_of, refuse, words
from quanterr.util.strict_json import as_object
from quanterr.util.text import count, display, itemize

LINEAR = "exllamav3/modules/linear.py: Linear.load"


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why no class is found for the model."""
    config = as_object(contents.checkpoint.config.get(CONFIG))
    names, place = config.get("architectures"), "exllamav3/model/config.py: Config.from_directory"
    if not config:
        yield refuse(f"needs {CONFIG}, which is not stored", place)
    elif not isinstance(names, list) or len(names) != 1:
        yield refuse(f"needs one architecture in {CONFIG}: AssertionError", place)
    elif not is_one_of(names[0], EXLLAMA):
        yield refuse(f"has no class for {display(str(names[0]))}: AssertionError, Unknown architecture", place)


def check_codes(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if linear layers have neither the codes of EXL3 nor a tensor named weight."""
    coded = [stored.weight for stored in contents.weights if stored.weight.has_codes and stored.weight.format != "exl3"]
    if names := [weight.name for weight in coded if not weight.codes.name.endswith(".weight")]:
        message = (
            f"finds no codes of EXL3, and no weight, for {count(len(names), 'layer')}: {itemize(names, 3)}: ValueError"
        )
        yield refuse(message, LINEAR, names)


RUNTIME = Runtime(
    "ExLlamaV3",
    "1.6.5",
    layouts=(
        Layout(frozenset({PLAIN}), LINEAR + "_fp16"),
        Layout(words("exl3"), LINEAR + "_exl3"),
        Layout(words("fp8_block"), LINEAR + "_fp16, which dequantizes", words("fp8")),
    ),
    rules=(check_class, check_codes),
    container=Container(False, "reads safetensors files alone", "exllamav3/loader/safetensors.py"),
    findings={
        **dict.fromkeys(("missing_codes", "incomplete"), REFUSES),
        **dict.fromkeys(("config_mismatch", "wrong_convention"), DIFFERS),
    },
)
