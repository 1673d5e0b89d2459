"""Evaluation: the mathematics of each protocol, and the figures that a run reports while it trains."""
