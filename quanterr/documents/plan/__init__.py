"""Plans: a recipe for each layer under a budget; model, views and outputs."""
