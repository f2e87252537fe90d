"""What one checkpoint stores, and how that is shown."""

SCHEMA = "quanterr.inspection"
