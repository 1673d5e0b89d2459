"""One training step of ViT-S/16 beside those of other libraries, all in one run, each step in turn.

    python -m benchmarks.libraries --repeats 5 --batch 8

The 2021 code, and of lightly's modules and stable-pretraining's DINO those that are installed: the same
network, head, views and AdamW, float32, in a process tuned as `dino-vit` tunes its own. Views are ready, so
nothing is read, cut or augmented.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.measure import Table, Work, arguments, compare, report, where
from benchmarks.step import Case, Ours, Reference, make_batch
from dino_vit.cli import tune_process
from dino_vit.config.pretrain import PretrainConfig

Step = Callable[[list[Tensor]], float]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="images (default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tune_process()
    case, device = Case(options.batch, "no"), torch.device("cpu")
    works: dict[str, Work] = {"dino_vit": Ours(case), "2021 code": Reference(case.config, device)}
    batch = make_batch(case.config, device)
    views = [view for size in batch.views.values() for view in torch.split(size, options.batch)]
    for name, build in {"lightly": lightly_step, "stable-pretraining": stable_step}.items():
        if find_spec(name.replace("-", "_")):
            works[name] = partial(build(case.config), views)
        else:
            print(f"no column of {name}, which is not installed", file=sys.stderr)
    row = compare(case.name, works, items=options.batch, repeats=options.repeats)
    title = f"Training step beside other libraries, {where(options.threads)}, float32"
    report([Table(title, "images a second", [row])], options)


def lightly_step(config: PretrainConfig) -> Step:
    """Return the step of lightly's modules, put together as its documentation does."""
    from benchmarks.peer import Peer

    return Peer(config, torch.device("cpu")).step


def stable_step(config: PretrainConfig) -> Step:
    """Return the step of stable-pretraining's DINO module on timm's network."""
    from stable_pretraining.methods.dino import DINO

    from benchmarks.peer import build_timm

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


if __name__ == "__main__":
    main()
