"""The evaluation of candidates on a text."""
