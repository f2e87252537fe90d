"""The error that a weight would have with the nearest codes, or with better scales, estimated from a sample of rows."""
