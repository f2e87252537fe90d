"""Plans: a recipe for each layer under a budget."""
