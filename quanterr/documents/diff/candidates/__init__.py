"""The diff of two rankings, evaluations, plans or comparisons of images, metric by metric."""
