"""Several candidates for one original: a ranking made from their reports."""
