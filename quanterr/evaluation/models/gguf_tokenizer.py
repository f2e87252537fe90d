"""The tokenizer of a language model, from the metadata of its GGUF file.

    PRE_TOKENIZERS  how a byte-level tokenizer divides a text into words, by tokenizer.ggml.pre
    KNOWN_KEYS      keys that are read, or that do not change the tokens of a text

The files are written as publishers of models write them, so that all versions of transformers read them in the same
way, with the class that tokenizer_config.json names or from tokenizer.json alone. A GGUF file does not state
normalization, how words are divided, and which special tokens include the spaces after them: there, the published
tokenizers are followed.

Reference: ggml-org/llama.cpp (in llama-cpp-python 0.3.36) conversion/base.py, set_vocab of each model, and
src/llama-vocab.cpp; huggingface/transformers src/transformers/models/*/tokenization_*.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quanterr.checkpoints.gguf_metadata import Value
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, itemize

KEY_PREFIX = "tokenizer."
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
KNOWN_KEYS = frozenset(
    {
        *(
            "model",
            "pre",
            "tokens",
            "scores",
            "token_type",
            "merges",
            "token_type_count",
            "eot_token_id",
            "eom_token_id",
        ),
        *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
        *("normalizer.lowercase", "normalizer.strip_accents"),
        *("prefix_token_id", "suffix_token_id", "middle_token_id"),
        *(f"fim_{place}_token_id" for place in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *SPECIAL.values(),
    }
)
KEYS_WITHOUT_EFFECT = {"remove_extra_whitespaces": False}  # keys that do not change tokens if they have this value
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # types of tokens
SPACE = "▁"  # the character for a space in vocabularies of SentencePiece


class Pre(NamedTuple):
    """The division of a text into words, whose bytes a byte-level tokenizer then joins."""

    words: JsonObject  # a pre-tokenizer of tokenizer.json
    tokenizer: str  # class in transformers of the published tokenizers
    normalizer: JsonObject | None = None
    ignore_merges: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # whether a text begins with a BOS if the file does not state it


def _make_byte_level(use_regex: bool) -> JsonObject:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _make_sequence(*parts: JsonObject, of: str = "pretokenizers") -> JsonObject:
    return {"type": "Sequence", of: list(parts)}


def _make_word_splitter(pattern: str) -> JsonObject:
    """Return a pre-tokenizer that divides a text by a pattern, between abbreviations and white space."""
    before = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
    after = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    regex = {"Regex": before + pattern + after}
    split: JsonObject = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    return _make_sequence(split, _make_byte_level(use_regex=False))


FAST_TOKENIZER = "PreTrainedTokenizerFast"
LLAMA3 = Pre(
    _make_word_splitter(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"), FAST_TOKENIZER, ignore_merges=True, adds_bos=True
)
PRE_TOKENIZERS: Mapping[str, Pre] = {
    "gpt-2": Pre(_make_byte_level(use_regex=True), "GPT2Tokenizer"),
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": Pre(_make_word_splitter(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"), "Qwen2Tokenizer", {"type": "NFC"}),
    "qwen35": Pre(_make_word_splitter(r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+"), FAST_TOKENIZER, {"type": "NFC"}),
    "smollm": Pre(
        _make_sequence({"type": "Digits", "individual_digits": True}, _make_byte_level(use_regex=True)), "GPT2Tokenizer"
    ),
}


class _Vocabulary:
    """The tokens of a file, and its other keys that begin with ``tokenizer.ggml.``."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.architecture = str(values.get("general.architecture"))
        keys_of_tokenizer = {
            key.removeprefix(KEY_PREFIX): value for key, value in values.items() if key.startswith(KEY_PREFIX)
        }
        self.keys = {
            key.removeprefix("ggml."): value for key, value in keys_of_tokenizer.items() if key.startswith("ggml.")
        }
        self.template = keys_of_tokenizer.get("chat_template")
        left = {key: value for key, value in self.keys.items() if key not in KNOWN_KEYS}
        if unknown := [
            f"{KEY_PREFIX}ggml.{key}" for key, value in left.items() if (key, value) not in KEYS_WITHOUT_EFFECT.items()
        ]:
            raise ValueError(f"{itemize(unknown, 3)} may change tokens, and quanterr does not know how")
        self.tokens = self._read_texts("tokens")
        types = self.keys.get("token_type", (NORMAL,) * len(self.tokens))
        if not isinstance(types, tuple) or len(types) != len(self.tokens):
            raise ValueError(f"{KEY_PREFIX}ggml.token_type has not one type for each of {len(self.tokens):,} tokens")
        self.types = types

    def _read_texts(self, key: str) -> list[str]:
        texts = self.keys.get(key)
        if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{KEY_PREFIX}ggml.{key} is {'missing' if texts is None else 'no list of texts'}")
        return [str(text) for text in texts]

    def merges(self) -> list[list[str]]:
        """Return the pairs of tokens that are joined, in order of priority."""
        pairs = [merge.split(" ") for merge in self._read_texts("merges")]
        if odd := next((pair for pair in pairs if len(pair) != 2), None):
            raise ValueError(f"{KEY_PREFIX}ggml.merges has {display(' '.join(odd))}, which is not a pair")
        return pairs

    def special(self, id_key: str) -> str | None:
        """Return the text of a special token; None if the file has none."""
        number = self.keys.get(id_key)
        return self.tokens[number] if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def says(self, key: str, otherwise: bool) -> bool:
        """Return the value of a yes-or-no key, or ``otherwise`` without it."""
        value = self.keys.get(key, otherwise)
        return bool(value)

    def list_added(self, swallows: bool = False) -> Iterator[JsonObject]:
        """Yield the tokens that are searched in a text before it is normalized and divided.

        ``swallows`` means that special tokens include the spaces after them.
        """
        keeping = {"<unk>", "<s>", "<|endoftext|>"}
        unknown = self.keys.get("unknown_token_id")
        for number, (text, token_type) in enumerate(zip(self.tokens, self.types, strict=True)):
            if token_type in (CONTROL, USER_DEFINED) or number == unknown:
                yield {
                    "id": number,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": swallows and token_type == CONTROL and text not in keeping,
                    "normalized": False,
                    "special": token_type != USER_DEFINED,
                }


