"""Searching for images by their features, and how well the right ones are found."""
