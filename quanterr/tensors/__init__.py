"""Chunks of weights, reused buffers, levels of codes, and checks of casts and scales."""
