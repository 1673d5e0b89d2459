"""Images in: a table of them, where they are stored, how they are decoded, labels, statistics."""
