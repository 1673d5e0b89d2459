"""Train torchvision's Mask R-CNN on the frozen patches of a backbone.

    python examples/mask_rcnn.py photos masks runs/photos --steps 500

masks has an indexed PNG for each photo: pixels of a value are an object of this class; 0 and 255 are none.
The map of patches comes from timm's features_only, at four strides.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.models.detection import MaskRCNN, anchor_utils, mask_rcnn
from torchvision.ops import FeaturePyramidNetwork, box_iou, masks_to_boxes

import dino_vit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for name, text in {"photos": "folder", "masks": "folder", "weights": "run or file of weights"}.items():
    parser.add_argument(name, help=text)
parser.add_argument("--steps", type=int, default=500)
options = parser.parse_args()
backbone = dino_vit.load_backbone(options.weights)
dino_vit.export(options.weights, "exported", format="timm", overwrite=True, verbose=False)
features = {"features_only": True, "out_indices": [backbone.depth - 1], "dynamic_img_size": True}
body, side = timm.create_model("local-dir:exported", pretrained=True, **features), backbone.image_size[0]
masks = {path.stem: path for path in Path(options.masks).glob("*.png")}
photos = [path for path in sorted(Path(options.photos).glob("*.*")) if path.stem in masks]
train, test = [path for number, path in enumerate(photos) if number % 5], photos[::5]


class Pyramid(torch.nn.Sequential):
    out_channels = 64

    def forward(self, images):
        (patches,) = self[0](images)
        return self[1]({str(i): interpolate(patches, scale_factor=2 ** (2 - i)) for i in range(4)})


def read(path):
    """Return a photo, and its objects of two pixels a side or more."""
    mask = backbone.transform.place_mask(torch.from_numpy(np.array(Image.open(masks[path.stem]))))
    sides = {i: min((mask == i).any(0).sum(), (mask == i).any(1).sum()) for i in mask.unique().tolist()}
    labels = torch.tensor([i for i in sides if i not in (0, 255) and sides[i] > 1], dtype=torch.long)
    objects = mask == labels[:, None, None]
    return backbone.transform(path), dict(labels=labels, masks=objects.byte(), boxes=masks_to_boxes(objects))


settings: dict[str, object] = dict.fromkeys(["min_size", "max_size", "size_divisible"], side)
settings |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}  # `transform` has normalised the images
sizes = [[side // n] for n in (8, 4, 2, 1)]
settings["rpn_anchor_generator"] = anchor_utils.AnchorGenerator(sizes, [[0.5, 1.0, 2.0]] * 4)
settings["mask_head"] = mask_rcnn.MaskRCNNHeads(Pyramid.out_channels, (64, 256), dilation=1)
pyramid = Pyramid(body.requires_grad_(False), FeaturePyramidNetwork([backbone.width] * 4, 64))
detector = MaskRCNN(pyramid, 255, **settings)
optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-3)
for _ in range(options.steps):
    optimizer.zero_grad()
    images, targets = zip(*map(read, random.sample(train, 4)), strict=True)
    loss = sum(detector(images, targets).values())
    loss.backward()
    optimizer.step()
detector.eval()
found = torch.zeros(0)
for photo, target in map(read, test):
    with torch.no_grad():
        (output,) = detector([photo])
    overlap = box_iou(target["boxes"], output["boxes"]) * (output["labels"] == target["labels"][:, None])
    found = torch.cat([found, (overlap > 0.5).any(1)])
print(f"loss {loss:.2f}; {100 * found.mean():.0f} % of the objects in {len(test)} other photos are detected")
