"""The inspection of one checkpoint."""
