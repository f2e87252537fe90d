"""Plans: a recipe for each layer under a budget; model, views and outputs.

To add an export, write a module in planning/exports/ with its row, and add it to CONSUMERS.
"""
