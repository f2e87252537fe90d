"""``quanterr.lm_eval.StreamedModel``: see evaluation/harness.py."""

from quanterr.evaluation.harness import StreamedModel as StreamedModel
