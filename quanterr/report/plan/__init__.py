"""Which recipe each layer should have under a budget, and how that is shown and handed to quantizers.

To add an export: a function in exports.py, and its row in CONSUMERS.
"""
