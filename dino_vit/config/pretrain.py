"""The configuration of a pretraining: its sections, the defaults of a method, and what is refused.

The checks see the settings alone; those that also know the number of images and processes are in
`config/facts.py`.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import sqrt
from typing import ClassVar, Literal, cast

from pydantic import ConfigDict, ValidationInfo, field_validator

from dino_vit.config import sections
from dino_vit.config.loading import write_yaml
from dino_vit.config.settings import Seed, Settings, get, setting, values
from dino_vit.core import Size, height_width

# Defaults that differ from those of method=dino: DINOv2's "fast" setup of a ViT-L/16 on ImageNet-1k, of which
# a smaller ViT takes all but the length and the batch.
METHODS: dict[str, dict[str, object]] = {
    "dinov2": {
        "model.drop_path": 0.3,
        "model.drop_path_schedule": "uniform",
        "model.layer_scale": 1e-5,
        "views.global_scale": (0.32, 1.0),
        "views.local_scale": (0.05, 0.32),
        "loss.teacher_temp": 0.07,
        "loss.warmup_teacher_temp_epochs": 30,
        "loss.koleo_weight": 0.1,
        "loss.patch_weight": 1.0,
        "optim.lr": 2e-3,
        "optim.lr_scaling": "sqrt",
        "optim.clip_mode": "module",
        "optim.layer_decay": 0.9,
        "optim.patch_embed_lr": 0.2,
        "teacher.momentum": 0.992,
    }
}

# At the start of a run, in epochs.
PHASES = (
    *("optim.warmup_epochs", "optim.freeze_last_layer_epochs"),
    *("loss.warmup_teacher_temp_epochs", "init.head_epochs"),
)
# Settings that a model of timm has no use for.
VIT_SETTINGS = (
    *("model.patch_size", "model.stem", "model.stem_width", "model.resnet_layers", "model.resnet_width"),
    *("model.positions", "model.rotary_rescale", "model.key_bias", "model.registers", "model.qk_scale"),
    *("model.dropout", "model.attention_dropout", "model.layer_scale", "model.drop_path_schedule"),
    *("model.patch_drop", "model.init_std", "optim.patch_embed_lr"),
)
# Settings that have no effect without another one, by that one.
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "model.stem=hybrid": ("model.resnet_layers", "model.resnet_width"),
    "model.stem=conv": ("model.stem_width",),
    "loss.patch_weight": ("head.shared",),
}


class PretrainConfig(Settings):
    """Train a vision transformer on your images, without labels (DINO)."""

    model_config = ConfigDict(validate_default=True)  # by `_defaults_of_the_method`

    method: Literal["dino", "dinov2"] = setting("dino", "defaults of 2021, or of 2023 with masked patches")
    recipe: Literal["dino", "auto"] = setting("dino", "as published; auto: fit to the images")
    seed: Seed = setting(0, "seed of every random number")
    output: str = setting("runs/pretrain", "folder of the run; a run in it is resumed", resumable=True)
    data: sections.Data = sections.Data()
    model: sections.Model = sections.Model()
    head: sections.Head = sections.Head()
    views: sections.Views = sections.Views()
    augment: sections.AugmentSettings = sections.AugmentSettings()
    loss: sections.Loss = sections.Loss()
    optim: sections.Optim = sections.Optim()
    teacher: sections.Teacher = sections.Teacher()
    budget: sections.Budget = sections.Budget()
    compute: sections.Compute = sections.Compute()
    gram: sections.Gram | None = setting(None, "set gram.weights for Gram anchoring")
    init: sections.Init | None = setting(None, "set init.weights to start from trained weights")

    positional: ClassVar = ("data.source", "output")
    examples: ClassVar = (
        "pretrain photos runs/photos recipe=auto budget.minutes=20",
        "pretrain photos --config configs/pretrain/vits16.yaml",
    )
    resumes: ClassVar = True

    @field_validator("model", "views", "loss", "optim", "teacher")
    @classmethod
    def _defaults_of_the_method(cls, section: Settings, info: ValidationInfo) -> Settings:
        """Use the method's defaults where nothing was given, without their counting as given."""
        model = section if isinstance(section, sections.Model) else info.data.get("model")
        settled = {f"{info.field_name}.{name}" for name in section.model_fields_set}
        settled |= set(VIT_SETTINGS if model and model.timm else ())
        chosen = {
            key.partition(".")[2]: value
            for key, value in METHODS.get(info.data.get("method", ""), {}).items()
            if key.startswith(f"{info.field_name}.") and key not in settled
        }
        return section.model_construct(section.model_fields_set, **dict(section) | chosen)

    @property
    def image_shape(self) -> Size:
        """Height and width of the images whose features are read."""
        return height_width(self.model.image_size or self.views.global_size)

    @property
    def hides_patches(self) -> bool:
        """Whether the student has a mask token; that of a frozen teacher sees all patches."""
        return bool(self.loss.patch_weight) and self.teacher.weights is None

    def contradictions(self) -> Iterator[str]:
        """Yield refused combinations; with recipe=auto `complete` does most, once all settings are chosen."""
        yield from _check_groups(self) if self.recipe == "auto" else refused(self)


