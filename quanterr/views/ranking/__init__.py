"""The view of a ranking, and its figure."""
