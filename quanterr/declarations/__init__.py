"""What a checkpoint declares for each module: one answer for all that ask.

``Declarations.of(module)`` resolves the name of a module to its declared scheme, with the key that says so. Rules of
the programs are in ``programs``, how they match names in ``names``.
"""

from collections.abc import Iterable, Mapping, Sequence

from quanterr.declarations.names import Entries
from quanterr.declarations.programs import PROGRAMS, Program, Rules, is_in_blocks, keep_texts
from quanterr.declarations.schemes import Scheme
from quanterr.util.strict_json import JsonFields

__all__ = ["NOTHING", "Declarations", "Entries", "Program", "Scheme", "is_in_blocks", "keep_texts"]

WEIGHT = ".weight"
# Keys that no program of PROGRAMS reads for modules, although their values look as if they named some.
OF_NO_MODULE = {
    *("algo_config", "export", "kv_cache_group", "kv_cache_quant_config", "kv_cache_scheme", "meta", "quip_params"),
    *("producer", "rotation_config", "softmax_quant_spec", "sparsity_config", "transform_config", "quantization"),
}


class Declarations:
    """The quantization that a checkpoint's configuration declares, by module."""

    def __init__(self, config: JsonFields, place: str = "config.json") -> None:
        """Choose the program that wrote ``config``, the quantization_config found in the file ``place``."""
        self.config, self.place = config, place
        method = str(config.get("quant_method") or "").lower()
        self.program: Program | None = next(
            (program for program in PROGRAMS.values() if config and program.is_writer_of(method, config)), None
        )
        self._rules = self.program.read(config) if self.program else Rules(lambda _module: None)
        self._found: dict[str, Scheme | None] = {}

    def of(self, weight: str) -> Scheme | None:
        """Return what is declared for a weight or module; None if nothing is."""
        module = weight.removesuffix(WEIGHT)
        if module not in self._found:
            self._found[module] = self._find_excluded(module) or self._rules.find(module)
        return self._found[module]

    def _find_excluded(self, module: str) -> Scheme | None:
        named = ((key, entries.find(module)) for key, entries in self._rules.excluding)
        return next((Scheme(key, entry, is_quantized=False) for key, entry in named if entry is not None), None)

    def find_rivals(self, weight: str) -> list[str]:
        """Return the keys of all groups that claim a weight with equal right, the one that loaders follow first."""
        return self._rules.rivals(weight.removesuffix(WEIGHT)) if self._rules.rivals else []

    @property
    def lists_exclusions(self) -> bool:
        """Whether the configuration names each linear module that its program leaves unquantized."""
        return self.program is not None and (self.program.lists_exclusions or bool(self._rules.excluding))

    @property
    def follows_tensors(self) -> bool:
        """Whether loaders quantize a module that no entry names if its scales are stored."""
        return self.program is not None and self.program.follows_tensors

    @property
    def targets(self) -> Sequence[str]:
        """All entries that choose modules to quantize; empty if the program chooses modules in another way."""
        return self._rules.targets

    def find_idle(self, names: Iterable[str]) -> list[tuple[str, list[str], bool]]:
        """Return keys with entries that name no module, these entries, and whether they are all entries of the key.

        ``names`` are those of all stored tensors. Keys that only exclude modules do not count.
        """
        if any(entries.all for _, entries in self._rules.choosing):
            for module in _list_modules(names):
                self.of(module)
        return [
            (key, entries.idle, len(entries.idle) == len(entries.all))
            for key, entries in self._rules.choosing
            if entries.idle
        ]

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Keys and entries whose expression cannot be matched."""
        lists: Sequence[tuple[str, Entries]] = (*self._rules.choosing, *self._rules.excluding)
        return [(key, entry) for key, entries in lists for entry in entries.refused]

    @property
    def unknown(self) -> list[str]:
        """Keys that seem to be about modules, which the rules of the program do not know."""
        if self.program is None or self.program.is_described_by_paths:
            return []
        known = self.program.keys | OF_NO_MODULE
        return [key for key, value in self.config.items() if key not in known and _names_modules(value)]


NOTHING = Declarations({})


def _list_modules(names: Iterable[str]) -> dict[str, None]:
    """Return the modules of tensors, and the modules that contain these."""
    found: dict[str, None] = {}
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found[name] = None
    return found


def _names_modules(value: object) -> bool:
    """Return whether the names in a value look like paths of modules."""
    names: object = value if isinstance(value, list) else list(value) if isinstance(value, Mapping) else []
    return isinstance(names, list) and any(isinstance(name, str) and ("." in name or "proj" in name) for name in names)
