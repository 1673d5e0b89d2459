"""What everything may use and what knows no image: processes, launch, random numbers, files, checkpoints."""
