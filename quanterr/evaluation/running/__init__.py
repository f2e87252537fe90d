"""The run of all sides, unit by unit."""
