"""The pages about a run (its curves, what its network attends to, a map of its images) and a comparison."""
