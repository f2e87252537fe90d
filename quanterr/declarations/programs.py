"""What each quantizing program declares for modules: the keys of its configuration, and how entries match modules.

    compressed-tensors   config_groups.*.targets, ignore
    GPTQ, GPTQModel      bits, group_size, sym, dynamic ("-:" excludes, "+:" or no sign overrides), lm_head,
                         modules_in_block_to_quantize
    AWQ                  bits, group_size, zero_point, modules_to_not_convert
    AutoRound            bits, group_size, sym, extra_config (16 bits: left unquantized), block_name_to_quantize
    Quark                global_quant_config, layer_quant_config, layer_type_quant_config, exclude
    ModelOpt             quant_algo, group_size, quantized_layers, exclude_modules or ignore
    FP8                  modules_to_not_convert or ignored_layers
    bitsandbytes         load_in_4bit, load_in_8bit, llm_int8_skip_modules
    torchao              quant_type, with FqnToConfig by name or expression; modules_to_not_convert
    HQQ                  quant_config (of all or by the end of a name), skip_modules
    quanto               weights, modules_to_not_convert
    SDNQ                 weights_dtype, modules_dtype_dict, modules_quant_config, modules_to_not_convert
    MLX                  bits, group_size, mode; false or the same keys for a path

Reference: vllm-project/compressed-tensors utils/match.py; ModelCloud/GPTQModel quantization/config.py dynamic_get;
casper-hansen/AutoAWQ utils/module.py exclude_layers_to_not_quantize; vllm-project/vllm
model_executor/layers/quantization/ inc.py get_layer_config, modelopt.py is_layer_excluded, quark/quark.py, fp8.py;
huggingface/transformers quantizers/quantizers_utils.py should_convert_module; pytorch/ao quantization/quant_api.py
FqnToConfig; Disty0/sdnq quantizer.py; ml-explore/mlx-lm utils.py load_model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quanterr.declarations.names import Entries, Matching
from quanterr.declarations.schemes import Scheme
from quanterr.util.strict_json import JsonFields, as_object

UNQUANTIZED_BITS = 16  # AutoRound declares a module with as many bits as left unquantized
LINEAR, COMPRESSED_TENSORS = "Linear", "compressed-tensors"
CLASS_NAME = re.compile(r"[A-Z]\w*")  # a target that is the name of a class of layers
LINEAR_CLASS = re.compile(r"Linear|Expert|MoE|MLP|Conv1D")  # a class with such a name may have matrices of weights
MODULE_IN_BLOCKS = re.compile(r"(?:.*\.)?(?:layers|h|blocks|decoder)\.\d+\.")
MODULE_OF_TOWER = re.compile(r"(?:.*\.)?(?:visual|vision\w*|audio\w*|speech\w*|mtp|multi_modal_projector|\w*_tower)\.")


def is_in_blocks(module: str) -> bool:
    """Return whether a module is in a block of the language model, as GPTQ, AWQ and AutoRound quantize no others."""
    return MODULE_IN_BLOCKS.match(module) is not None and MODULE_OF_TOWER.match(module) is None


Find = Callable[[str], Scheme | None]


class Rules(NamedTuple):
    """A configuration as its program reads it."""

    find: Find  # module → what is declared for it
    choosing: Sequence[tuple[str, Entries]] = ()  # keys that choose modules to quantize, or other schemes for modules
    excluding: Sequence[tuple[str, Entries]] = ()  # keys that leave modules unquantized
    targets: Sequence[str] = ()  # names and patterns, if no other modules are quantized
    rivals: Callable[[str], list[str]] | None = None  # module → all groups that match it, of which the first is used


class Program(NamedTuple):
    """A program that writes a quantization_config."""

    name: str
    is_writer_of: Callable[[str, JsonFields], bool]  # (quant_method in lower case, configuration)
    read: Callable[[JsonFields], Rules]
    keys: frozenset[str]  # keys that choose modules
    lists_exclusions: bool = False  # each linear module that it leaves unquantized is listed by name or pattern
    leaves_head: bool = True  # the output layer stays unquantized without being listed
    is_for_blocks: bool = False  # it quantizes only modules in blocks of the language model
    is_for_linear: bool = False  # it quantizes Linear modules alone, and no stacks of experts
    is_described_by_paths: bool = False  # its keys are paths of modules
    follows_tensors: bool = False  # a module that no entry names is quantized if its scales are stored


def keep_texts(value: object) -> list[str]:
    """Return the strings of a list, or a string as a list of one; empty for any other value."""
    given = value if isinstance(value, list) else [value]
    return [item for item in given if isinstance(item, str)]


def _as_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _collect(config: JsonFields, keys: Sequence[str], matching: Matching) -> list[tuple[str, Entries]]:
    """Return the entries of each list of these keys that is not empty."""
    lists = ((key, keep_texts(config.get(key))) for key in keys)
    return [(key, Entries(texts, matching)) for key, texts in lists if texts]


def _make_list_reader(
    keys: Sequence[str], matching: Matching, usual: Callable[[JsonFields], Scheme]
) -> Callable[[JsonFields], Rules]:
    """Return the reader for a program that quantizes all modules in the same way, except those in lists."""

    def read(config: JsonFields) -> Rules:
        excluding, scheme = _collect(config, keys, matching), usual(config)
        return Rules(lambda _module: scheme, excluding=excluding)

    return read


# compressed-tensors


def _read_group(key: str, entry: str, group: JsonFields) -> Scheme:
    weights = as_object(group.get("weights"))
    size = _as_int(weights.get("group_size"))
    number, bits = weights.get("type"), _as_int(weights.get("num_bits"))
    symmetric = _as_bool(weights.get("symmetric")) if weights else None
    return Scheme(key, entry, True, bits, number if number in ("int", "float") else "", size, symmetric, group)


def _read_compressed_tensors(config: JsonFields) -> Rules:
    groups = {
        f"config_groups.{name}": as_object(target) for name, target in as_object(config.get("config_groups")).items()
    }
    targets = {key: keep_texts(group.get("targets")) for key, group in groups.items()}
    named = {
        key: Entries([target for target in texts if not CLASS_NAME.fullmatch(target)], Matching.EXACT)
        for key, texts in targets.items()
    }
    of_linear = [
        key
        for key, texts in targets.items()
        if any(CLASS_NAME.fullmatch(target) and LINEAR_CLASS.search(target) for target in texts)
    ]

    def find(module: str) -> Scheme | None:
        for key, entries in named.items():  # names take precedence over classes
            if (entry := entries.find(module)) is not None:
                return _read_group(key, entry, groups[key])
        return _read_group(of_linear[0], "", groups[of_linear[0]]) if of_linear else None

    def find_rivals(module: str) -> list[str]:
        return [key for key, entries in named.items() if entries.find(module)] or of_linear

    return Rules(
        find,
        [(f"{key}.targets", entries) for key, entries in named.items()],
        _collect(config, ("ignore",), Matching.EXACT),
        [text for texts in targets.values() for text in texts],
        find_rivals,
    )


# GPTQ, AWQ and AutoRound


def _read_words(config: JsonFields, usual: Scheme | None = None, key: str = "", entry: str = "") -> Scheme:
    """Read the keys that these programs share; for missing keys, the values are those of ``usual``."""
    bits, size = (
        next((number for name in names if (number := _as_int(config.get(name))) is not None), None)
        for names in (("bits", "w_bit"), ("group_size", "q_group_size"))
    )
    symmetric = _as_bool(config.get("sym"))
    if symmetric is None and (zero_point := _as_bool(config.get("zero_point"))) is not None:
        symmetric = not zero_point
    usual = usual or Scheme("bits", number="int")
    return usual._replace(
        key=key or usual.key,
        entry=entry,
        bits=usual.bits if bits is None else bits,
        group_size=usual.group_size if size is None else size,
        is_symmetric=usual.is_symmetric if symmetric is None else symmetric,
        fields={**usual.fields, **config},
    )


def _read_gptq(config: JsonFields) -> Rules:
    usual, fields_by_pattern = _read_words(config), as_object(config.get("dynamic"))
    patterns = {
        key.removeprefix("-:").removeprefix("+:"): (key, as_object(fields)) for key, fields in fields_by_pattern.items()
    }
    optional = [pattern for pattern, (key, _) in patterns.items() if key.startswith("-:")]
    dynamic = Entries(patterns, Matching.START, optional)
    excluding = _collect(config, ("modules_to_not_convert",), Matching.PATH)
    inside = config.get("modules_in_block_to_quantize")
    flat = [text for block in inside for text in keep_texts(block)] if isinstance(inside, list) else []
    chosen = Entries(flat, Matching.PATH)

    def find(module: str) -> Scheme | None:
        if (pattern := dynamic.find(module)) is not None:
            key, fields = patterns[pattern]
            if key.startswith("-:"):
                return Scheme("dynamic", key, is_quantized=False)
            return _read_words(fields, usual, "dynamic", key)
        if flat and chosen.find(module) is None and is_in_blocks(module):
            return Scheme("modules_in_block_to_quantize", is_quantized=False)
        return usual

    return Rules(find, [("dynamic", dynamic), ("modules_in_block_to_quantize", chosen)], excluding)


def _read_awq(config: JsonFields) -> Rules:
    usual, excluding = _read_words(config), _collect(config, ("modules_to_not_convert",), Matching.TEXT)
    return Rules(lambda _module: usual, excluding=excluding)


def _read_auto_round(config: JsonFields) -> Rules:
    usual, extra_config = _read_words(config), as_object(config.get("extra_config"))
    optional = [
        name
        for name, fields in extra_config.items()
        if (_as_int(as_object(fields).get("bits")) or 0) >= UNQUANTIZED_BITS
    ]
    extra = Entries(extra_config, Matching.SEARCH, optional)
    excluding = _collect(config, ("modules_to_not_convert",), Matching.TEXT)

    def find(module: str) -> Scheme | None:
        entry = extra.find(module)
        scheme = usual if entry is None else _read_words(as_object(extra_config[entry]), usual, "extra_config", entry)
        is_int = str(scheme.fields.get("data_type") or "int").startswith(("int", "uint"))
        is_quantized = (scheme.bits or 0) < UNQUANTIZED_BITS
        return scheme._replace(number="int" if is_int else "float", is_quantized=is_quantized)

    return Rules(find, [("extra_config", extra)], excluding)


# Quark

QUARK_TYPE = re.compile(r"(?:mx_?)?(u?int|fp|bfp|float)(\d+)")


def _read_quark_place(place: JsonFields, key: str, entry: str = "") -> Scheme:
    weight = place.get("weight")
    stages = [
        as_object(stage) for stage in (weight if isinstance(weight, list) else [weight]) if isinstance(stage, dict)
    ]
    if not stages:
        return Scheme(key, entry, is_quantized=False, fields=place)
    # Of several stages, the one with the fewest bits makes the codes: INT4 of INT4-FP8, FP4 but not the FP8 of scales.
    stages_by_type = [(QUARK_TYPE.match(str(stage.get("dtype"))), stage) for stage in stages]
    match, first = min(stages_by_type, key=lambda pair: int(pair[0][2]) if pair[0] else UNQUANTIZED_BITS)
    size = _as_int(first.get("group_size")) if first.get("qscheme") == "per_group" else None
    number = "" if match is None else "int" if match[1].endswith("int") else "float"
    return Scheme(
        key, entry, True, int(match[2]) if match else None, number, size, _as_bool(first.get("symmetric")), place
    )


def _read_quark(config: JsonFields) -> Rules:
    excluding = _collect(config, ("exclude",), Matching.GLOB)
    layers = as_object(config.get("layer_quant_config"))
    types = as_object(config.get("layer_type_quant_config"))
    by_layer = Entries(layers, Matching.GLOB)
    linear = next((as_object(fields) for name, fields in types.items() if name.rstrip("'>").endswith(LINEAR)), None)
    usual = (
        _read_quark_place(linear, "layer_type_quant_config")
        if linear
        else _read_quark_place(as_object(config.get("global_quant_config")), "global_quant_config")
    )

    def find(module: str) -> Scheme | None:
        if (entry := by_layer.find(module)) is not None:
            return _read_quark_place(as_object(layers[entry]), "layer_quant_config", entry)
        return usual

    return Rules(find, [("layer_quant_config", by_layer)], excluding)


# ModelOpt

# Beginning of quant_algo, in order → (type of the codes, their bits).
ALGORITHMS = (
    ("W4A8_NVFP4", ("float", 4)),
    ("W4A8_MXFP4", ("float", 4)),
    ("W4A16_NVFP4", ("float", 4)),
    ("NVFP4", ("float", 4)),
    ("MXFP4", ("float", 4)),
    ("MXFP8", ("float", 8)),
    ("FP8", ("float", 8)),
    ("W4A", ("int", 4)),
    ("INT4", ("int", 4)),
    ("W8A", ("int", 8)),
    ("INT8", ("int", 8)),
)


def _read_algorithm(place: JsonFields, key: str, entry: str = "") -> Scheme:
    algorithm = str(place.get("quant_algo") or "").upper()
    number, bits = next((codes for begin, codes in ALGORITHMS if algorithm.startswith(begin)), ("", None))
    is_quantized = "quant_algo" not in place or algorithm not in ("", "NONE")
    return Scheme(key, entry, is_quantized, bits, number, _as_int(place.get("group_size")), None, place)


def _read_modelopt(config: JsonFields) -> Rules:
    given = config
    config = as_object(config.get("quantization")) | config  # type: ignore[operator] # a section that vLLM reads, too
    excluding = _collect(config, ("exclude_modules", "ignore"), Matching.TEXT)
    layers = as_object(config.get("quantized_layers"))
    by_layer = Entries(layers, Matching.GLOB)
    groups = _read_compressed_tensors(config) if as_object(config.get("config_groups")) else None
    algorithm = str(config.get("quant_algo") or "").upper()

    def find(module: str) -> Scheme | None:
        if (entry := by_layer.find(module)) is not None:
            return _read_algorithm(as_object(layers[entry]), "quantized_layers", entry)
        if layers:
            return None
        if not algorithm and groups:
            return groups.find(module)
        return _read_algorithm(config, "quant_algo")._replace(fields=given)

    return Rules(find, [("quantized_layers", by_layer)], excluding, by_layer.all or (groups.targets if groups else ()))


# Loaders of transformers


def _read_float8(config: JsonFields) -> Scheme:
    if config.get("quant_method") == "w4afp8":  # 4 bits for experts
        return Scheme("quant_method", fields=config)
    return Scheme("quant_method", "", True, 8, "float", fields=config)


def _read_bitsandbytes(config: JsonFields) -> Scheme:
    bits = 4 if config.get("load_in_4bit") is True else 8 if config.get("load_in_8bit") is True else None
    return Scheme("load_in_4bit" if bits == 4 else "load_in_8bit", "", True, bits, fields=config)


def _read_plain(config: JsonFields) -> Scheme:
    bits = next((number for key in ("bits", "w_bit", "num_bits") if (number := _as_int(config.get(key)))), None)
    return Scheme("quant_method", "", True, bits, fields=config)


QUANTO = {"int8": ("int", 8), "int4": ("int", 4), "int2": ("int", 2), "float8": ("float", 8)}


def _read_quanto(config: JsonFields) -> Scheme:
    number, bits = QUANTO.get(str(config.get("weights")), ("", None))
    return Scheme("weights", "", True, bits, number, fields=config)


def _read_quanto_map(config: JsonFields) -> Rules:
    """Read the content of quanto_qmap.json, which names each quantized module."""
    entries = Entries(config, Matching.EXACT)

    def find(module: str) -> Scheme | None:
        if (entry := entries.find(module)) is None:
            return None
        fields = as_object(config[entry])
        number, bits = QUANTO.get(str(fields.get("weights")).removeprefix("q").partition("_")[0], ("", None))
        return Scheme("", entry, True, bits, number, fields=fields)

    return Rules(find, [("", entries)], targets=entries.all)


def _is_quanto_map(_method: str, config: JsonFields) -> bool:
    return bool(config) and all({"weights", "activations"} <= as_object(value).keys() for value in config.values())


def _read_hqq(config: JsonFields) -> Rules:
    quant_config = as_object(config.get("quant_config"))
    excluding = _collect(config, ("skip_modules",), Matching.PATH)
    # Keys such as self_attn.q_proj, which apply to all blocks.
    by_tag = {} if "weight_quant_params" in quant_config else quant_config
    tags = Entries(by_tag, Matching.PATH)

    def find(module: str) -> Scheme | None:
        entry = tags.find(module)
        if by_tag and entry is None:
            return Scheme("quant_config", is_quantized=False)
        fields = as_object(by_tag[entry]) if entry is not None else quant_config
        params = as_object(fields.get("weight_quant_params"))
        return Scheme(
            "quant_config",
            entry or "",
            True,
            _as_int(params.get("nbits")),
            "int",
            _as_int(params.get("group_size")),
            None,
            fields,
        )

    return Rules(find, [("quant_config", tags)], excluding)


# torchao

WEIGHT = ".weight"
TORCHAO_TYPE = re.compile(r"(int|float)(\d)_?weight", re.IGNORECASE)  # part of the name of a configuration's class
TORCHAO_DTYPE = re.compile(r"(u?int|float)(\d)")  # dtype of the codes


def _read_torchao_config(chosen: JsonFields, key: str, entry: str = "") -> Scheme:
    if not chosen:
        return Scheme(key, entry, is_quantized=False)
    # Older versions store only the name of the class.
    quant_type, fields = (
        chosen.get("quant_type"),
        as_object(chosen.get("_data")),
    )
    dtype = as_object(fields.get("weight_dtype")).get("_data")
    match = TORCHAO_DTYPE.match(str(dtype)) or TORCHAO_TYPE.search(
        quant_type if isinstance(quant_type, str) else str(chosen.get("_type"))
    )
    number = "" if match is None else "float" if match[1].lower().endswith("float") else "int"
    return Scheme(key, entry, True, int(match[2]) if match else None, number, fields=chosen)


def _read_torchao(config: JsonFields) -> Rules:
    quant_type = config.get("quant_type")
    chosen = as_object(quant_type)
    chosen = as_object(chosen.get("default", chosen))
    fields = as_object(chosen.get("_data"))
    by_name = as_object(fields.get("fqn_to_config") or fields.get("module_fqn_to_config"))
    excluding = _collect(config, ("modules_to_not_convert",), Matching.PATH)
    names = Entries([name for name in by_name if not name.startswith("re:")], Matching.EXACT)
    patterns = Entries([f"{name}$" for name in by_name if name.startswith("re:")], Matching.EXACT)

    def find(module: str) -> Scheme | None:
        if not by_name:
            return _read_torchao_config(chosen if isinstance(quant_type, dict) else config, "quant_type")
        for name in (module + WEIGHT, module):
            for entries in (names, patterns):
                if (entry := entries.find(name)) is not None:
                    entry = entry if entries is names else entry[:-1]
                    return _read_torchao_config(as_object(by_name[entry]), "quant_type", entry)
        return _read_torchao_config(as_object(by_name.get("_default")), "quant_type")

    return Rules(find, [], excluding)


# SDNQ

SDNQ_TYPE = re.compile(r"(u?int|float)(\d+)")


def _read_sdnq(config: JsonFields) -> Rules:
    excluding = _collect(config, ("modules_to_not_convert",), Matching.PARAMETER)
    by_type = as_object(config.get("modules_dtype_dict"))
    types = [(dtype, Entries(keep_texts(names), Matching.PARAMETER)) for dtype, names in by_type.items()]
    quant_config = as_object(config.get("modules_quant_config"))
    settings = Entries(quant_config, Matching.PARAMETER)

    def find(module: str) -> Scheme | None:
        key, entry, fields = "weights_dtype", "", dict(config)
        if (matched := settings.find(module)) is not None:
            key, entry, fields = "modules_quant_config", matched, fields | as_object(quant_config[matched])
        for dtype, entries in types:
            if SDNQ_TYPE.match(dtype) and (matched := entries.find(module)) is not None:  # not "minimum_6bit"
                key, entry, fields = "modules_dtype_dict", matched, fields | {"weights_dtype": dtype}
        match = SDNQ_TYPE.match(str(fields.get("weights_dtype")))
        number = "" if match is None else "float" if match[1] == "float" else "int"
        return Scheme(key, entry, True, int(match[2]) if match else None, number, fields=fields)

    choosing = [("modules_quant_config", settings), *(("modules_dtype_dict", entries) for _, entries in types)]
    return Rules(find, choosing, excluding)


# ModelSlim: a description that names the type of each weight


def _read_modelslim(config: JsonFields) -> Rules:
    def find(module: str) -> Scheme | None:
        declared = config.get(module + WEIGHT)
        return Scheme("", declared, declared != "FLOAT") if isinstance(declared, str) else None

    return Rules(find)


# MLX: a module has codes if its scales are stored, except where its path is false

MLX_NUMBERS = {"affine": "int", "mxfp4": "float", "mxfp8": "float", "nvfp4": "float"}


def _read_mlx(config: JsonFields) -> Rules:
    paths = {key: value for key, value in config.items() if isinstance(value, dict) or value is False}
    entries = Entries(paths, Matching.EXACT, [path for path, value in paths.items() if value is False])

    def find(module: str) -> Scheme | None:
        entry = entries.find(module)
        declared = paths[entry] if entry is not None else config
        if declared is False:
            return Scheme("quantization", entry or "", is_quantized=False)
        fields = {"mode": config.get("mode"), **as_object(declared)}
        number = MLX_NUMBERS.get(str(fields.get("mode") or "affine"), "")
        bits, size = _as_int(fields.get("bits")), _as_int(fields.get("group_size"))
        return Scheme("quantization", entry or "", True, bits, number, size, None, fields)

    return Rules(find, [("quantization", entries)])


MODELOPT_KEYS = ("quant_algo", "quantized_layers")
EXCLUSION_KEYS = (
    "modules_to_not_convert",
    "ignored_layers",
    "llm_int8_skip_modules",
    "skip_modules",
    "ignore",
    "exclude_modules",
)


def _split_keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


GPTQ_METHODS = _split_keys("gptq gptq_v2 gptq_marlin gptqmodel marlin gptq_bitblas bitblas")
PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for program in (
        Program(
            "ModelOpt",
            lambda method, config: method.startswith("modelopt") or not config.keys().isdisjoint(MODELOPT_KEYS),
            _read_modelopt,
            _split_keys("quantized_layers exclude_modules ignore config_groups"),
            lists_exclusions=True,
            leaves_head=False,
        ),
        Program(
            "Quark",
            lambda method, _: method == "quark",
            _read_quark,
            _split_keys("global_quant_config layer_quant_config layer_type_quant_config exclude"),
            lists_exclusions=True,
            leaves_head=False,
        ),
        Program(
            "compressed-tensors",
            lambda method, config: method == COMPRESSED_TENSORS or "config_groups" in config,
            _read_compressed_tensors,
            _split_keys("config_groups ignore"),
            lists_exclusions=True,
            leaves_head=False,
        ),
        Program(
            "AutoRound",
            lambda method, config: (
                method in ("auto-round", "auto_round", "intel/auto-round", "inc") or "extra_config" in config
            ),
            _read_auto_round,
            _split_keys("extra_config block_name_to_quantize to_quant_block_names modules_to_not_convert"),
            is_for_blocks=True,
        ),
        Program(
            "GPTQ",
            lambda method, config: method in GPTQ_METHODS or not config.keys().isdisjoint(("dynamic", "desc_act")),
            _read_gptq,
            _split_keys("dynamic lm_head modules_in_block_to_quantize modules_to_not_convert"),
            is_for_blocks=True,
        ),
        Program(
            "AWQ",
            lambda method, config: method.startswith("awq") or "w_bit" in config,
            _read_awq,
            _split_keys("modules_to_not_convert"),
            is_for_blocks=True,
        ),
        Program(
            "bitsandbytes",
            lambda method, config: (
                method.startswith("bitsandbytes") or "load_in_4bit" in config or "load_in_8bit" in config
            ),
            _make_list_reader(("llm_int8_skip_modules", "modules_to_not_convert"), Matching.PATH, _read_bitsandbytes),
            _split_keys("llm_int8_skip_modules modules_to_not_convert"),
            lists_exclusions=True,
            is_for_linear=True,
        ),
        Program(
            "torchao",
            lambda method, _: method == "torchao",
            _read_torchao,
            _split_keys("quant_type modules_to_not_convert"),
            is_for_linear=True,
        ),
        Program(
            "HQQ",
            lambda method, _: method == "hqq",
            _read_hqq,
            _split_keys("quant_config skip_modules"),
            is_for_linear=True,
        ),
        Program(
            "quanto",
            lambda method, _: method == "quanto",
            _make_list_reader(("modules_to_not_convert",), Matching.PATH, _read_quanto),
            _split_keys("modules_to_not_convert"),
            is_for_linear=True,
        ),
        Program("quanto's map", _is_quanto_map, _read_quanto_map, frozenset(), is_described_by_paths=True),
        Program(
            "SDNQ",
            lambda method, _: method == "sdnq",
            _read_sdnq,
            _split_keys("modules_dtype_dict modules_quant_config modules_to_not_convert"),
            is_for_linear=True,
        ),
        Program(
            "FP8",
            lambda method, _: method in ("fp8", "fbgemm_fp8", "finegrained_fp8", "w4afp8"),
            _make_list_reader(("modules_to_not_convert", "ignored_layers"), Matching.PATH, _read_float8),
            _split_keys("modules_to_not_convert ignored_layers"),
        ),
        Program(
            "MLX",
            lambda method, config: not method and {"bits", "group_size"} <= config.keys(),
            _read_mlx,
            frozenset(),
            is_described_by_paths=True,
            follows_tensors=True,
        ),
        Program(
            "ModelSlim",
            lambda _, config: "model_quant_type" in config,
            _read_modelslim,
            frozenset(),
            is_described_by_paths=True,
        ),
        Program(
            "another program",
            lambda method, config: bool(config),
            _make_list_reader(EXCLUSION_KEYS, Matching.PATH, _read_plain),
            frozenset(EXCLUSION_KEYS),
        ),
    )
}
