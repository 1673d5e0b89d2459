"""Commands about embeddings: write them to a file, search in it, find duplicates in it."""
