"""Public import path of ``StreamedModel``, the model class for lm-evaluation-harness."""

from quanterr.evaluation.texts.harness import StreamedModel as StreamedModel
