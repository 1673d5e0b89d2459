"""Train torchvision's Mask R-CNN on the frozen patches of a backbone; it detects regions of generated scenes.

    python examples/mask_rcnn.py runs/photos --minutes 2

The map of patches comes from timm's features_only, at four strides. For other images replace `batch`.
"""

import argparse
import time

import timm
import torch
from torch.nn.functional import interpolate
from torchvision.models.detection import MaskRCNN, anchor_utils, mask_rcnn
from torchvision.ops import FeaturePyramidNetwork, box_iou, masks_to_boxes

import dino_vit
from dino_vit.data.sources.synthetic import make_scenes

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("weights", help="run or file of weights")
parser.add_argument("--minutes", type=float, default=2)
options = parser.parse_args()
backbone = dino_vit.load_backbone(options.weights)
dino_vit.export(options.weights, "exported", format="timm", overwrite=True, verbose=False)
features = {"features_only": True, "out_indices": [backbone.depth - 1], "dynamic_img_size": True}
body = timm.create_model("local-dir:exported", pretrained=True, **features)
side = backbone.image_size[0]
scenes = make_scenes(size=side)


class Pyramid(torch.nn.Sequential):
    out_channels = 64

    def forward(self, images):
        (patches,) = self[0](images)
        return self[1]({str(i): interpolate(patches, scale_factor=2 ** (2 - i)) for i in range(4)})


def batch(indices):
    targets = []
    for mask in map(scenes.mask, indices):
        labels = [i for i in mask.unique() if min((mask == i).any(0).sum(), (mask == i).any(1).sum()) > 1]
        masks = torch.stack([mask == i for i in labels])
        labels = 1 + torch.tensor(labels, dtype=torch.long)
        targets.append({"labels": labels, "masks": masks.byte(), "boxes": masks_to_boxes(masks)})
    return [torch.as_tensor(scenes.read(index)) / 255 for index in indices], targets


settings: dict[str, object] = dict.fromkeys(["min_size", "max_size", "size_divisible"], side)
settings |= {"image_mean": backbone.provenance.mean, "image_std": backbone.provenance.std}
settings |= {"box_batch_size_per_image": 32, "rpn_post_nms_top_n_test": 100, "box_detections_per_img": 10}
sizes = [[side // n] for n in (8, 4, 2, 1)]
settings["rpn_anchor_generator"] = anchor_utils.AnchorGenerator(sizes, [[0.5, 1.0, 2.0]] * 4)
settings["mask_head"] = mask_rcnn.MaskRCNNHeads(Pyramid.out_channels, (64, 256), dilation=1)
pyramid = Pyramid(body.requires_grad_(False), FeaturePyramidNetwork([backbone.width] * 4, 64))
detector = MaskRCNN(pyramid, 1 + len(scenes.classes), **settings)
optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-3)
end, step = time.time() + 60 * options.minutes, 0
while time.time() < end:
    optimizer.zero_grad()
    loss = sum(detector(*batch(range(4 * step, 4 * step + 4))).values())
    loss.backward()
    optimizer.step()
    step += 1
images, targets = batch(range(19_980, 20_000))
with torch.no_grad():
    overlaps = [
        box_iou(target["boxes"], output["boxes"]) * (output["labels"] == target["labels"][:, None])
        for output, target in zip(detector.eval()(images), targets, strict=True)
    ]
detected = torch.cat([(overlap > 0.5).any(1) for overlap in overlaps])
recall = 100 * detected.float().mean()
print(f"steps: {step}, loss {loss:.2f}; {recall:.0f} % of other regions are detected (IoU > 0.5)")
