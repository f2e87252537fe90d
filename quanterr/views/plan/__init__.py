"""The view of a plan, and its figure."""
