"""The page about a run: its curves, what its network attends to, a map of its images."""
