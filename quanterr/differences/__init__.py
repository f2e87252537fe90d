"""What changed between two results of one kind."""
