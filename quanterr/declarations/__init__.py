"""What a checkpoint declares for each module, read in one place for all callers.

``Declarations.of(module)`` returns the scheme that is declared for a module, with the key that declares it. The rules
of quantizing programs are in ``programs``, and how they match names in ``names``.
"""

from collections.abc import Iterable, Mapping, Sequence

from quanterr.declarations.names import Entries
from quanterr.declarations.programs import PROGRAMS, Program, Rules, is_in_blocks, keep_texts
from quanterr.declarations.schemes import Scheme
from quanterr.util.strict_json import JsonFields

__all__ = ["NOTHING", "Declarations", "Entries", "Program", "Scheme", "is_in_blocks", "keep_texts"]

WEIGHT = ".weight"
# Keys whose values look like names of modules, but that no program of PROGRAMS reads for modules.
NOT_ABOUT_MODULES = {
    *("algo_config", "export", "kv_cache_group", "kv_cache_quant_config", "kv_cache_scheme", "meta", "quip_params"),
    *("producer", "rotation_config", "softmax_quant_spec", "sparsity_config", "transform_config", "quantization"),
}


class Declarations:
    """The quantization that a checkpoint's configuration declares, by module."""

    def __init__(self, config: JsonFields, place: str = "config.json") -> None:
        """Find the program that wrote ``config``, the quantization_config in the file ``place``."""
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
        """Return the keys of all groups that match a weight equally well; the first is the one that loaders use."""
        return self._rules.rivals(weight.removesuffix(WEIGHT)) if self._rules.rivals else []

    @property
    def lists_exclusions(self) -> bool:
        """Whether the configuration names each linear module that its program leaves unquantized."""
        return self.program is not None and (self.program.lists_exclusions or bool(self._rules.excluding))

    @property
    def follows_tensors(self) -> bool:
        """Whether loaders treat a module that no entry names as quantized if its scales are stored."""
        return self.program is not None and self.program.follows_tensors

    @property
    def targets(self) -> Sequence[str]:
        """All entries that choose modules to quantize; empty if the program does not choose modules by entries."""
        return self._rules.targets

    def find_idle(self, names: Iterable[str]) -> list[tuple[str, list[str], bool]]:
        """Return keys with entries that match no module, these entries, and whether they are all entries of the key.

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
    def refusals(self) -> list[tuple[str, str]]:
        """Keys and entries whose expression cannot be matched."""
        lists: Sequence[tuple[str, Entries]] = (*self._rules.choosing, *self._rules.excluding)
        return [(key, entry) for key, entries in lists for entry in entries.refused]

    @property
    def unknown(self) -> list[str]:
        """Keys that seem to be about modules, but that the program's rules do not know."""
        if self.program is None or self.program.is_described_by_paths:
            return []
        known = self.program.keys | NOT_ABOUT_MODULES
        return [key for key, value in self.config.items() if key not in known and _contains_module_names(value)]


NOTHING = Declarations({})


def _list_modules(names: Iterable[str]) -> dict[str, None]:
    """Return the modules of tensors, and the modules that contain these."""
    modules: dict[str, None] = {}
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in modules:
            modules[name] = None
    return modules


def _contains_module_names(value: object) -> bool:
    """Return whether the names in a value look like paths of modules."""
    names: object = value if isinstance(value, list) else list(value) if isinstance(value, Mapping) else []
    return isinstance(names, list) and any(isinstance(name, str) and ("." in name or "proj" in name) for name in names)
