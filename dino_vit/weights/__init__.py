"""Read and write weights: our own, DINO's, DINOv2's, timm's, torchvision's and Hugging Face's."""

from dino_vit.weights.exporting.export import export_backbone
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.saving import save_backbone

__all__ = ["WeightsError", "export_backbone", "load_backbone", "save_backbone"]
