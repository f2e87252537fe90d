"""Make tokenizers.json.xz: small tokenizers as publishers store them, and the keys that llama.cpp's converter makes.

    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36, and unpack it; pip install sentencepiece protobuf
    PYTHONPATH=tests python tests/golden_tokenizers/make.py llama_cpp_python-0.3.36/vendor/llama.cpp

Tokenizers are trained by tokenizers and sentencepiece. The converter recognizes known tokenizers by a hash of tokens,
which these cannot have: it is told which one each stands for.
"""

import importlib
import json
import lzma
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FILE = Path(__file__).with_name("tokenizers.json.xz")
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEXT = """The quick brown fox doesn't jump over 12 lazy dogs; in 2024 it jumped over 1,234,567 of them, at 3.50 each.
    def indented(code):  # four spaces, then two
        return "tabs\tand  spaces   too"
Größe, naïve café, Übermaß. Привет, мир! 你好,世界 и 日本語 😀🦙
The theory of the thing is that there is a thing to think through, and that they'll've thought it's there then.
"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
    r"\s+"
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def main(checkout: Path) -> None:
    """Write the file."""
    sys.path[:0] = [str(checkout), str(checkout / "gguf-py")]
    documents = {}
    for name, (make, class_name, pre) in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make(folder)
            size = len(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()) + 3
            config = write_model(class_name, folder, size)
            keys = convert(folder, pre)
            files = {file: (folder / file).read_text() for file in FILES if (folder / file).exists()}
            files["tokenizer.json"] = json.loads(files["tokenizer.json"])
            documents[name] = {"config": config, "files": files, "keys": keys}
    FILE.write_bytes(lzma.compress(json.dumps(documents, ensure_ascii=False).encode(), preset=9 | lzma.PRESET_EXTREME))


def write_model(class_name: str, folder: Path, size: int) -> dict[str, Any]:
    """Write a model with as few weights as the converter accepts, and return its config."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    small |= {"num_key_value_heads": 2, "head_dim": 16} if class_name != "BertModel" else {}
    config = getattr(transformers, class_name).config_class(**small, vocab_size=size, pad_token_id=0, eos_token_id=1)
    config.architectures = [class_name]
    config.save_pretrained(folder)
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors", {"format": "pt"})
    return {"model_type": config.model_type, "architectures": [class_name]}


def convert(folder: Path, pre: str) -> dict[str, Any]:
    """Return the keys of a tokenizer."""
    conversion, gguf = importlib.import_module("conversion"), importlib.import_module("gguf")
    hparams = conversion.ModelBase.load_hparams(folder, False)
    architecture = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    model_class = conversion.get_model_class(architecture, mmproj=False)
    model = model_class(folder, gguf.LlamaFileType.ALL_F32, folder / "out.gguf")
    model.get_vocab_base_pre = lambda _tokenizer: pre
    model.set_vocab()
    keys: dict[str, Any] = {}
    for shard in model.gguf_writer.kv_data:
        keys |= {key: value.value for key, value in shard.items() if key.startswith("tokenizer.")}
    as_text = {
        key: [as_str(item) for item in value] if isinstance(value, list) else value for key, value in keys.items()
    }
    return as_text | {"general.architecture": gguf.MODEL_ARCH_NAMES[model.model_arch]}


def as_str(item: Any) -> Any:
    """Return bytes as text, and types of tokens as numbers."""
    if isinstance(item, bytes):
        return item.decode()
    return int(item) if isinstance(item, int) else item


def byte_level(words: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    """Train a tokenizer that joins bytes; one of its tokens is not a join of others."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, class_name: str, **config: Any) -> None:
    """Write a tokenizer as publishers do."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name, **config}))


def gpt2(folder: Path) -> None:
    """Write a tokenizer like that of GPT-2."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(SPECIAL[:1])
    save(tokenizer, folder, "GPT2Tokenizer", bos_token=SPECIAL[0], eos_token=SPECIAL[0], unk_token=SPECIAL[0])


def smollm(folder: Path) -> None:
    """Write a tokenizer like that of SmolLM2."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = byte_level(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0]}
    save(tokenizer, folder, "GPT2Tokenizer", add_prefix_space=False, chat_template=TEMPLATE, **named)


def llama3(folder: Path) -> None:
    """Write a tokenizer like that of Llama 3."""
    words = [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer = byte_level(pre_tokenizers.Sequence(words), ignore_merges=True)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    vocab["Ġquick"] = len(vocab)  # not a join of others
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) != "Ġquick"]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in names])
    bos = names[0]
    around = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    save(tokenizer, folder, "PreTrainedTokenizerFast", bos_token=bos, eos_token=names[2], chat_template=TEMPLATE)


