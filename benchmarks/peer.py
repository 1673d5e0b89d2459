"""DINO by other libraries: what ours is compared with, of those that are installed.

A step of lightly's modules and one of stable-pretraining's, each on timm's network and put together as its
documentation does; and lightly-train, which trains as long as a run of ours:

    python -m benchmarks.peer RUN OUTPUT --minutes 10 --seed 0

RUN is the folder of a run of ours: its images, the size of its views and of its network are taken, everything
else is lightly-train's. Its schedules need the number of steps: two short runs measure how long a step takes.
OUTPUT/weights.pth are the weights of the teacher in timm's layout.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import read_image
from dino_vit.data.open import open_source
from dino_vit.reports.record import read_run

BATCH = 128  # lightly-train's default
TRIALS = (8, 40)  # steps
Step = Callable[[list[Tensor]], float]


def build_timm(config: PretrainConfig, drop_path: float = 0) -> timm.models.VisionTransformer:
    """Build the network of a configuration as timm has it."""
    width, depth, heads = config.model.shape
    return timm.models.VisionTransformer(
        img_size=config.views.global_shape,
        patch_size=config.model.patch_size,
        in_chans=config.data.channels,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=0,
        global_pool="token",
        dynamic_img_size=True,
        drop_path_rate=drop_path,
    )


def lightly_step(config: PretrainConfig) -> Step:
    """Return the step of lightly's modules: a pass for every view, the teacher's average first."""
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    def build() -> nn.Module:
        backbone = build_timm(config, drop_path=config.model.drop_path)
        width, head = config.model.shape[0], config.head
        sizes = (width, head.hidden_dim, head.bottleneck_dim, head.prototypes)
        return nn.Sequential(backbone, DINOProjectionHead(*sizes, norm_last_layer=head.norm_last_layer))

    student, teacher = build(), build()
    teacher.load_state_dict(student.state_dict())
    deactivate_requires_grad(teacher)
    loss_of = DINOLoss(output_dim=config.head.prototypes, warmup_teacher_temp_epochs=5)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)

    def step(views: list[Tensor]) -> float:
        update_momentum(student, teacher, 0.996)
        targets = [teacher(view) for view in views[: config.views.global_count]]
        loss = loss_of(targets, [student(view) for view in views], epoch=1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(student.parameters(), config.optim.clip)
        optimizer.step()
        return loss.item()

    return step


def stable_step(config: PretrainConfig) -> Step:
    """Return the step of stable-pretraining's DINO module on timm's network."""
    from stable_pretraining.methods.dino import DINO

    head, count = config.head, config.views.global_count
    module = DINO(
        build_timm(config, config.model.drop_path),
        projector_hidden_dim=head.hidden_dim,
        projector_bottleneck_dim=head.bottleneck_dim,
        n_prototypes=head.prototypes,
    )
    weights = module.parameters(with_callbacks=False)
    student = [weight for weight in weights if weight.requires_grad]
    optimizer = torch.optim.AdamW(student, lr=1e-5)

    def step(views: list[Tensor]) -> float:
        loss = module(global_views=views[:count], local_views=views[count:]).loss
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(student, config.optim.clip)
        optimizer.step()
        for part in (module.backbone, module.projector):
            part.update_teacher()
        return float(loss.detach())

    return step


STEPS: dict[str, Callable[[PretrainConfig], Step]] = {
    "lightly": lightly_step,
    "stable-pretraining": stable_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    config = read_run(options.run).config
    images = options.output / "images"
    source = open_source(config.data.images)
    write_images(source, images)
    train = partial(train_peer, config, images, len(source), seed=options.seed)
    seconds = []
    for steps in TRIALS:
        start = time.perf_counter()
        train(options.output / "trial", steps)
        seconds.append(time.perf_counter() - start)
    step = (seconds[1] - seconds[0]) / (TRIALS[1] - TRIALS[0])
    start = time.perf_counter()
    train(options.output / "run", int(60 * options.minutes / step))
    print(f"{time.perf_counter() - start:.0f} seconds, {step:.3f} a step in the trials", flush=True)
    exported = options.output / "run" / "exported_models" / "exported_last.pt"
    shutil.copyfile(exported, options.output / "weights.pth")


def write_images(source: ImageSet, folder: Path) -> None:
    """Write the images as files, which is what lightly-train reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(len(source)):
        to_pil_image(read_image(source, place)).save(folder / f"{place:06}.png")


def train_peer(
    config: PretrainConfig, images: Path, count: int, output: Path, steps: int, *, seed: int
) -> None:
    """Train for so many steps."""
    import lightly_train

    torch.manual_seed(seed)
    views = config.views
    model = build_timm(config)
    model.pretrained_cfg = {}  # where the export looks for the name of a published model
    lightly_train.pretrain(
        out=output,
        data=images,
        model=model,
        method="dino",
        epochs=-(-steps // (count // BATCH)),
        transform_args={"image_size": views.global_shape, "local_view": {"view_size": views.local_shape}},
        trainer_args={"max_steps": steps},
        accelerator="cpu",
        num_workers=0,
        seed=seed,
        overwrite=True,
    )


if __name__ == "__main__":
    main()
