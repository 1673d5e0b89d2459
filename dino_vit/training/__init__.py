"""Pretraining: the loop, its state and setup, and what is logged."""
