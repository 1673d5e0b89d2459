"""Train a segmentation head on the frozen patches of a backbone: one linear layer, in seconds.

    python examples/segmentation_head.py photos masks runs/photos

masks has an indexed PNG for each photo, with the same name but for the suffix; 255 is ignored.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import dino_vit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("photos", help="folder")
parser.add_argument("masks", help="folder")
parser.add_argument("weights", help="run or file of weights")
parser.add_argument("--steps", type=int, default=500)
options = parser.parse_args()

backbone = dino_vit.load_backbone(options.weights)
paths = [
    path
    for path in sorted(Path(options.photos).glob("*.*"))
    if Path(options.masks, f"{path.stem}.png").exists()
]
maps = backbone.embed(paths, tokens="patches", reshape=True)  # (n, width, rows, columns)
images = (np.array(Image.open(Path(options.masks, f"{path.stem}.png"))) for path in paths)
masks = torch.stack([backbone.transform.place_mask(torch.from_numpy(image)) for image in images]).long()
test = torch.arange(len(paths)) % 5 == 0  # every fifth photo
head = torch.nn.Conv2d(maps.shape[1], int(masks[masks < 255].max()) + 1, 1)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
for _ in range(options.steps):
    chosen = (~test).nonzero()[torch.randint(int((~test).sum()), (16,))].flatten()
    logits = F.interpolate(head(maps[chosen]), masks.shape[1:], mode="bilinear")
    optimizer.zero_grad()
    F.cross_entropy(logits, masks[chosen], ignore_index=255).backward()
    optimizer.step()
with torch.no_grad():
    predicted = F.interpolate(head(maps[test]), masks.shape[1:], mode="bilinear").argmax(1)
counted = masks[test] < 255
right = (predicted == masks[test])[counted].float().mean()
print(f"{100 * right:.1f} % of the pixels of {int(test.sum())} photos are right")
torch.save(head.state_dict(), "head.pth")
