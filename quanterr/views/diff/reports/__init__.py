"""The view of a diff of two reports."""