def qwen2(folder: Path) -> None:
    """Write a tokenizer like that of Qwen2 and Qwen3, by their class."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    words = [
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    trained = json.loads(byte_level(pre_tokenizers.Sequence(words), normalizers.NFC()).to_str())["model"]
    merges = [tuple(pair) for pair in trained["merges"]]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=trained["vocab"], merges=merges, additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer.save_pretrained(folder)


def qwen35(folder: Path) -> None:
    """Write a tokenizer like that of Qwen3.5, by its class, which older versions of transformers lack."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX, Qwen3_5Tokenizer

    words = [
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    trained = json.loads(byte_level(pre_tokenizers.Sequence(words), normalizers.NFC()).to_str())["model"]
    merges = [tuple(pair) for pair in trained["merges"]]
    tokenizer = Qwen3_5Tokenizer(vocab=trained["vocab"], merges=merges, additional_special_tokens=SPECIAL[1:])
    tokenizer.save_pretrained(folder)
    save(tokenizer.backend_tokenizer, folder, "PreTrainedTokenizerFast", eos_token=SPECIAL[0])


def train_pieces(folder: Path, **options: Any) -> None:
    """Write a tokenizer.model of SentencePiece."""
    import sentencepiece

    (folder / "text.txt").write_text(TEXT * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=470,
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.99, minloglevel=2, **options,
    )  # fmt: skip


def llama(folder: Path) -> Tokenizer:
    """Write a tokenizer like that of Llama 2: by its class, with spaces in the normalizer, as it is published."""
    train_pieces(folder)
    slow_tokenizer = transformers.LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
    slow_tokenizer.save_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_str(json.dumps(state | {"normalizer": None, "pre_tokenizer": None}))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def llama_plain(folder: Path) -> None:
    """Write a tokenizer like that of Llama 2 that puts no space before a text."""
    train_pieces(folder, add_dummy_prefix=False)
    transformers.LlamaTokenizer.from_pretrained(folder, add_prefix_space=False, add_bos_token=True).save_pretrained(
        folder
    )


def describe_added(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the added tokens as published configurations list them."""
    return {
        str(number): {key: getattr(token, key) for key in ("content", "special", "normalized", "rstrip", "lstrip")}
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }


def gemma(folder: Path) -> None:
    """Write a tokenizer like that of Gemma, by its class."""
    spaces = ["▁" * n for n in (2, 3, 4)]
    train_pieces(
        folder, pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
        user_defined_symbols=["\n\n", *spaces], control_symbols=["<start_of_turn>"], add_dummy_prefix=False,
    )  # fmt: skip
    transformers.GemmaTokenizer.from_pretrained(folder, add_bos_token=True).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": describe_added(tokenizer)}))


def phi3(folder: Path) -> None:
    """Write a tokenizer like that of Phi-3: Llama's, with further tokens."""
    tokenizer = llama(folder)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, rstrip=True) for text in ("<|end|>", "<|user|>")])
    named = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "add_bos_token": False}
    save(
        tokenizer,
        folder,
        "LlamaTokenizer",
        add_eos_token=False,
        added_tokens_decoder=describe_added(tokenizer),
        **named,
    )


def bert(folder: Path, lower: bool = True) -> None:
    """Write a tokenizer like that of BERT, by its class."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.WordPieceTrainer(vocab_size=250, special_tokens=names))
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    transformers.BertTokenizer(vocab=vocab, do_lower_case=lower).save_pretrained(folder)


def bert_cased(folder: Path) -> None:
    """Write a tokenizer like that of BERT which keeps capitals."""
    bert(folder, lower=False)


# Name → how it is made, class of a model that has it, and what it stands for.
CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "gpt2": (gpt2, "LlamaForCausalLM", "gpt-2"),
    "smollm": (smollm, "LlamaForCausalLM", "smollm"),
    "llama3": (llama3, "LlamaForCausalLM", "llama-bpe"),
    "qwen2": (qwen2, "Qwen2ForCausalLM", "qwen2"),
    "qwen35": (qwen35, "Qwen3ForCausalLM", "qwen35"),
    "llama": (llama, "LlamaForCausalLM", ""),
    "llama_plain": (llama_plain, "LlamaForCausalLM", ""),
    "gemma": (gemma, "Gemma3ForCausalLM", ""),
    "phi3": (phi3, "Phi3ForCausalLM", ""),
    "bert": (bert, "BertModel", "jina-v2-en"),
    "bert_cased": (bert_cased, "BertModel", "jina-v2-en"),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
