"""What programs that convert checkpoints do to names, rows and values, as data."""
