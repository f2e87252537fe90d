"""The inspection of one checkpoint, and its outputs."""
