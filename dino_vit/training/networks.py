"""Build the networks of a run and its objective, FSDP, compilation; weights are read in `inputs.py`."""

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import STUDENT_TEMPERATURE
from dino_vit.core.distributed import apply_fsdp
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.method.objective import Objective, Sizes, Term
from dino_vit.method.targets import CENTERS
from dino_vit.method.terms import all_terms
from dino_vit.method.terms.cls import Cls
from dino_vit.method.terms.gram import Gram
from dino_vit.method.terms.imitation import Imitation, PatchImitation
from dino_vit.method.terms.patch import Patch
from dino_vit.models.backbone import Backbone
from dino_vit.models.head import DINOHead, FeatureHead
from dino_vit.models.student_teacher import HeadBuilder, Network, build_networks
from dino_vit.models.vit import VisionTransformer, ViTConfig
from dino_vit.training.inputs import Inputs
from dino_vit.training.state import TrainingState

# 1.5 times 18 s of compiling, over the 4 ms that a step saved: 49 to 45 for ViT-S/16, 64 images, on an H200.
COMPILED_STEPS = 6_750


def build_untrained(
    config: PretrainConfig,
    architecture: Mapping[str, Any] | None = None,
    feature_teacher: Backbone | None = None,
) -> tuple[Network, Network]:
    """Build student and teacher as at the start of a run, their parameters drawn from the seed.

    `architecture` is that of trained weights, which the settings may not fully describe; `feature_teacher` is
    the backbone whose features the student imitates.
    """
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
    keywords = dict(architecture or _architecture(config))
    keywords.pop("drop_path", None)  # the student's is a setting of the run, the teacher has none
    if not config.model.timm:
        for name in ("drop_path_schedule", "dropout", "attention_dropout"):
            keywords[name] = getattr(config.model, name)
        rotary = keywords["positions"] == "rotary"
        keywords["rotary_rescale"] = config.model.rotary_rescale if rotary else None
        keywords["mask_token"] = config.hides_patches
    has_patch_head = bool(config.loss.patch_weight) and not config.head.shared
    head: HeadBuilder = partial(DINOHead, **config.head.model_dump(exclude={"shared"}))
    if feature_teacher is not None:
        has_patch_head = feature_teacher.has_patches and config.teacher.patch_weight > 0
        head = partial(FeatureHead, out_dim=feature_teacher.width)
    return build_networks(
        backbone=keywords,
        drop_path=config.model.drop_path,
        heads={"head": head} | ({"patch_head": head} if has_patch_head else {}),
        student_heads={kind.head_name: kind.build_head for kind in _weighted(config) if kind.build_head},
    )


def _weighted(config: PretrainConfig) -> dict[type[Term], float]:
    """Return the terms that nothing but their weight decides on, in the order of their settings."""
    kinds = {kind.setting: kind for kind in all_terms().values()}
    return {kinds[name]: weight for name, weight in config.loss if name in kinds and weight}


def _architecture(config: PretrainConfig) -> dict[str, Any]:
    """Return the arguments of the backbone that the settings describe."""
    arguments = {"image_size": config.image_shape, "channels": config.data.channels}
    if config.model.timm:
        return {"name": config.model.timm, **arguments}
    width, depth, heads = config.model.shape
    own = config.model.model_dump(include={argument.name for argument in fields(ViTConfig)})
    return own | arguments | {"width": width, "depth": depth, "heads": heads}


def student_and_teacher(config: PretrainConfig, inputs: Inputs) -> tuple[Network, Network]:
    """Build student and teacher, and check that they take what the run gives them."""
    feature_teacher = inputs.feature_teacher
    architecture = inputs.weights.architecture if inputs.weights else None
    student, teacher = build_untrained(config, architecture, feature_teacher)
    have_patches = student.backbone.has_patches and (feature_teacher is None or feature_teacher.has_patches)
    if feature_teacher and config.teacher.patch_weight and not have_patches:
        raise ValueError("one of student and frozen teacher has no patches; set teacher.patch_weight=0")
    student.backbone.grad_checkpointing = config.model.grad_checkpointing
    views = config.views
    for size in [views.global_shape, *([views.local_shape] if views.local_count else [])]:
        student.backbone.grid_of(*size)  # raises if the backbone does not take images of this size
    if inputs.trained:
        tensors = inputs.trained.state_dict()
        if not config.hides_patches:
            tensors.pop("mask_token", None)
        for network in (student, teacher):
            network.backbone.load_state_dict(tensors)
    return student, teacher


