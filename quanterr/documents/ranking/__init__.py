"""Several candidates for one original: a ranking made from their reports, and its outputs."""
