"""The page that tells of a run: its curves in words, what its network saw, a map of its images."""
