"""Decides by every stored code whether a quantized checkpoint is its original after rounding, without other changes.

places.py     elements that are not as expected: how many, in how many rows, and where
copies.py     tensors that are not quantized: the original's bits, or their cast
exact.py      weights of which a deterministic recipe gives every value
same_bytes.py weights whose decoders and bytes are equal
nearest.py    weights of which each code is the nearest level to the original's value under the stored scales
tracing.py    one pass over all pairs of a comparison, in threads
classes.py    the class of each tensor, from this pass and from the findings
"""
