"""Builds the small originals that producers quantize: random weights, a few outlier channels, by architecture.

    python tests/producers/models.py FOLDER

Needs transformers, and diffusers for the transformer of an image model.
"""

import sys
from pathlib import Path

import torch
import transformers as t
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SMALL_SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MLP = {"intermediate_size": 256}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}

MODELS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL_SIZES, **HEADS, **MLP)),
    "llama_mha": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL_SIZES, **{**HEADS, "num_key_value_heads": 4}, **MLP)),
    "qwen2": lambda: t.Qwen2ForCausalLM(
        t.Qwen2Config(**SMALL_SIZES, num_attention_heads=4, num_key_value_heads=2, **MLP, tie_word_embeddings=True)
    ),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(**SMALL_SIZES, **HEADS, **MLP, **EXPERTS, num_experts=4)
    ),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**SMALL_SIZES, **HEADS, **MLP, num_local_experts=4)),
    "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **SMALL_SIZES,
            num_attention_heads=4,
            num_key_value_heads=4,
            **MLP,
            **EXPERTS,
            **MLA,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        )
    ),
    "gpt_oss": lambda: t.GptOssForCausalLM(t.GptOssConfig(**SMALL_SIZES, **HEADS, **MLP, num_local_experts=4)),
    "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SMALL_SIZES, **HEADS, **MLP)),
    "phi3": lambda: t.Phi3ForCausalLM(
        t.Phi3Config(**SMALL_SIZES, num_attention_heads=4, num_key_value_heads=2, **MLP, pad_token_id=0)
    ),
    "opt": lambda: t.OPTForCausalLM(
        t.OPTConfig(
            vocab_size=512,
            hidden_size=128,
            num_hidden_layers=2,
            ffn_dim=256,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=128,
        )
    ),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=4, n_positions=256)),
    "t5": lambda: t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=512, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    ),
    "falcon": lambda: t.FalconForCausalLM(
        t.FalconConfig(vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
    ),
    "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(vocab_size=512, hidden_size=128, num_hidden_layers=2)),
}


def flux() -> torch.nn.Module:
    """Return a small transformer like FLUX."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12),
    )


def tokenizer() -> t.PreTrainedTokenizerFast:
    """Return a tokenizer of 512 words, for producers that need one."""
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return t.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w0")


def with_outliers(model: torch.nn.Module) -> torch.nn.Module:
    """Enlarge some input channels of each matrix, and give norms and biases random values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                columns = torch.randperm(parameter.shape[-1], generator=generator)[: max(parameter.shape[-1] // 32, 1)]
                parameter[..., columns] *= 4
            else:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.to(torch.bfloat16)


def main(folder: Path, names: list[str]) -> None:
    """Write the named models, or each missing one."""
    for name, make in {**MODELS, "flux": flux}.items():
        if (names and name not in names) or (folder / name).exists():
            continue
        torch.manual_seed(0)
        try:
            with_outliers(make()).save_pretrained(folder / name)
            tokenizer().save_pretrained(folder / name)
            print(f"made {name}", flush=True)
        except Exception as error:  # one that this transformers cannot build is said, the others go on
            print(f"not made: {name}: {error!r}"[:300], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
