"""All targets."""

import torch  # noqa: F401 - before the processes begin, each of which would load it

from fuzz import folders, gguf_bytes, onnx_bytes, pickle_bytes, safetensors_bytes, stored_reports

TARGETS = (
    safetensors_bytes.TARGET,
    gguf_bytes.TARGET,
    gguf_bytes.IMPORTANCE,
    pickle_bytes.TARGET,
    onnx_bytes.TARGET,
    folders.INDEX_TARGET,
    folders.LABELS,
    folders.COMPARISONS,
    stored_reports.TARGET,
    stored_reports.LOST,
    stored_reports.RULES,
)
