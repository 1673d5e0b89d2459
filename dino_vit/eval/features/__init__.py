"""Features of a frozen backbone: extracted, cached on disk, shared by all evaluators."""
