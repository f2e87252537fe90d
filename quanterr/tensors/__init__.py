"""Chunks of weights, reused buffers, tensors in memory, devices, packing of codes, and checks of casts."""
