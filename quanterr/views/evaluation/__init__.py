"""The view of an evaluation, its figure, and the front matter of model cards."""
