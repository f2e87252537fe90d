"""The report of a comparison: its data, and the metrics that rules may name."""

SCHEMA = "quanterr.report"
NORM = "original_norm"  # per tensor: identifies the original; equal on all devices within a tolerance
FINGERPRINT = "original_fingerprint"  # per tensor: a checksum of some of its bytes
LISTS = ("findings", "layers", "other_changes", "lossless", "not_compared")  # lists whose lengths a report states
