"""Read and write weights: our own, DINO's, DINOv2's, timm's, torchvision's and Hugging Face's."""

from dino_vit.weights.export import export_backbone, save_backbone
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import WeightsError

__all__ = ["WeightsError", "export_backbone", "load_backbone", "save_backbone"]
