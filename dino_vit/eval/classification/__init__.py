"""Classify images by frozen features: neighbours, linear classifiers, labels from a few."""
