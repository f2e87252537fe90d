"""The comparison of two folders of images."""
