"""The page about a run: its curves in words, what its network sees, a map of its images."""
