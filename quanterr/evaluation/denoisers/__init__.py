"""Denoisers: recorded and made-up calls, rollouts, and the configs of single files."""
