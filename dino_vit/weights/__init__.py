"""Read and write weights; `export` writes those of other libraries, and imports much more."""

from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.read_file import save_backbone

__all__ = ["WeightsError", "load_backbone", "save_backbone"]
