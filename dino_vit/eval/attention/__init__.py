"""Attention maps, and pictures and videos of them."""
