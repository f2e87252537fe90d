"""Buffers and chunks: rows of stored tensors, in memory that is used again."""
