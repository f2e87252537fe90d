"""Whether a quantized model is still good: the evaluation of candidates on a text, and how it is shown."""

SCHEMA = "quanterr.evaluation"
