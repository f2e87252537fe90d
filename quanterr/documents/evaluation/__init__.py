"""The evaluation of candidates on a text, and its outputs."""
