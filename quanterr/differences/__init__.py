"""The changes between two results of the same kind."""
