"""Plans, which choose the best recipe for each layer within a budget, from measurements on the real weights.

1  every recipe quantizes the original in one pass, which gives the size and the cost of each layer
2  layers that a runtime fuses share a recipe
3  util/knapsack.py finds the minimum cost within the budget, and a lower bound of it
"""
