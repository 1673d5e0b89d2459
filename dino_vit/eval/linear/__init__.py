"""Linear classifiers on frozen features: a grid of probes, logistic regression, the protocol of 2021."""
