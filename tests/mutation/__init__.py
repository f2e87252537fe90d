"""Pairs of checkpoints, sound and broken, with what each break costs: what is noticed of it.

Weights have the statistics of real ones; quantizers, layouts and losses are written here, and share nothing with what
is tested: make mutate, or PYTHONPATH=tests python -m mutation.
"""