def refused(config: PretrainConfig) -> Iterator[str]:
    """Yield every combination that no images and no launch would make right, with what to do."""
    for check in (_check_groups, _check_effects, _check_model, _check_views, _check_channels, _check_loss):
        yield from check(config)
    yield from config.data.contradictions()


def scaled_lr(lr: float, global_batch: int, scaling: str) -> float:
    """Return the learning rate at `global_batch` images of one given for 256."""
    return lr * {"linear": global_batch / 256, "sqrt": sqrt(global_batch / 256), "none": 1.0}[scaling]


def _check_groups(config: PretrainConfig) -> Iterator[str]:
    """Refuse settings that exclude each other, and a run without a length."""
    for name, section in config:
        groups = [
            {f"{name}.{key}": value for key in group if (value := getattr(section, key)) is not None}
            for group in getattr(section, "one_of", ())
        ]
        given = {key: value for group in groups for key, value in group.items()}
        if sum(map(bool, groups)) > 1:
            texts = (f"{key}={write_yaml(value)}" for key, value in given.items())
            yield f"{' and '.join(texts)} exclude each other; give one of them"
        if name == "budget" and not given:
            yield "the run has no length; give one of budget.epochs, budget.steps, budget.minutes"


def _check_effects(config: PretrainConfig) -> Iterator[str]:
    """Refuse settings that have no effect beside others."""
    now, default = values(config), values(PretrainConfig())
    changed = [key for key in now if now[key] != default.get(key)]
    for needed, keys in NEEDED_BY.items():
        key, _, value = needed.partition("=")
        is_there = now[key] == value if value else bool(now[key])
        for name in (name for name in keys if name in changed and not is_there):
            yield f"{name} has no effect without {needed}; remove it, or set that"
    if config.model.timm:
        needless = [*VIT_SETTINGS, "loss.patch_weight", "loss.edge_weight"]
        if unused := [key for key in needless if key in changed]:
            text = f"model.arch={config.model.arch} is built as timm defines it, without masked patches"
            yield f"{text}; set {' '.join(f'{key}={write_yaml(default[key])}' for key in unused)}"
    if config.augment.module:
        replaced = [key for key in changed if key.startswith("augment.") and key != "augment.module"]
        if replaced:
            yield f"augment.module takes the place of {', '.join(replaced)}; remove these, or the module"


def _check_model(config: PretrainConfig) -> Iterator[str]:
    """Check the size of the backbone, its stem, and the patches that are dropped."""
    model, views = config.model, config.views
    if model.timm and "." in model.timm:
        yield f"model.arch={model.arch} names pretrained weights; give init.weights={model.arch}"
    elif not model.arch and not (model.width and model.depth):
        yield "give model.width and model.depth, or model.arch"
    elif not model.arch and not model.heads and (width := model.shape[0]) % sections.HEAD_CHANNELS:
        channels = sections.HEAD_CHANNELS
        yield f"model.width={width} is not a multiple of the {channels} channels of a head; give model.heads"
    patch = height_width(model.patch_size)
    if stem := sections.stem_problem(model.stem, patch, model.resnet_width, "model."):
        yield f"{stem}; use another patch size or stem" if "patch" in stem else stem
    for cause in needing_all_patches(config) if model.patch_drop else ():
        yield f"{cause} needs all patches; set model.patch_drop=0"
    if model.patch_drop and views.local_count and views.local_shape == views.global_shape:
        size = f"views.local_size={get(config, 'views.local_size')}"
        yield f"model.patch_drop is about global views, which have another size than {size}; set it to 0"


