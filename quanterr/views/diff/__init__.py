"""The views of diffs."""
