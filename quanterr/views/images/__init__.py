"""The view of a comparison of images."""
