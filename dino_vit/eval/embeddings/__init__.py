"""Embedding files, and galleries of the images that they describe."""
