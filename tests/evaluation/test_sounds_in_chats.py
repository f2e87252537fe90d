"""Transcripts, and conversations with sounds, score as in plain transformers."""

import inspect
import json
import math
import wave
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.small_models import load_tensors, quantized_by, with_words
from support.tolerances import FLOAT64
from test_evaluate import quantized_fp8

import quanterr
from quanterr.errors import UsageError
from quanterr.evaluation.texts import conversations

pytestmark = pytest.mark.session

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")'
)
for _package in ("soundfile", "soxr"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")
if "backend" not in inspect.signature(transformers.audio_utils.load_audio).parameters:
    pytest.skip("this version of transformers reads sounds by librosa", allow_module_level=True)
RATE, FRAMES, BANDS = 16000, 100, 8  # samples per second; the encoder's frames and bands of one second
HEARD, START = 80, 28  # tokens: of a frame, and the first of a transcript
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SIZES = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
TURN = '[{{"role": "user", "content": [{}]}}, {{"role": "assistant", "content": "{}"}}]\n'
AUDIO_PART = '{"type": "audio", "path": "tone.wav"}'


def tone(path: Path, n_samples: int = RATE // 2) -> None:
    """Write half a second of 440 Hz in 16 bits."""
    samples = array("h", (int(9000 * math.sin(2 * math.pi * 440 * n / RATE)) for n in range(n_samples)))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(RATE)
        file.writeframes(samples.tobytes())


def extractor():
    return transformers.WhisperFeatureExtractor(feature_size=BANDS, chunk_length=1)


def heard(path: Path):
    """Return the features that the extractor computes from a sound, (1, bands, frames)."""
    with wave.open(str(path)) as file:
        samples = torch.frombuffer(bytearray(file.readframes(RATE)), dtype=torch.int16).float() / 2**15
    return extractor()(samples.numpy(), sampling_rate=RATE, return_tensors="pt")["input_features"]


def make(model, folder: Path) -> tuple[Path, Path, Path]:
    """Write a model with random weights, a quantized copy, and one with its values as plain weights."""
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
    return paths[0], paths[1], paths[2]


def divergences(loader, paths: tuple[Path, Path], **given) -> torch.Tensor:
    """Return KL(original || plain) at each position, computed by transformers alone."""
    with torch.inference_mode():
        log_p, log_q = (
            loader.from_pretrained(path, dtype=torch.float64).eval()(use_cache=False, **given).logits[0].log_softmax(-1)
            for path in paths
        )
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def whisper(folder: Path) -> tuple[Path, Path, Path]:
    """Write Whisper with letters as tokens."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=48, num_mel_bins=BANDS, max_source_positions=FRAMES // 2, max_target_positions=32, decoder_layers=2,
        decoder_attention_heads=2, decoder_ffn_dim=48, decoder_start_token_id=START, pad_token_id=27, bos_token_id=27,
        eos_token_id=27, **SIZES,
    )  # fmt: skip
    paths = make(transformers.WhisperForConditionalGeneration(config), folder)
    marks = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]
    letters = {chr(97 + n): n for n in range(26)} | {"Ġ": 26}
    tokenizer = transformers.WhisperTokenizer(vocab=letters, merges=[], additional_special_tokens=marks)
    transformers.WhisperProcessor(extractor(), tokenizer).save_pretrained(paths[0])
    return paths


def test_transcripts_are_scored_as_in_plain_transformers(tmp_path):
    original, quantized, plain = whisper(tmp_path)
    tone(tmp_path / "tone.wav")
    (tmp_path / "chat.jsonl").write_text(
        TURN.format(AUDIO_PART, "ab") + TURN.format(AUDIO_PART, "hello you") + TURN.format(AUDIO_PART, "")
    )

    evaluation = quanterr.evaluate(original, [quantized], chat=tmp_path / "chat.jsonl", context=32, dtype="float64")

    features = heard(tmp_path / "tone.wav").double()
    loader, end, mark = transformers.WhisperForConditionalGeneration, 27, 32
    for n, letters in enumerate(([0, 1], [7, 4, 11, 11, 14, 26, 24, 14, 20], [])):
        ids = torch.tensor([[START, mark, *letters, end]])
        want = divergences(loader, (original, plain), input_features=features, decoder_input_ids=ids[:, :-1])
        mean = float(want[-len(letters) - 1 :].mean())
        assert evaluation.candidates[0].scores.kld_chunks[n] == pytest.approx(mean, rel=FLOAT64)
    assert ("transcription", 14) == (evaluation.kind, evaluation.candidates[0].scores.tokens)
    encoder = [weight for weight in evaluation.candidates[0].weights if "encoder.layers" in weight.layer_name]
    assert any(weight.output_error for weight in encoder)


class Processor:
    """Stand in for the processor of Qwen2-Audio: its tokens, and the real extractor's features."""

    feature_extractor, chat_template = extractor(), "turns"

    def apply_chat_template(self, messages, add_generation_prompt=False, **_):
        ids, sounds = [], []
        for message in messages:
            ids += [1, 2 if message["role"] == "user" else 3]
            for part in message["content"]:
                ids += [int(word[1:]) for word in part.get("text", "").split()]
                if part["type"] == "audio":
                    ids += [HEARD] * (FRAMES // 4)
                    sounds.append(part["audio"])
            ids += [4, 5]
        ids += [1, 3] if add_generation_prompt else []
        features = self.feature_extractor(sounds, sampling_rate=RATE, return_tensors="pt")["input_features"]
        frames = torch.ones(1, FRAMES, dtype=torch.int64)
        return {"input_ids": torch.tensor([ids]), "input_features": features, "feature_attention_mask": frames}


def qwen2_audio(folder: Path) -> tuple[Path, Path, Path]:
    """Write Qwen2-Audio with words as tokens."""
    torch.manual_seed(0)
    hearing = transformers.Qwen2AudioEncoderConfig(
        num_mel_bins=BANDS, max_source_positions=FRAMES // 2, num_hidden_layers=2, **SIZES
    )
    config = transformers.Qwen2AudioConfig(
        audio_config=hearing, text_config=transformers.Qwen2Config(**TEXT), audio_token_index=HEARD
    )
    paths = make(transformers.Qwen2AudioForConditionalGeneration(config), folder)
    with_words(paths[0])
    (paths[0] / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "turns", "eos_token": "w4"})
    )
    return paths


def test_sounds_and_text_are_scored_as_in_plain_transformers(tmp_path, monkeypatch):
    original, quantized, plain = qwen2_audio(tmp_path)
    monkeypatch.setattr(conversations, "make_processor", lambda folder, where: Processor())
    tone(tmp_path / "tone.wav")
    (tmp_path / "chat.jsonl").write_text(TURN.format(f'{AUDIO_PART}, {{"type": "text", "text": "w10"}}', "w12 w13"))

    evaluation = quanterr.evaluate(original, [quantized], chat=tmp_path / "chat.jsonl", context=64, dtype="float64")

    ids = torch.tensor([[1, 2, *[HEARD] * (FRAMES // 4), 10, 4, 5, 1, 3, 12, 13, 4, 5]])
    frames = torch.ones(1, FRAMES, dtype=torch.int64)
    sound = {"input_features": heard(tmp_path / "tone.wav").double(), "feature_attention_mask": frames}
    loader = transformers.Qwen2AudioForConditionalGeneration
    want = divergences(loader, (original, plain), input_ids=ids, **sound)[-5:-2]
    assert evaluation.candidates[0].scores.kld_mean == pytest.approx(float(want.mean()), rel=FLOAT64)
    assert any(weight.output_error for weight in evaluation.candidates[0].weights if "audio_tower" in weight.layer_name)


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "says"),
        [
            (TURN.format(AUDIO_PART.replace("tone", "none"), "a"), "none.wav: no audio that can be read: no such file"),
            (
                TURN.format(AUDIO_PART.replace("tone", "empty"), "a"),
                "empty.wav: no audio that can be read: it has no samples",
            ),
            (TURN.format(AUDIO_PART.replace("tone.wav", "chat.jsonl"), "a"), "chat.jsonl: no audio that can be read"),
            (TURN.format(AUDIO_PART.replace("audio", "image"), "a"), "tone.wav: the model takes no image"),
            (TURN.format(f"{AUDIO_PART}, {AUDIO_PART}", "a"), "line 1: for a model that transcribes"),
            (TURN.format('{"type": "text", "text": "a"}', "a"), "line 1: for a model that transcribes"),
            (TURN.format(AUDIO_PART, "a" * 40), r"line 1: 43 tokens with its images and sounds, which cannot be cut"),
        ],
    )
    def test_line_without_one_sound_and_one_transcript_is_named(self, line, says, tmp_path):
        original, quantized, _ = whisper(tmp_path)
        tone(tmp_path / "tone.wav")
        tone(tmp_path / "empty.wav", 0)
        (tmp_path / "chat.jsonl").write_text(line)
        with pytest.raises(UsageError, match=says):
            quanterr.evaluate(original, [quantized], chat=tmp_path / "chat.jsonl", context=32)

    def test_text_for_a_model_that_hears_is_refused(self, tmp_path):
        original, _, _ = whisper(tmp_path)
        save_file({"ids": torch.arange(3, 35)}, tmp_path / "ids.st")
        with pytest.raises(UsageError, match="whisper takes audio: give sound files and their transcripts with chat"):
            quanterr.evaluate(original, against="int8_row", tokens=tmp_path / "ids.st", context=16)

    def test_draft_of_a_model_that_hears_is_refused(self, tmp_path):
        original, _, _ = whisper(tmp_path)
        with pytest.raises(
            UsageError, match="draft: works only with models that predict the next token; whisper does not"
        ):
            quanterr.evaluate(original, chat=tmp_path / "chat.jsonl", context=16, draft=[original])
