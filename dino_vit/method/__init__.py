"""The mathematics of a step: loss, centre, schedules, optimisers and EMA; no file and no process in it."""
