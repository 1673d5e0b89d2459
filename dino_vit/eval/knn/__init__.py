"""Exact nearest neighbours and the weighted k-NN classifier."""
