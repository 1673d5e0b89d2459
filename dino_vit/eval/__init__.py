"""Evaluation protocols as functions, and the figures that a run reports while it trains."""
