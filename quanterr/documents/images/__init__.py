"""The comparison of two folders of images, and its outputs."""
