"""Text, strict JSON, TOML files and memory: what every room uses and nothing of quantization."""
