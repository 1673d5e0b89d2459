"""The mathematics of a training step: loss, centre, schedules, optimisers and EMA."""
