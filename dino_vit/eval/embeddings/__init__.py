"""Embeddings of images: write them, search among them, find duplicates."""
