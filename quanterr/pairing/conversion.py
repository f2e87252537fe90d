"""Undo the changes that converters, such as llama.cpp's and mlx-lm's, made to the tensors of two checkpoints.

        names      become llama.cpp's if one side has these; otherwise Hugging Face's (names.py)
        orders     of rows and columns are undone on the side that was reordered
        numbers    that one side changed are changed on the other side, too, as undoing them in float32 loses digits

The program, the architecture of a GGUF file and the model_type of a config.json prescribe the changes (converters/). If
a file fits another interpretation better, loaders will read it wrongly: the pair keeps the prescribed one, and the
other is reported with its error.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property

from msgspec.structs import replace

from quanterr.checkpoints import JANG_CONFIG, Checkpoint, Entry
from quanterr.checkpoints.base import RECIPE
from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.errors import FormatMismatch
from quanterr.formats import Weight
from quanterr.lazy_torch import torch
from quanterr.pairing.converters import genai, hugging_face, llama_cpp, mlx
from quanterr.pairing.converters.denoisers import DenoiserNaming, naming_between
from quanterr.pairing.converters.gguf_names import architectures, names_of
from quanterr.pairing.converters.numbers import Added, Change, Multiplied
from quanterr.pairing.model import Alternative, Contradiction, KeyHeads, Pair
from quanterr.pairing.names import Atoms, atoms_of, canonicalize, find_other_arrangements
from quanterr.pairing.rotary import unify_row_order, unify_side
from quanterr.pairing.sampling import CLOSE_INTERPRETATION, VALUES
from quanterr.pairing.views import (
    map_elements,
    reorder,
    reshape_weight,
    scale_weight,
    take_rows,
    transpose_weight,
)
from quanterr.selection.roles import block_of, role_of
from quanterr.tensors.workspace import read_entry
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display

Shape = tuple[int, ...]
MODEL_CONFIGS = ("config.json", "params.json")  # files that describe the model
LLAMA_CPP, MLX, GENAI = "llama.cpp", "MLX expects", "ONNX Runtime GenAI expects"
OUTPUTS_FIRST = "gpt_oss_mxfp4"  # a format whose stacks are always [experts, out, in]
UNCHANGED_VALUES = "as in the original"
PREDICTION_REASON = "belongs to layers for multi-token prediction, which this file leaves out"


class Conversion:
    """The conversion between two checkpoints that both have Hugging Face's names."""

    def __init__(self, original: Checkpoint, quantized: Checkpoint) -> None:
        """Read what the configurations of both sides state about their model."""
        self._sides = original, quantized
        self._configs = list(_read_configs(original, quantized))
        self._config = self._configs[0] if self._configs else {}
        self._kinds = [frozenset(_find_model_types(side)) for side in self._sides]
        self._is_mlx = [is_mlx(side) for side in self._sides]
        self._is_genai = [genai.is_genai(side.entries) for side in self._sides]
        self._denoisers: DenoiserNaming | None = None

    @property
    def key_heads(self) -> KeyHeads | None:
        """The number and size of key heads that the first configuration with transformers' keys declares, or None."""
        keys = ("num_key_value_heads", "v_head_dim", "head_dim", "hidden_size", "num_attention_heads")
        number, *sizes, width, queries = (value if type(value := self._config.get(key)) is int else 0 for key in keys)
        size = next(filter(None, sizes), width // queries if queries > 0 else 0)
        return KeyHeads(number, size) if number > 0 and size > 0 else None

    @property
    def mlx_side(self) -> int | None:
        """The side (0 or 1) that MLX wrote, if MLX wrote only one."""
        return self._is_mlx.index(True) if self._is_mlx[0] != self._is_mlx[1] else None

    @property
    def _all_kinds(self) -> frozenset[str]:
        return self._kinds[0] | self._kinds[1]

    @property
    def alternates(self) -> bool | None:
        """Whether rows of gate and up alternate in the model's fused weights; None if the model is unknown."""
        return hugging_face.is_of(self._all_kinds, hugging_face.ALTERNATING)

    def atoms(self, side: int, name: str, shape: Shape) -> Atoms:
        """Return the atoms of a weight on a side (0 or 1)."""
        if self._denoisers:
            return self._denoisers.atoms(side, name, shape)
        if self.mlx_side is not None:
            path, ending = canonicalize(name)
            name = mlx.rename(path) + (ending or ".weight")
        return atoms_of(name, shape)

    def name_denoisers(self, original: Collection[str], quantized: Collection[str]) -> None:
        """Learn which side has the names of a denoiser's authors, from weights without a partner of the same name."""
        self._denoisers = naming_between(original, quantized)

    def is_flat(self, atom: str) -> bool:
        """Return whether one side stores this atom as a 1 × 1 convolution, and the other as a matrix."""
        return self._denoisers is not None and self._denoisers.is_flat(atom)

    def find_other_arrangements(self, name: str) -> Iterable[Atoms]:
        """Return ways to split a weight of the original other than along its rows."""
        plain = self.atoms(0, name, ()).names if self._denoisers else ()
        for other in dict.fromkeys((name, *(plain if len(plain) == 1 else ()))):
            yield from find_other_arrangements(other)

    def explain_absence(self, name: str) -> str | None:
        """Return why only one side has a tensor, if a converter makes it, folds it into another or leaves it out."""
        dropped = self._denoisers is not None and self._denoisers.is_dropped(name)
        return "not a part of diffusers' model" if dropped else None

    def explain_omission(self, name: str) -> str | None:
        """Return why a checkpoint lacks a tensor of the other one, if its converter writes that to another file."""
        if self._is_in_module(name):
            return "belongs to another module of sentence-transformers, which is stored in a separate file"
        if not any(self._is_mlx):
            return None
        if reason := next((reason for pattern, reason in self._left_out_patterns if pattern.fullmatch(name)), None):
            return reason
        if self._keeps_predicting or not self._predicts(name, self._config.get("num_hidden_layers")):
            return None
        return PREDICTION_REASON

    def _is_in_module(self, name: str) -> bool:
        """Return whether a tensor belongs to a module that only one side has, while the other side is one file."""
        modules = tuple(f"{module}." for side in self._sides for module in side.modules)
        return any(side.kind == "file" for side in self._sides) and name.startswith(modules)

    @cached_property
    def _keeps_predicting(self) -> bool:
        """Whether each checkpoint that MLX wrote has layers for multi-token prediction."""
        n_blocks = self._config.get("num_hidden_layers")
        stored = [side.entries for side, is_mlx in zip(self._sides, self._is_mlx, strict=True) if is_mlx]
        return all(any(self._predicts(name, n_blocks) for name in names) for names in stored)

    @cached_property
    def _left_out_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """Patterns of names that no checkpoint of MLX contains, with the reason."""
        stored = [side.entries for side, is_mlx in zip(self._sides, self._is_mlx, strict=True) if is_mlx]
        return [row for row in mlx.LEFT_OUT if not all(any(map(row[0].fullmatch, names)) for names in stored)]

    def _predicts(self, name: str, n_blocks: object) -> bool:
        """Return whether a tensor belongs to a layer for multi-token prediction, which follows the last block."""
        stack, _, number = (block_of(name) or "").rpartition(".")
        is_beyond = stack == "layers" and isinstance(n_blocks, int) and int(number) >= n_blocks
        return is_beyond or "mtp" in name.split(".")

    def find_counterparts(self, names: Iterable[str]) -> set[str]:
        """Return the names under which a GGUF file has these tensors."""
        return set()

    def undo_order(self, side: int, name: str, weight: Weight) -> Weight:
        """Return a stored weight of a side with its rows and columns in the usual order."""
        return weight

    def crop_vocabulary(self, name: str, x: Weight) -> Weight:
        """Return the rows of the original's weight that the converter keeps."""
        return x

    def stores_inputs_first(self, pair: Pair) -> bool | None:
        """Return whether the original is [in, out] where the quantized weight is [out, in]; None if that is unknown."""
        is_stack = len(pair.original.codes.shape) == 3
        is_inputs_first = hugging_face.is_of(
            self._kinds[0], hugging_face.INPUTS_FIRST if is_stack else hugging_face.CONV1D
        )
        weight, is_alone = pair.quantized, len(pair.quantized_codes) == 1
        if all(self._is_mlx):
            return False
        if any(self._is_mlx) or not is_alone or weight.format.startswith("mx"):
            return is_inputs_first  # MLX's weights, and the quantized weight in the other cases, are [out, in]
        # A weight of the same name, stored as numbers, has the original's orientation.
        is_same = canonicalize(weight.name) == canonicalize(pair.original.name)
        return False if is_inputs_first is not None and is_same and weight.encoding in ("floats", "cast") else None

    def adapt(self, pair: Pair) -> Pair:
        """Bring both weights of a pair into the same order, and change numbers of one side as the other side did.

        Raises:
            FormatMismatch: an order cannot be undone.
        """
        pair = unify_row_order(pair, self._configs)
        path, ending = canonicalize(pair.name)
        side, is_norm = self.mlx_side, len(pair.original.shape) == 1 and "norm" in path.rpartition(".")[2]
        if is_norm and not ending and self._is_genai == [False, True] and genai.adds_one(self._all_kinds, path):
            return _change_numbers(pair, 0, (Added(1.0),), (), GENAI)
        if side is None or ending or not self._all_kinds:
            return pair  # without a model_type that requires them, norms plus one are reported, not changed
        kinds = self._kinds[side] or self._all_kinds
        change = mlx.find_change(kinds, path, self._config, self._sides[1 - side].entries)
        if not is_norm and (change is None or isinstance(change, Added)):
            return pair
        changes, mistaken = ((), ADD_ONE) if change is None else ((change,), ())
        return _change_numbers(pair, 1 - side, changes, mistaken, MLX)


class GgufConversion(Conversion):
    """The conversion between a checkpoint with llama.cpp's names and one with Hugging Face's."""

    def __init__(self, original: Checkpoint, quantized: Checkpoint, side: int, metadata: GgufMetadata) -> None:
        """Keep the metadata of the GGUF file, which is on a side (0 or 1)."""
        super().__init__(original, quantized)
        self._side, self._metadata, self._architecture = side, metadata, metadata.architecture or ""
        self._stored = self._sides[side].entries
        self._names = frozenset("".join(_split_name(name)) for name in self._stored)
        self._translated: dict[tuple[str, str], str] = {}
        self._whole = frozenset(self._translate(*canonicalize(name)) for name in self._sides[1 - side].entries)

    @cached_property
    def _projector(self) -> str:
        """The type of the projector after a vision tower, empty for a language model."""
        keys = "clip.projector_type", "clip.vision.projector_type"
        return str(next((self._metadata.values[key] for key in keys if key in self._metadata.values), ""))

    @cached_property
    def _variant(self) -> str:
        """The architecture, followed by the type of the projector if that has conventions of its own."""
        architecture = f"{self._architecture} {self._projector}"
        return architecture if architecture in (llama_cpp.PIXTRAL, llama_cpp.GEMMA3) else self._architecture

    @property
    def alternates(self) -> bool | None:
        """Whether rows of gate and up alternate in the model's fused weights, as the architecture determines."""
        return self._architecture == "gpt-oss"

    def name_denoisers(self, original: Collection[str], quantized: Collection[str]) -> None:
        """Do nothing, as llama.cpp's names belong to language models."""

    def explain_absence(self, name: str) -> str | None:
        """Return why only one side has a tensor, if a converter makes it, folds it into another or leaves it out."""
        if _split_name(name)[0] in llama_cpp.DERIVED:
            return "computed by the converter"
        target = self._translate(*canonicalize(name))
        word = target.rpartition(".")[0].rpartition(".")[2]
        weight = target.removesuffix("scale") + "weight"
        is_folded = word in llama_cpp.FOLDED.get(self._architecture, ()) and weight in self._stored
        return f"folded into the scales of {weight}" if is_folded and self._stored[weight].dtype == "NVFP4" else None

    def explain_omission(self, name: str) -> str | None:
        """Return why a GGUF file lacks a tensor of the original, if the converter leaves it to another file."""
        is_tower = llama_cpp.TOWERS.fullmatch(name) is not None
        if name in self._stored:
            return None
        if self._architecture == "clip":
            return None if is_tower else "in the file of the language model"
        if is_tower:
            return "in the file of the projector (mmproj)"
        if self._architecture in llama_cpp.ENCODERS and llama_cpp.LEFT_OUT.fullmatch(name):
            return "left out by llama.cpp's converter: embeddings do not need it"
        n_blocks = self._metadata.get_model_int("block_count")
        keeps_them = self._metadata.get_model_int("nextn_predict_layers")
        return PREDICTION_REASON if not keeps_them and self._predicts(name, n_blocks) else None

    def find_counterparts(self, names: Iterable[str]) -> set[str]:
        """Return the names under which a GGUF file has these tensors."""
        return {llama_cpp.PATCHES[1], *(self._translate(*canonicalize(name)) for name in names)}

    def atoms(self, side: int, name: str, shape: Shape) -> Atoms:
        """Return the atoms of a weight on a side (0 or 1), in llama.cpp's names."""
        if side == self._side:
            path, ending = _split_name(name)
            return Atoms(self._expand(path, ending, shape), "attn_qkv" not in path)
        path, ending = canonicalize(name)
        whole = self._translate(path, ending)
        if whole in self._names and len(shape) < 3 - bool(ending):
            return Atoms((whole,), True)
        block, _, word = whole.removesuffix(ending).rpartition(".")
        if word in llama_cpp.PIECES and len(shape) < 3:
            return Atoms(tuple(f"{block}.{piece}{ending}" for piece in llama_cpp.PIECES[word]), equal=False)
        usual = atoms_of(name, shape)
        return Atoms(tuple(self._translate(atom.removesuffix(ending), ending) for atom in usual.names), usual.equal)

    def _expand(self, path: str, ending: str, shape: Shape) -> tuple[str, ...]:
        """Return the names of all weights in a tensor of the GGUF file, from top to bottom."""
        block, _, word = path.rpartition(".")
        pieces = llama_cpp.PIECES.get(word, (word,))
        if self._architecture in llama_cpp.FLAT:
            return (path + ending,)
        if len(shape) < 3 and f"{block}.{pieces[0]}{ending}" not in self._whole:
            pieces = (word,)
        names = [f"{block}.{piece}" if block else piece for piece in pieces]
        is_stack = llama_cpp.STACKS.fullmatch(word) is not None and len(shape) > 2 - bool(ending)
        if is_stack or (word in llama_cpp.HEAD_NORMS and len(shape) == 2):
            return tuple(f"{name}.{number}{ending}" for number in range(shape[0]) for name in names)
        return tuple(name + ending for name in names)

    def find_other_arrangements(self, name: str) -> Iterable[Atoms]:
        """Return ways to split a weight of the original other than along its rows, in llama.cpp's names."""
        for atoms in find_other_arrangements(name):
            yield atoms._replace(names=tuple(self._translate(*canonicalize(f"{atom}.weight")) for atom in atoms.names))
        path, ending = canonicalize(name)
        head, _, word = path.rpartition(".")
        split, block = llama_cpp.SPLIT.get(self._architecture, {}).get(word), block_of(head)
        if split is not None and block is not None and self._side == 1:
            place, rows = f"blk.{block.rpartition('.')[2]}", self._sides[0].entries[name].shape[0]
            names = tuple(f"{place}.{piece}{ending}" for piece in split.pieces)
            order = split.order(self._model(place), rows)
            if order is None and names[0] in self._names:
                raise FormatMismatch(_describe_misfit(f"{place}.{split.pieces[0]}", f"{rows} rows of {display(name)}"))
            yield Atoms(names, equal=False, order=order)
        if path.endswith("patch_embed.proj") and not ending and llama_cpp.PATCHES[1] in self._stored:
            shape = self._sides[1 - self._side].entries[name].shape
            names = tuple(_split_name(patch)[0] for patch in llama_cpp.PATCHES)
            yield Atoms(names, axis="columns", order=llama_cpp.order_patches(shape))

    def _translate(self, path: str, ending: str) -> str:
        """Return the name in the GGUF file of a path of the original, with ``.bias`` but without ``.weight``."""
        if (path, ending) not in self._translated:  # pairing translates the same path several times
            self._translated[path, ending] = self._find_name(path, ending)
        return self._translated[path, ending]

    def _find_name(self, path: str, ending: str) -> str:
        path, end = self._place_merger(self._place_prediction(path)), ""
        if limit := llama_cpp.LIMITS.fullmatch(path):
            path, end = limit.groups()
        known = [name for each in self._list_paths(path, ending) for name in each]
        return next((name for name in known if name + end in self._names), (known or [path + ending])[0]) + end

    def _list_paths(self, path: str, suffix: str) -> Iterator[list[str]]:
        """Yield the tables' names for a path and for the paths to which the converter may have renamed it."""
        paths = [path]
        for pattern, replacement in llama_cpp.RENAMED.get(self._architecture, ()):
            if pattern.fullmatch(paths[-1]):
                paths.append(pattern.sub(replacement, paths[-1]))
        for each in reversed(paths):
            yield [name + suffix for name in list_llama_names(self._architecture, each)]
        for ending, of in (("_bias", suffix), ("_proj", suffix), ("_bias", "")) if suffix else ():
            yield [name + of for name in list_llama_names(self._architecture, path + ending)]

    def _place_merger(self, path: str) -> str:
        """Return the path of a merger, numbered by the block that it follows."""
        match = llama_cpp.MERGERS.fullmatch(path)
        follows = self._metadata.values.get(llama_cpp.MERGED_BLOCKS)
        if match is None or not isinstance(follows, tuple):
            return path
        blocks = [block for block, is_followed in enumerate(follows) if is_followed]
        number = int(match[2])
        return f"{match[1]}{blocks[number]}{match[3]}" if number < len(blocks) else f"{path} of no block"

    def _place_prediction(self, path: str) -> str:
        """Return the path that the file gives to a layer for multi-token prediction: in a block after the last one."""
        for pattern, rest in llama_cpp.PREDICTION:
            if match := pattern.fullmatch(path):
                last = self._metadata.get_model_int("block_count") or 0
                first = last - (self._metadata.get_model_int("nextn_predict_layers") or 0)
                number = first + int(match[1]) if match.groups() else first
                return f"layers.{number}.{match.expand(rest)}"
        return path

    def _model(self, path: str) -> llama_cpp.Model:
        words = path.split(".")
        block = int(words[1]) if words[0] == "blk" and words[1].isdecimal() else 0
        return llama_cpp.Model(self._metadata, block)

    def undo_order(self, side: int, name: str, weight: Weight) -> Weight:
        """Return a stored weight with its rows and columns in the usual order; the stored order is an alternative."""
        path, _ = _split_name(name)
        if side == self._side and path == llama_cpp.PATCH and self._projector in llama_cpp.PIXELS_FIRST:
            flat = weight.shape[0], weight.n // weight.shape[0]
            return reshape_weight(reorder(weight, llama_cpp.order_pixels(weight.shape)), flat)
        if side == self._side and self._architecture in llama_cpp.FLAT and len(weight.shape) == 3:
            experts = transpose_weight(weight) if path.endswith("ffn_down_exps") else weight
            return reshape_weight(experts, (experts.shape[0] * experts.shape[1], experts.shape[2]))
        prescribed, mistaken = llama_cpp.find_orders(self._variant, path.rpartition(".")[2])
        if side != self._side or not (prescribed or mistaken):
            return weight
        model = self._model(path)
        for row in (*prescribed, *mistaken):
            order = row.find(model, weight.shape)
            if order is None or order.changes_nothing:
                continue
            expected = f", as {LLAMA_CPP} expects for {self._architecture}"
            ordered = reorder(weight, order)
            ordered = replace(ordered, evidence=(row.text + expected * (row in prescribed), *weight.evidence))
            plain = replace(weight, evidence=(row.otherwise + expected * (row in mistaken), *weight.evidence))
            first, other = (ordered, plain) if row in prescribed else (plain, ordered)
            first = replace(first, close_alternatives=order.is_partial, prescribed=True)
            return first.with_alternatives((*first.alternatives, other))
        return weight

    def crop_vocabulary(self, name: str, x: Weight) -> Weight:
        """Return the original's embedding without rows for no token or position, which the converter drops."""
        path = self._translate(*canonicalize(name))
        stored = self._stored.get(f"{path}.weight")
        is_vocabulary = self._architecture in llama_cpp.CROPPED and role_of(name) == "embedding"
        if self._side == 0 or stored is None or not (is_vocabulary or path == llama_cpp.POSITIONS):
            return x
        rest = x.shape[0] - stored.shape[0] if len(x.shape) == 2 and x.shape[1:] == stored.shape[1:] else 0
        if rest <= 0:
            return x
        first, evidence = (0, "without rows of no token") if is_vocabulary else (rest, "without rows of no position")
        return replace(take_rows(x, first, stored.shape), evidence=(*x.evidence, evidence))

    def stores_inputs_first(self, pair: Pair) -> bool | None:
        """Return whether the original is [in, out], as GGUF files are [out, in]; None if its model is unknown."""
        if self._side == 0:
            return False
        is_stack = len(pair.original.codes.shape) == 3
        return hugging_face.is_of(
            self._kinds[0] | {self._architecture.replace("-", "_")},
            hugging_face.INPUTS_FIRST if is_stack else hugging_face.CONV1D,
        )

    def adapt(self, pair: Pair) -> Pair:
        """Bring both weights of a pair into the same order, and change the other side's numbers as llama.cpp did.

        Raises:
            FormatMismatch: an order cannot be undone.
        """
        gguf = (pair.original, pair.quantized)[self._side]
        for entry in pair.codes[self._side]:
            self._check_order(entry)
        path, ending = _split_name(gguf.codes.name)
        word = path.rpartition(".")[2]
        block = self._model(path).block
        heads, kv_heads = self._metadata.heads(block), self._metadata.kv_heads(block)
        declared: JsonFields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}  # keys of config.json
        pair = unify_side(pair, 1 - self._side, (*self._configs, declared))
        if word in llama_cpp.FOLDED.get(self._architecture, ()) and "scale" in gguf.parts:
            pair = self._unfold(pair, path)
        prescribed, mistaken = llama_cpp.find_changes(self._variant, word)
        if ending or not (prescribed or mistaken) or (mistaken and len(pair.original.shape) > 1):
            return pair
        changes, others = (
            tuple(change for row in rows if (change := row.change(self._config)) is not None)
            for rows in (prescribed, mistaken)
        )
        if prescribed and prescribed[0].is_usual and len(pair.original.shape) > 1:
            return pair  # a linear layer that is named like a norm
        return _change_numbers(pair, 1 - self._side, changes, others, f"{LLAMA_CPP} expects for {self._architecture}")

    def _check_order(self, entry: Entry) -> None:
        """Raise FormatMismatch if the converter reorders a tensor and the metadata do not show how."""
        path, _ = _split_name(entry.name)
        prescribed, _ = llama_cpp.find_orders(self._variant, path.rpartition(".")[2])
        if any(row.find(self._model(path), entry.shape) is None for row in prescribed):
            raise FormatMismatch(_describe_misfit(path, str(entry)))

    def _unfold(self, pair: Pair, path: str) -> Pair:
        """Multiply each expert of the original by the factor that the converter folded into the expert's scale."""
        entries = self._sides[1 - self._side].entries
        names = [name for name in entries if self._translate(*canonicalize(name)) == f"{path}.scale"]
        if len(names) != 1:
            return pair
        entry, experts = entries[names[0]], entries[names[0]].n
        other = (pair.original, pair.quantized)[1 - self._side]
        if other.matrix[0] % experts:
            return pair
        factors = read_entry(entry).flatten().float()
        scaled = scale_weight(other, factors.repeat_interleave(other.matrix[0] // experts), 0)
        return _put(pair, 1 - self._side, replace(scaled, evidence=(*scaled.evidence, f"times {entry.name}")))


class OwnForm:
    """The shape and values in which a model stores its weights, as far as its quantized checkpoint alone shows them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read what the checkpoint states about its program and its model."""
        self._kinds, self._is_mlx = frozenset(_find_model_types(checkpoint)), is_mlx(checkpoint)
        self._config = next(_read_configs(checkpoint), {})

    def restore(self, weight: Weight) -> Weight:
        """Return a weight in the shape and with the values that its name implies for its model.

        Raises:
            FormatMismatch: these can only be learned from the original.
        """
        if self._is_mlx:
            self._check_mlx(weight)
        if weight.format != OUTPUTS_FIRST or not weight.codes.name.endswith("_blocks"):
            return weight
        is_turned = hugging_face.is_of(self._kinds, hugging_face.INPUTS_FIRST)
        if is_turned is None:
            raise FormatMismatch(
                "its model decides whether floats of this name are [experts, in, out]; add the config.json that names "
                "the model_type, or give the original (--like ORIGINAL)"
            )
        return transpose_weight(weight) if is_turned else weight

    def _check_mlx(self, weight: Weight) -> None:
        """Raise FormatMismatch if mlx-lm changed a weight and kept its name."""
        path, ending = canonicalize(weight.name)
        change = None if ending else mlx.find_change(self._kinds, path, self._config, None)
        is_kernel = len(weight.shape) > 3 or (len(weight.shape) == 3 and "conv" in path)
        may_be_changed = not self._kinds and len(weight.shape) == 1 and not ending and path.endswith("norm")
        if change is not None:
            text = f"mlx-lm stores it {change.text}"
        elif is_kernel:
            text = "MLX stores kernels as [out, …, in]"
        elif may_be_changed:
            text = "mlx-lm adds one to norms of some models, and no config.json names this one"
        else:
            return
        raise FormatMismatch(f"{text}: give the model that it was made from (--like ORIGINAL)")


def find_conversion(original: Checkpoint, quantized: Checkpoint) -> Conversion:
    """Return the conversion between two checkpoints."""
    if quantized.kind == RECIPE:  # made from the original's own tensors
        return Conversion(original, quantized)
    known = [checkpoint.gguf is not None and has_llama_names(checkpoint) for checkpoint in (original, quantized)]
    if known[0] != known[1]:
        side = known.index(True)
        metadata = (original, quantized)[side].gguf
        if metadata is not None:
            return GgufConversion(original, quantized, side, metadata)
    return Conversion(original, quantized)


ADD_ONE = (Added(1.0),)


def _change_numbers(
    pair: Pair, side: int, changes: tuple[Change, ...], mistaken: tuple[Change, ...], program: str
) -> Pair:
    """Change the numbers of one side as a program does; the alternatives are the unchanged weight and other changes."""
    before = (pair.original, pair.quantized)[side]
    after = before
    for change in changes:
        after = _apply(change, after)
    expected = f"values {' and '.join(change.text for change in changes) or UNCHANGED_VALUES}, as {program}"
    after = replace(after, evidence=(*after.evidence, *(f"stored {change.text}" for change in changes)))
    others = [(before, UNCHANGED_VALUES)] if changes else []
    others += [(_apply(change, before), change.text) for change in mistaken]
    alternatives = []
    # A factor near 1 changes a matrix less than its quantization does, so that a small difference must decide.
    bar = CLOSE_INTERPRETATION if any(isinstance(change, Multiplied) for change in changes) else VALUES
    for other, text in others:
        contradiction = Contradiction(expected, f"values {text}")
        x, y = (other, None) if side == 0 else (pair.original, other)
        alternatives.append(Alternative(x, y, bar, contradiction, f"stored {text}"))
    return replace(_put(pair, side, after), alternatives=(*pair.alternatives, *alternatives))


def _put(pair: Pair, side: int, weight: Weight) -> Pair:
    return replace(pair, original=weight) if side == 0 else replace(pair, quantized=weight)


def _apply(change: Change, weight: Weight) -> Weight:
    """Return a weight with its numbers changed."""
    if not isinstance(change, Multiplied):
        return map_elements(weight, change)
    left, factors = weight.matrix[0], []
    for n, factor in change.factors:
        factors.append(torch.full((left if n is None else min(n, left),), factor))
        left -= len(factors[-1])
    return scale_weight(weight, torch.cat(factors), 0)


def to_llama_name(architecture: str, path: str) -> str:
    """Return llama.cpp's name of a path (gguf_names.py), with an expert's number appended; unknown paths are kept."""
    return (*list_llama_names(architecture, path), path)[0]


def list_llama_names(architecture: str, path: str) -> tuple[str, ...]:
    """Return llama.cpp's possible names of a path, with the number of an expert or of another stacked tensor."""
    words, names = path.split("."), _map_names(architecture)
    numbers = [n for n, word in enumerate(words) if word.isdecimal()]
    none: list[int] = []
    places = [(none, numbers[:1])]  # positions of the number of a stacked tensor, and of the block's number
    if len(numbers) > 1 and words[numbers[1] - 1] == "experts":
        places = [(numbers[1:2], numbers[:1])]
    elif numbers and numbers[-1] == len(words) - 1:
        places.append((numbers[-1:], numbers[:-1][:1]))
    for stacked, block in places:
        kept = ["{bid}" if n in block else word for n, word in enumerate(words) if n not in stacked]
        end = "".join(f".{words[n]}" for n in stacked)
        number = "".join(words[n] for n in block)
        if templates := names.get(".".join(kept)) or _find_piece(names, kept):
            return tuple(name.replace("{bid}", number) + end for name in templates)
    return ()


def _find_piece(names: Mapping[str, tuple[str, ...]], words: list[str]) -> tuple[str, ...]:
    """Return the name of gate or up in an architecture whose table only names both together."""
    if words[-1] not in ("gate_proj", "up_proj"):
        return ()
    for both in names.get(".".join([*words[:-1], "gate_up_proj"]), ()):
        block, _, word = both.rpartition(".")
        if word in llama_cpp.PIECES:
            return (f"{block}.{llama_cpp.PIECES[word][words[-1] == 'up_proj']}",)
    return ()


@cache
def _map_names(architecture: str) -> dict[str, tuple[str, ...]]:
    """Map paths to llama.cpp's names, leaving out ambiguous paths."""
    candidates: dict[str, set[str]] = {}
    for original, name in names_of(architecture).items():
        candidates.setdefault(canonicalize(f"{original}.weight")[0], set()).add(name)
    unique = {path: tuple(names) for path, names in candidates.items() if len(names) == 1}
    return {**llama_cpp.EVERYWHERE, **unique, **llama_cpp.NAMES.get(architecture, {})}


def _describe_misfit(path: str, stored: str) -> str:
    return (
        f"{LLAMA_CPP} reorders {display(path)}, and the numbers of heads in the file's metadata do not fit {stored}: "
        "convert the original again"
    )


def _split_name(name: str) -> tuple[str, str]:
    """Split a llama.cpp name into its path and its ending: ``.bias``, or empty for a weight."""
    if name.endswith(".bias"):
        return name.removesuffix(".bias"), ".bias"
    return name.removesuffix(".weight"), ""


def has_llama_names(checkpoint: Checkpoint) -> bool:
    """Return whether a GGUF file uses llama.cpp's names (files for ComfyUI keep the original's names)."""
    names = ("token_embd.weight", "blk.0.", "output_norm.weight", "v.", "a.", "mm.")
    known = checkpoint.gguf is not None and checkpoint.gguf.architecture in architectures()
    return known and any(name.startswith(names) for name in checkpoint.entries)


def _read_configs(*checkpoints: Checkpoint) -> Iterator[JsonFields]:
    """Yield what the checkpoints' configurations state about their language models."""
    for checkpoint in checkpoints:
        for name in MODEL_CONFIGS:
            if config := checkpoint.config.get(name):
                yield {**config, **as_object(config.get("text_config"))}


def _find_model_types(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config.get("config.json", {})
    for place in (config, as_object(config.get("text_config"))):
        model_type = place.get("model_type")
        if isinstance(model_type, str):
            yield model_type


def is_mlx(checkpoint: Checkpoint) -> bool:
    """Return whether mlx-lm or JANG wrote a checkpoint, as its metadata or its configuration shows."""
    quantization = as_object(checkpoint.config.get("config.json", {}).get("quantization"))
    is_declared = "group_size" in quantization or JANG_CONFIG in checkpoint.config
    return is_declared or any(each.get("format") == "mlx" for each in checkpoint.metadata)
