"""What can be learned from the synthetic set; what it is made of is tested with the other sources."""

import math

import pytest
import torch
from torch.nn import functional as F

from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.models.vit import VisionTransformer

STEPS, BATCH = 1500, 64  # about one minute of one core


@pytest.mark.slow
def test_labels_teach_a_small_vit_the_classes_in_minutes():
    source = SyntheticSource(length=20_000)
    images = torch.stack([source.read(index)[:1] for index in range(20_000)])
    labels = torch.arange(20_000) % 10
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=32, patch_size=4, channels=1, width=64, depth=3, heads=4, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    for step in range(STEPS):
        chosen = torch.randint(19_000, (BATCH,))
        batch = images[chosen] if step % 2 else images[chosen].transpose(-1, -2)
        batch = batch.flip(-1) if step % 4 > 1 else batch
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 100) * (1 + math.cos(math.pi * step / STEPS)) / 2
        F.cross_entropy(predicted(model, batch), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = predicted(model, images[19_000:]).argmax(1) == labels[19_000:]
    assert right.float().mean() > 0.9


def predicted(model, images):
    with torch.autocast("cpu", torch.bfloat16):
        return model(images / 127.5 - 1).float()
