"""The error that nearer codes, better scales or another zero point would leave, estimated from a sample of rows."""
