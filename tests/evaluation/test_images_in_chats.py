"""Models that see images: their text and conversations with images, compared with plain transformers."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.small_models import load_tensors, quantized_by, save_model, with_words
from support.tolerances import FLOAT64
from test_evaluate import quantized_fp8
from torch import Tensor

import quanterr
from quanterr.errors import UsageError
from quanterr.evaluation.texts import conversations

pytestmark = pytest.mark.session

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")'
)
IMAGE, START = 80, 81  # tokens
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SIGHT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = SIGHT | {"image_size": 16, "patch_size": 4}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
QWEN = {"image_token_id": IMAGE, "video_token_id": 82, "vision_start_token_id": START, "vision_end_token_id": 83}
QWEN_SIGHT = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2,
}  # fmt: skip


def config_of(name: str):
    """Return the config of a small model."""
    make = transformers
    match name:
        case "llava":
            sight = make.CLIPVisionConfig(**SQUARE)
            text = make.LlamaConfig(**TEXT)
            return make.LlavaConfig(text_config=text, vision_config=sight, image_token_index=IMAGE)
        case "gemma3":
            text = TEXT | {"sliding_window": 8, "query_pre_attn_scalar": 8}
            return make.Gemma3Config(
                text_config=text, vision_config=SQUARE, mm_tokens_per_image=4, image_token_index=IMAGE
            )
        case "smolvlm":
            text = make.LlamaConfig(**TEXT)
            return make.SmolVLMConfig(text_config=text, vision_config=SQUARE, image_token_id=IMAGE, scale_factor=2)
        case "qwen2_5_vl":
            sight = QWEN_SIGHT | {"window_size": 16, "fullatt_block_indexes": [1]}
            return make.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": MROPE}, vision_config=sight, **QWEN)
        case "qwen3_vl":
            sight = QWEN_SIGHT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
            return make.Qwen3VLConfig(text_config=TEXT | {"rope_parameters": MROPE}, vision_config=sight, **QWEN)
    raise KeyError(name)


def looks(name: str, ids: list[int]) -> dict[str, Tensor]:
    """Return the model arguments that a processor makes of one image."""
    draw = torch.Generator().manual_seed(7)
    square = torch.randn(1, 3, 16, 16, generator=draw)
    is_image = torch.tensor([[int(token == IMAGE) for token in ids]])
    match name:
        case "llava":
            return {"pixel_values": square}
        case "gemma3":
            return {"pixel_values": square, "token_type_ids": is_image}
        case "smolvlm":
            return {"pixel_values": square[None], "pixel_attention_mask": torch.ones(1, 1, 16, 16, dtype=torch.int64)}
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=draw)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": is_image}


TOKENS = {"llava": 16, "gemma3": 4, "smolvlm": 4, "qwen2_5_vl": 4, "qwen3_vl": 4}  # tokens that stand for one image


class Processor:
    """Stand in for a model's processor, with its tokens and random pixels."""

    image_processor, chat_template = None, "turns"

    def __init__(self, name: str) -> None:
        self.name = name

    def apply_chat_template(self, messages, add_generation_prompt=False, **_):
        ids = []
        for message in messages:
            ids += [1, 2 if message["role"] == "user" else 3]
            for part in message["content"]:
                words = [int(word[1:]) for word in part.get("text", "").split()]
                ids += words if part["type"] == "text" else [START, *[IMAGE] * TOKENS[self.name]]
            ids += [4, 5]
        ids += [1, 3] if add_generation_prompt else []
        return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} | looks(self.name, ids)


PART = {"type": "image", "path": "square.png"}
TURNS = "{% for m in messages %}w1 {{ 'w2' if m['role'] == 'user' else 'w3' }} {{ m['content'] }} w4 w5 {% endfor %}"
TURNS += "{% if add_generation_prompt %}w1 w3 {% endif %}"
CHAT = [
    [("user", [{"type": "text", "text": "w10"}, PART]), ("assistant", "w12 w13")],
    [("user", "w20"), ("assistant", "w21 w22")],
    [("user", [PART, {"type": "text", "text": "w30 w31"}]), ("assistant", "w33")],
]


