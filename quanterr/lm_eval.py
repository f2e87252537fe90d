"""Public import path of ``StreamedModel``, the model class for lm-evaluation-harness."""

from quanterr.evaluation.harness import StreamedModel as StreamedModel
