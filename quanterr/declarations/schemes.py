"""What a checkpoint declares for one module, in the same terms for all programs."""

from typing import NamedTuple

from quanterr.util.strict_json import JsonFields


class Scheme(NamedTuple):
    """How a module's weight is stored, as declared; fields that are None or empty are not declared."""

    key: str  # key of the configuration that declares it
    entry: str = ""  # entry of this key that names the module; empty if the key is about all modules
    is_quantized: bool = True
    bits: int | None = None
    number: str = ""  # type of the codes: "int" or "float"
    group_size: int | None = None  # columns that share a scale
    is_symmetric: bool | None = None
    fields: JsonFields = {}  # noqa: RUF012 - the declaration as the program writes it, which is not changed
