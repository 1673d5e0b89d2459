"""Self-supervised pretraining of vision transformers with DINO."""

__version__ = "0.1.0"
