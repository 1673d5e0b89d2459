"""Fine-tune a pretrained backbone with timm's own parts, from an export that timm reads.

    python examples/timm_finetune.py runs/photos photos --epochs 10

photos has a folder for each class. The classifier goes to finetuned.pth.
"""

import argparse

import timm
import torch
from timm.data import create_transform
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import dino_vit
from dino_vit.weights.card import model_arguments

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("weights", help="run or file of weights")
parser.add_argument("photos", help="folder with a folder for each class")
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

backbone = dino_vit.load_backbone(options.weights)
written = dino_vit.export(options.weights, "exported.pth", format="timm", overwrite=True, verbose=False).path
size, mean, std = backbone.image_size, backbone.provenance.mean, backbone.provenance.std
augment = create_transform(size, is_training=True, mean=mean, std=std, auto_augment="rand-m6")
photos = ImageFolder(options.photos, augment)
arguments = model_arguments(backbone, "timm") | {"num_classes": len(photos.classes), "drop_path_rate": 0.1}
model = timm.models.VisionTransformer(**arguments)
timm.models.load_checkpoint(model, written, strict=False)  # but for the new classifier
optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05, layer_decay=0.75)
for epoch in range(options.epochs):
    correct = 0
    for images, labels in DataLoader(photos, batch_size=32, shuffle=True):
        logits = model(images)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        correct += int((logits.argmax(1) == labels).sum())
    print(f"epoch {epoch + 1}: {100 * correct / len(photos):.1f} % of the training photos are right")
torch.save(model.state_dict(), "finetuned.pth")
