"""Fine-tune a pretrained backbone with timm's own parts, from a folder that timm reads.

    python examples/timm_finetune.py runs/photos photos --epochs 10

photos has a folder for each class. The classifier goes to finetuned.pth.
"""

import argparse

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import dino_vit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("weights", help="run or file of weights")
parser.add_argument("photos", help="folder with a folder for each class")
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

dino_vit.export(options.weights, "exported", format="timm", overwrite=True, verbose=False)
folders = ImageFolder(options.photos).classes
model = timm.create_model("local-dir:exported", pretrained=True, num_classes=len(folders), drop_path_rate=0.1)
augment = create_transform(**resolve_data_config(model=model), is_training=True, auto_augment="rand-m6")
photos = ImageFolder(options.photos, augment)
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
