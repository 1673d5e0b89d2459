"""The library's views, networks and loss in your own training loop: plain PyTorch, on one device.

    python examples/own_loop.py photos --steps 2000

The backbone goes to own.safetensors, which every command takes for `weights=`.
"""

import argparse
from functools import partial
from itertools import islice

import torch

from dino_vit import save_backbone
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.open import open_source
from dino_vit.method.objective import Objective, Sizes
from dino_vit.method.optim import ema_update
from dino_vit.method.targets import Center
from dino_vit.method.terms.cls import Cls
from dino_vit.models.head import DINOHead
from dino_vit.models.student_teacher import build_networks
from dino_vit.views.build import build_augment, build_loader

if __name__ == "__main__":  # which DataLoader workers on macOS must not run again
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="folder")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    norm = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    config = PretrainConfig(data={**norm, "workers": 2}, views={"global_size": 96, "local_size": 48})
    loader = build_loader(
        config, open_source(options.photos), global_batch=32, rank=0, world_size=1, pin=False
    )
    augment = build_augment(config).to(device)
    shape = {"image_size": 96, "patch_size": 8, "width": 192, "depth": 6, "heads": 3}
    heads = {"head": partial(DINOHead, prototypes=4096)}
    networks = build_networks(backbone=shape, drop_path=0.1, heads=heads)
    student, teacher = (network.to(device) for network in networks)
    sizes = Sizes(views=10, global_views=2, size=(96, 96), grid=(12, 12))
    term = Cls(1.0, sizes, Center(prototypes=4096).to(device), student_temperature=0.1)
    objective = Objective([term])
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04)
    for step, batch in enumerate(islice(loader.batches(), options.steps)):
        views = [augment(batch.views[size].to(device), batch.augment[size]) for size in batch.views]
        losses = objective(student, teacher, views, None, images=len(batch.samples), teacher_temperature=0.04)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        ema_update(list(teacher.parameters()), list(student.parameters()), momentum=0.996)
        objective.update()
        if step % 10 == 0:
            print(f"step {step}: loss {losses.total:.3f}")
    save_backbone(teacher.backbone, "own.safetensors", **norm)
