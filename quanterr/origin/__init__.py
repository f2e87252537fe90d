"""Decides by every stored code whether a quantized checkpoint is its original after rounding, without other changes.

places.py      counts the elements that are not as expected, and keeps the places of the first ones
copies.py      tests unquantized tensors: the original's bits, or their cast
exact.py       quantizes the original by the deterministic recipe that may have made a weight
same_bytes.py  tests whether two weights have equal decoders and equal bytes
nearest.py     tests whether each code is the nearest level to the original's value under the stored scales
tracing.py     reads all pairs of a comparison once, in threads, and tries these tests in order
classes.py     derives the class of each tensor, from this pass and from the findings
"""