@pytest.fixture(scope="module")
def square(tmp_path_factory) -> Path:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    folder = tmp_path_factory.mktemp("chat")
    image.new("RGB", (16, 16), (200, 100, 50)).save(folder / "square.png")
    lines = [[{"role": role, "content": content} for role, content in conversation] for conversation in CHAT]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def make(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """Write a model with random weights, a quantized copy, and one with the same values as plain weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config_of(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    paths = [folder / side for side in ("original", "quantized", "plain")]
    model.save_pretrained(paths[0])
    written, values = quantized_by(quantized_fp8, load_tensors(paths[0]))
    for path, tensors in zip(paths[1:], (written, values), strict=True):
        path.mkdir()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text((paths[0] / "config.json").read_text())
    with_words(paths[0])
    (paths[0] / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TURNS, "eos_token": "w4"})
    )
    return paths[0], paths[1], paths[2]


def divergences(original: Path, plain: Path, ids: Tensor, **more: Tensor) -> Tensor:
    """Return KL(original || plain) at each position of a text, by transformers alone."""
    auto = transformers.AutoModelForImageTextToText
    logits = []
    with torch.inference_mode():
        for path in (original, plain):
            model = auto.from_pretrained(path, dtype=torch.float64).eval()
            given = {key: value.double() if value.is_floating_point() else value for key, value in more.items()}
            logits.append(
                model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given)
                .logits[0]
                .log_softmax(-1)
            )
    log_p, log_q = logits
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("name", TOKENS)
def test_images_and_text_are_scored_as_in_plain_transformers(name, square, tmp_path, monkeypatch):
    original, quantized, plain = make(name, tmp_path)
    monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor(name))

    evaluation = quanterr.evaluate(original, [quantized], chat=square / "chat.jsonl", context=64, dtype="float64")

    image = [START, *[IMAGE] * TOKENS[name]]
    wholes = [
        [1, 2, 10, *image, 4, 5, 1, 3, 12, 13, 4, 5],
        [1, 2, 20, 4, 5, 1, 3, 21, 22, 4, 5],
        [1, 2, *image, 30, 31, 4, 5, 1, 3, 33, 4, 5],
    ]
    scored = [3, 3, 2]  # tokens at the end, without the w5 after them
    for n, (ids, count) in enumerate(zip(wholes, scored, strict=True)):
        more = {} if n == 1 else looks(name, ids)
        want = divergences(original, plain, torch.tensor([ids]), **more)[-count - 2 : -2]
        assert evaluation.candidates[0].scores.kld_chunks[n] == pytest.approx(float(want.mean()), rel=FLOAT64)
    towers = [
        weight
        for weight in evaluation.candidates[0].weights
        if "vision" in weight.layer_name or "visual" in weight.layer_name
    ]
    assert any(weight.output_error for weight in towers)


def with_processor(folder: Path) -> None:
    """Write a LLaVA processor that transformers builds from files, with words and images of 16 tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"w{n}": n for n in range(IMAGE)} | {"<image>": IMAGE, "[UNK]": 90}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    sides = {"height": 16, "width": 16}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size=sides, crop_size=sides),
        tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w4"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for m in messages %}w1 {{ 'w2' if m['role'] == 'user' else 'w3' }} "
        "{% for p in m['content'] %}"
        "{{ p['text'] if p['type'] == 'text' else '<image>' }} {% endfor %}w4 w5 {% endfor %}"
        "{% if add_generation_prompt %}w1 w3 {% endif %}",
    )
    processor.save_pretrained(folder)


def test_transformers_processor_makes_the_pixels(square, tmp_path):
    original, quantized, plain = make("llava", tmp_path)
    with_processor(original)
    (tmp_path / "chat.jsonl").write_text((square / "chat.jsonl").read_text().splitlines()[0])
    (tmp_path / "square.png").write_bytes((square / "square.png").read_bytes())

    evaluation = quanterr.evaluate(original, [quantized], chat=tmp_path / "chat.jsonl", context=64, dtype="float64")

    ids = [1, 2, 10, *[IMAGE] * 16, 4, 5, 1, 3, 12, 13, 4, 5]
    image = pytest.importorskip("PIL.Image").open(square / "square.png")
    pixels = transformers.AutoProcessor.from_pretrained(original).image_processor(image, return_tensors="pt")
    want = divergences(original, plain, torch.tensor([ids]), **pixels)[-5:-2]
    assert evaluation.candidates[0].scores.tokens == 3
    assert evaluation.candidates[0].scores.kld_mean == pytest.approx(float(want.mean()), rel=FLOAT64)


def test_text_alone_is_scored_without_the_image_tower(tmp_path):
    original, quantized, plain = make("qwen2_5_vl", tmp_path)
    save_file({"ids": torch.arange(3, 35)}, tmp_path / "ids.safetensors")

    evaluation = quanterr.evaluate(
        original, [quantized], tokens=tmp_path / "ids.safetensors", context=16, dtype="float64"
    )

    ids = torch.arange(3, 35).view(2, 16)
    want = [divergences(original, plain, chunk[None])[8:-1].mean() for chunk in ids]
    assert evaluation.candidates[0].scores.kld_chunks == pytest.approx([float(number) for number in want], rel=FLOAT64)


