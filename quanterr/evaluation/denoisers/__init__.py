"""What only denoisers need: recorded and made-up calls, rollouts, and the config that belongs to a single file."""
