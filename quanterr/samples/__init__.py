"""What nearer codes, better scales or another zero point would have cost, estimated from a sample of rows."""
