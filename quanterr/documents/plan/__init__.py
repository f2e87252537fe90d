"""Plans: a recipe for each layer under a budget; model, views and outputs.

To add an export, write a function in planning/exports.py and add its row to CONSUMERS.
"""