def needing_all_patches(config: PretrainConfig) -> list[str]:
    """Return the settings that leave no patches to drop: those that learn more than CLS tokens."""
    given = {
        "model.positions=rotary": config.model.positions == "rotary",
        "loss.patch_weight": config.loss.patch_weight,
        "gram": config.gram,
        "teacher.weights": config.teacher.weights,
    }
    return [key for key, value in given.items() if value]


def _check_views(config: PretrainConfig) -> Iterator[str]:
    """Check sizes, counts and ranges of the views."""
    views, patch = config.views, config.model.patch_size
    sizes = {"views.global_size": views.global_shape}
    sizes |= {"model.image_size": config.image_shape} if config.model.image_size else {}
    sizes |= {"views.local_size": views.local_shape} if views.local_count else {}
    for key, size in sizes.items():
        # What sizes a model of timm takes is known once it is built.
        if not config.model.timm and any(side % patch for side in size):
            text = f"{key}={get(config, key)} is not divisible by model.patch_size={patch}"
            yield f"{text}; use a multiple of it, or another patch size"
    if views.global_count + views.local_count < 2:
        yield "DINO needs at least two views per image; set views.local_count or views.global_count=2"
    for key in ("views.global_scale", "views.local_scale", "augment.blur_sigma"):
        low, high = cast(tuple[float, float], get(config, key))
        if low > high:
            yield f"{key}=[{low}, {high}] must go from low to high; try [{high}, {low}]"


def _check_channels(config: PretrainConfig) -> Iterator[str]:
    """Check what depends on the number of channels."""
    data, augment = config.data, config.augment
    for name, numbers in (("mean", data.mean), ("std", data.std)):
        if numbers is not None and len(numbers) != data.channels:
            text = f"data.{name}={list(numbers)} does not fit data.channels={data.channels}"
            yield f"{text}; give one value per channel, or data.{name}=null to have it measured"
    if data.range and data.range[0] >= data.range[1]:
        yield f"data.range={list(data.range)} must go from low to high"
    coloured = [f"augment.{name}" for name in ("saturation", "hue", "grey") if getattr(augment, name)]
    if data.channels != 3 and coloured and not augment.module:
        yield f"data.channels={data.channels} is not RGB; set {' '.join(f'{key}=0' for key in coloured)}"


def _check_loss(config: PretrainConfig) -> Iterator[str]:
    """Refuse targets no sharper than the student's outputs, and masks that hide nothing."""
    loss = config.loss
    student, start = sections.STUDENT_TEMPERATURE, sections.START_TEACHER_TEMPERATURE
    if loss.teacher_temp >= student:
        yield f"loss.teacher_temp={loss.teacher_temp} is not below the student's {student}; use 0.04 to 0.07"
    if loss.warmup_teacher_temp_epochs and loss.teacher_temp <= start:
        text = f"loss.teacher_temp={loss.teacher_temp} must exceed {start} when its warm-up is on"
        yield f"{text}; raise loss.teacher_temp (0.07), or set loss.warmup_teacher_temp_epochs=0"
    if loss.patch_weight and not config.model.timm:
        patch = config.model.patch_size
        rows, columns = (side // patch for side in config.views.global_shape)
        if min(rows, columns) < 2 or rows * columns < 10:  # at least a tenth of the patches is masked
            text = f"views.global_size has {rows} x {columns} patches, too few for masks"
            yield f"{text}; lower model.patch_size={patch}, or set loss.patch_weight=0"


def in_steps(epochs: float, steps_per_epoch: int) -> Fraction:
    """Return epochs in steps, to be rounded: of the decimal number that was written, as 0.29 x 100 is 29."""
    return Fraction(str(float(epochs))) * steps_per_epoch


def fitting_phase(key: str, epochs: float) -> float:
    """Return a tenth of the run, as a phase at its start; the temperature's warm-up counts whole epochs."""
    return int(epochs / 10) if key.startswith("loss.") else float(f"{epochs / 10:.3g}")
