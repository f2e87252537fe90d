"""Two results of one kind next to each other: what changed, and how that is shown."""
