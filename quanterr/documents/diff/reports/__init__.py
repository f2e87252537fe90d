"""The diff of two reports of one original, layer by layer."""