def build_objective(
    config: PretrainConfig, inputs: Inputs, student: Backbone, device: torch.device
) -> Objective:
    """Build the objective with the networks that it compares the student with, beside its average."""
    views, teacher = config.views, inputs.frozen_teacher
    if teacher or inputs.gram_teacher:
        from dino_vit.training.frozen_networks import check_frozen_teacher, check_gram_teacher

        if inputs.gram_teacher:
            check_gram_teacher(config, inputs.gram_teacher, student)
        if teacher:
            check_frozen_teacher(config, teacher.backbone, student)
    sizes = Sizes(
        views=views.global_count + views.local_count,
        global_views=views.global_count,
        size=views.global_shape,
        grid=student.grid_of(*views.global_shape),
    )
    frozen = teacher and (teacher.network or Network(teacher.backbone, {}).eval())
    objective = Objective(_build_terms(config, inputs, sizes, device), frozen and frozen.to(device))
    if teacher:
        for name, center in teacher.centers.items():
            if (own := objective.state.get(name.removesuffix(".center"))) is not None:
                own.get_buffer("center").copy_(center)
    return objective


def _build_terms(config: PretrainConfig, inputs: Inputs, sizes: Sizes, device: torch.device) -> list[Term]:
    """Return the terms of the loss; the first one is that of CLS tokens."""
    build = CENTERS[config.loss.centering]
    weight, terms = config.loss.patch_weight, list[Term]()
    if (backbone := inputs.feature_teacher) is not None:
        terms.append(Imitation(1.0, sizes))
        if config.teacher.patch_weight:
            grid = backbone.grid_of(*config.views.global_shape)
            terms.append(PatchImitation(config.teacher.patch_weight, sizes, grid))
    else:
        centers = (build(prototypes=config.head.prototypes).to(device) for _ in range(2))
        terms.append(Cls(1.0, sizes, next(centers), STUDENT_TEMPERATURE))
        if weight:
            head = "head" if config.head.shared else "patch_head"
            terms.append(Patch(weight, sizes, next(centers), STUDENT_TEMPERATURE, head))
    terms += [kind(weight, sizes) for kind, weight in _weighted(config).items()]
    if inputs.gram_teacher and config.gram:
        terms.append(Gram(config.gram.weight, sizes, inputs.gram_teacher.to(device)))
    return terms


def make_sharded(
    student: Network, teacher: Network, config: PretrainConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Share the parameters of both networks among the processes."""
    if config.model.timm or config.optim.name != "adamw":
        what = "a model of timm, and an optimiser other than adamw, do not work with"
        raise ValueError(f"{what} sharded weights (compute.sharded=true, or Accelerate's FSDP)")
    for network in (student, teacher):
        assert isinstance(network.backbone, VisionTransformer)
        apply_fsdp(network, network.backbone.blocks, ["run_unsharded"], device, dtype)


def compile_run(state: TrainingState) -> Iterator[str]:
    """Compile networks and losses as `compute.compile` says; yield a note on it."""
    wanted, auto = state.config.compute.compile, state.config.compute.compile == "auto"
    is_ours = isinstance(state.student.backbone, VisionTransformer)
    if not choose_compile(wanted, state.device, state.plan.length) or (auto and not is_ours):
        return
    if auto and (missing := missing_for_compile()):
        yield f"blocks are not compiled (compute.compile=auto), which would make steps faster: {missing}"
        return
    if auto:
        yield "the first step compiles the blocks, so that others are faster; compute.compile=false avoids it"
    # FSDP gathers the weights of a block outside of its graph.
    compile_networks((state.student, state.teacher), whole=not auto and not state.sharded)
    if state.device.type == "cuda":  # a CPU computes the losses part by part, in its cache
        state.objective.compile()


def choose_compile(wanted: bool | Literal["auto"], device: torch.device, steps: int) -> bool:
    """Return whether to compile; "auto" does so on CUDA, in runs long enough to repay it."""
    return device.type == "cuda" and steps >= COMPILED_STEPS if wanted == "auto" else wanted


def missing_for_compile() -> str | None:
    """Return what this machine lacks to compile for a GPU; None if it has all."""
    from torch.utils._triton import has_triton

    if not has_triton():
        return "there is no Triton for this GPU"
    # Triton compiles what starts a kernel, against Python's headers.
    compilers = os.environ.get("CC", "gcc clang cc").split()
    if not any(map(shutil.which, compilers)):
        return "there is no C compiler (gcc or clang)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are not installed (python3-dev)"
    return None


def compile_networks(networks: Sequence[Network], *, whole: bool) -> None:
    """Compile whole networks, or their blocks, which are alike: their few graphs compile in seconds."""
    from torch._dynamo import config, reset  # slow

    # Graphs of all runs of a process would count towards the limit of a function, beyond which it is eager.
    reset()
    config.optimize_ddp = False  # graphs would be split after every 25 MB of DistributedDataParallel's
    network: Any
    for network in networks:
        if whole:
            network.run_backbone = torch.compile(network.run_backbone, dynamic=False)
            continue
        for block in network.backbone.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