def projector(original: Path, path: Path) -> dict[str, Tensor]:
    """Write a projector file of llama.cpp in FP16 with the names of the gguf package; return its values."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)
    writer, values = gguf.GGUFWriter(path, "clip"), {}
    writer.add_type("mmproj")
    for key, number in {"block_count": 2, "embedding_length": 16, "attention.head_count": 2}.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    for name, x in load_tensors(original).items():
        if "language_model" not in name:
            # The name before transformers 5; 5.4 and 5.5 write "model." before it.
            old = re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name.removeprefix("model."))
            llama_name = table.get_name(old, (".weight", ".bias"))
            values[name] = x.half().float() if x.dim() > 1 else x
            writer.add_tensor(llama_name, values[name].half().numpy() if x.dim() > 1 else x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_only_the_language_model_has_a_cache(square, tmp_path, monkeypatch):
    original, *_ = make("llava", tmp_path)
    monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor("llava"))

    [candidate] = quanterr.evaluate(original, kv="fp8_tensor", chat=square / "chat.jsonl", context=64).candidates

    errors = {block.name: block.relative_error for block in candidate.blocks if ".layers." in block.name}
    assert 4 == len(errors)
    assert all(("vision" in name) == (error == 0) for name, error in errors.items())


def test_projector_of_llama_cpp_is_the_tower_of_the_original(square, tmp_path, monkeypatch):
    original, _, plain = make("llava", tmp_path)
    monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor("llava"))
    values = load_tensors(original) | projector(original, tmp_path / "mmproj.gguf")
    save_file(values, plain / "model.safetensors", {"format": "pt"})

    evaluation = quanterr.evaluate(
        original, [tmp_path / "mmproj.gguf"], chat=square / "chat.jsonl", context=64, dtype="float64"
    )

    ids = [1, 2, 10, START, *[IMAGE] * 16, 4, 5, 1, 3, 12, 13, 4, 5]
    want = divergences(original, plain, torch.tensor([ids]), **looks("llava", ids))[-5:-2]
    [candidate] = evaluation.candidates
    assert ([], "omitted_parts") == (candidate.missing, candidate.findings[0].code)
    assert "21 tensors run as the original has them: in the file of the language model" in candidate.findings[0].message
    assert candidate.scores.kld_chunks[0] == pytest.approx(float(want.mean()), rel=FLOAT64)


class TestRefusals:
    def test_image_too_large_for_the_context_is_named(self, square, tmp_path, monkeypatch):
        original, quantized, _ = make("llava", tmp_path)
        monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor("llava"))
        with pytest.raises(UsageError, match="28 tokens with its images and sounds, which cannot be cut"):
            quanterr.evaluate(original, [quantized], chat=square / "chat.jsonl", context=16)

    def test_draft_with_images_is_refused(self, square, tmp_path, monkeypatch):
        original, _, _ = make("llava", tmp_path)
        monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor("llava"))
        draft = save_model("llama", tmp_path / "draft")
        with pytest.raises(UsageError, match="have images or sounds, which a draft does not take"):
            quanterr.evaluate(original, chat=square / "chat.jsonl", context=64, draft=[draft])

    def test_model_without_a_processor_is_named(self, square, tmp_path):
        original, quantized, _ = make("llava", tmp_path)
        with pytest.raises(UsageError, match=r"line 1: has images or sounds, but .* has no processor"):
            quanterr.evaluate(original, [quantized], chat=square / "chat.jsonl", context=64)

    @pytest.mark.parametrize(
        ("part", "says"),
        [
            ({"type": "image", "path": "none.png"}, "none.png: no image that can be read"),
            ({"type": "image", "path": "chat.jsonl"}, "chat.jsonl: no image that can be read"),
            ({"type": "image", "url": "https://example.com/cat.png"}, "line 1: no conversation"),
            ({"type": "video", "path": "a.mp4"}, "line 1: no conversation"),
        ],
    )
    def test_unsupported_part_is_named(self, part, says, square, tmp_path, monkeypatch):
        original, quantized, _ = make("llava", tmp_path)
        monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor("llava"))
        chat = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "w3"}]
        (square / "odd.jsonl").write_text(json.dumps(chat))
        with pytest.raises(UsageError, match=says):
            quanterr.evaluate(original, [quantized], chat=square / "odd.jsonl", context=64)
