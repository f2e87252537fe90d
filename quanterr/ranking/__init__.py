"""The ranking of candidates for one original, from their reports."""
