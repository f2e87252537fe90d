"""The view of a diff of two rankings, evaluations, plans, inspections or comparisons of images."""
