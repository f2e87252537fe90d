"""Two results of one kind next to each other: what changed."""