def tokenizer_files(values: Mapping[str, Value]) -> dict[str, JsonObject]:
    """Return the tokenizer.json and the tokenizer_config.json that are derived from all keys of a GGUF file.

    Raises:
        ValueError: they cannot be derived; the message says why.
    """
    vocabulary = _Vocabulary(values)
    model_type = vocabulary.keys.get("model")
    if model_type == "gpt2":
        name, parts, adds_bos = _byte_level(vocabulary)
    elif model_type == "llama":
        name, parts, adds_bos = _sentence_piece(vocabulary)
    elif model_type == "bert":
        name, parts, adds_bos = _word_piece(vocabulary)
    else:
        raise ValueError(
            f"{KEY_PREFIX}ggml.model is {display(str(model_type))}, but only gpt2, llama and bert are known"
        )
    parts = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **parts}
    config: JsonObject = {"tokenizer_class": name, "clean_up_tokenization_spaces": False}
    config |= {field: text for field, key in SPECIAL.items() if (text := vocabulary.special(key)) is not None}
    if model_type == "bert":
        normalizer = parts["normalizer"]
        config |= {"do_lower_case": normalizer["lowercase"], "strip_accents": normalizer["strip_accents"]}
    else:
        config["add_bos_token"] = vocabulary.says("add_bos_token", adds_bos) and "bos_token" in config
        config["add_eos_token"] = vocabulary.says("add_eos_token", False) and "eos_token" in config
        bos = vocabulary.special("bos_token_id") if config["add_bos_token"] else None
        eos = vocabulary.special("eos_token_id") if config["add_eos_token"] else None
        parts["post_processor"] = _make_post_processor(vocabulary, bos, eos)
    if model_type == "llama" and "add_space_prefix" in vocabulary.keys:
        config["add_prefix_space"] = vocabulary.says("add_space_prefix", True)
    if isinstance(vocabulary.template, str):
        config["chat_template"] = vocabulary.template
    return {"tokenizer.json": parts, "tokenizer_config.json": config}


