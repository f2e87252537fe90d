"""Several candidates for one original: made from their reports, and shown as compare's report is."""