def _byte_level(vocabulary: _Vocabulary) -> tuple[str, JsonObject, bool]:
    """Return class, tokenizer.json and whether a text begins with a BOS, for a byte-level tokenizer."""
    name = vocabulary.keys.get("pre")
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        what = "missing" if name is None else display(str(name))
        raise ValueError(f"{KEY_PREFIX}ggml.pre is {what}; known are {', '.join(PRE_TOKENIZERS)}")
    model: JsonObject = {
        "type": "BPE",
        "vocab": _number_tokens(vocabulary.tokens, vocabulary.types),
        "merges": vocabulary.merges(),
    }
    model |= {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": pre.ignore_merges}
    parts: JsonObject = {
        "added_tokens": list(vocabulary.list_added()),
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.words,
        "decoder": _make_byte_level(use_regex=True),
        "model": model,
    }
    return pre.tokenizer, parts, pre.adds_bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[str, JsonObject, bool]:
    """Return the same for SentencePiece's BPE, where a text begins with a space unless the file states otherwise."""
    is_gemma, is_phi = vocabulary.architecture.startswith("gemma"), vocabulary.architecture == "phi3"
    prefix = vocabulary.says("add_space_prefix", not is_gemma)
    # The converter stores tokens that users defined with plain spaces.
    tokens = [
        text.replace(" ", SPACE) if token_type == USER_DEFINED and not text.strip(" ") else text
        for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    vocab = _number_tokens(tokens, vocabulary.types)
    merges = vocabulary.merges() if "merges" in vocabulary.keys else _find_merges(tokens, vocabulary.types)
    model: JsonObject = {
        "type": "BPE",
        "vocab": vocab,
        "merges": merges,
        "unk_token": vocabulary.special("unknown_token_id"),
    }
    model |= {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    spaces: JsonObject = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before: list[JsonObject] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    by_space: JsonObject = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    back: list[JsonObject] = [
        {**spaces, "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    added = list(vocabulary.list_added(swallows=is_phi))
    for token in added:
        token["content"] = tokens[token["id"]]
    parts: JsonObject = {
        "added_tokens": added,
        "normalizer": spaces if is_gemma else _make_sequence(*before, spaces, of="normalizers"),
        "pre_tokenizer": by_space if is_gemma else None,
        "decoder": _make_sequence(*back, of="decoders"),
        "model": model,
    }
    return "GemmaTokenizer" if is_gemma else "LlamaTokenizer", parts, True


def _word_piece(vocabulary: _Vocabulary) -> tuple[str, JsonObject, bool]:
    """Return the same for BERT's WordPiece; GGUF files mark the beginnings of words, not their continuations."""
    tokens = [
        text if token_type == CONTROL else text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"
        for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    normal = (text for text, token_type in zip(tokens, vocabulary.types, strict=True) if token_type == NORMAL)
    has_capitals = any(text != text.lower() for text in normal if not re.fullmatch(r"\[.*\]", text))
    lower = vocabulary.says("normalizer.lowercase", not has_capitals)
    accents = vocabulary.keys.get("normalizer.strip_accents")
    model: JsonObject = {
        "type": "WordPiece",
        "vocab": _number_tokens(tokens, vocabulary.types),
        "continuing_subword_prefix": "##",
    }
    model |= {"unk_token": vocabulary.special("unknown_token_id") or "[UNK]", "max_input_chars_per_word": 100}
    normalizer: JsonObject = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    normalizer |= {"strip_accents": accents, "lowercase": lower}
    first, last = (vocabulary.special(key) for key in ("cls_token_id", "seperator_token_id"))
    ends = (first or vocabulary.special("bos_token_id"), last or vocabulary.special("eos_token_id"))
    parts: JsonObject = {
        "added_tokens": list(vocabulary.list_added()),
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _make_post_processor(vocabulary, *ends),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": model,
    }
    return "BertTokenizer", parts, True


def _number_tokens(tokens: Sequence[str], types: Sequence[object]) -> dict[str, int]:
    """Return the number of each token, except unused ones, which only fill the vocabulary."""
    return {
        text: number
        for number, (text, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type != UNUSED
    }


def _find_merges(tokens: Sequence[str], types: Sequence[object]) -> list[list[str]]:
    """Return the pairs of tokens that make up another token, in the order of those tokens.

    This is the order of merges, as SentencePiece numbers its tokens in the order in which it learned them.
    Source: transformers, tokenization_utils_base.py, generate_merges.
    """
    taken = (NORMAL, USER_DEFINED)
    vocab = {text: n for n, (text, token_type) in enumerate(zip(tokens, types, strict=True)) if token_type in taken}
    merges = []
    for text in vocab:
        pairs = ((text[:n], text[n:]) for n in range(1, len(text)))
        pairs_of_tokens = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += [list(pair) for pair in sorted(pairs_of_tokens, key=lambda pair: (len(pair[0]), len(pair[1])))]
    return merges


def _make_post_processor(vocabulary: _Vocabulary, first: str | None, last: str | None) -> JsonObject | None:
    """Return the post-processor that puts special tokens around a text; None if both are None."""
    if first is None and last is None:
        return None
    around = [[] if text is None else [{"SpecialToken": {"id": text, "type_id": 0}}] for text in (first, last)]
    of_text = [[{"Sequence": {"id": name, "type_id": n}}] for n, name in enumerate("AB")]
    named = {text: vocabulary.tokens.index(text) for text in (first, last) if text is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*around[0], *of_text[0], *around[1]],
        "pair": [*around[0], *of_text[0], *around[1], *of_text[1], *around[1]],
        "special_tokens": {text: {"id": text, "ids": [n], "tokens": [text]} for text, n in named.items()},
    }
