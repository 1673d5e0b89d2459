"""The configuration of a pretraining: its sections, the defaults of a method, what auto fills in."""

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from dino_vit.config import checks, sections
from dino_vit.config.settings import Problem, Seed, Settings, given_keys, setting

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

# What recipe=auto fills in where the user gave nothing; see auto.py.
AUTO_KEYS = frozenset(
    (
        *("data.channels", "data.mean", "data.std", "model.patch_size", "head.prototypes", "budget.epochs"),
        *("views.global_size", "views.local_size", "augment.blur_sigma"),
        *("augment.saturation", "augment.hue", "augment.grey"),
        *("head.hidden_dim", "head.bottleneck_dim", "head.batch_norm", "loss.teacher_temp"),
        *("optim.lr", "optim.warmup_epochs", "optim.freeze_last_layer_epochs", "teacher.momentum"),
        *("loss.centering", "loss.koleo_weight", "run.eval_every"),
        *("model.drop_path", "model.drop_path_schedule", "model.layer_scale"),
        *("optim.layer_decay", "optim.patch_embed_lr"),
    )
)
# What it fits to the length of the run or to its minutes, also where the user gave something else or nothing.
FITTED_KEYS = frozenset(
    {"loss.warmup_teacher_temp_epochs", "init.head_epochs", "model.width", "model.depth", "model.heads"}
)


class PretrainConfig(Settings):
    """Self-supervised pretraining of a vision transformer with DINO."""

    method: Literal["dino", "dinov2"] = setting("dino", "defaults of 2021, or of 2023 with masked patches")
    recipe: Literal["dino", "auto"] = setting(
        "dino", "as published; auto: fit what is not given to the images"
    )
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
    run: sections.Run = sections.Run()
    gram: sections.Gram | None = setting(None, "set gram.weights to hold patches to an earlier teacher")
    init: sections.Init | None = setting(None, "set init.weights to start from trained weights")

    positional: ClassVar = ("data.source", "output")
    examples: ClassVar = (
        "pretrain photos runs/photos budget.minutes=20",
        "pretrain --config configs/pretrain/vits16.yaml data.source=photos",
    )
    resumes: ClassVar = True

    @model_validator(mode="after")
    def _defaults_of_the_method(self) -> Self:
        """Use the method's defaults where nothing was given, without their counting as given."""
        for key, value in METHODS.get(self.method, {}).items():
            if self.model.timm and key in sections.OF_OUR_TRANSFORMERS:
                continue
            name, _, field = key.partition(".")
            section = getattr(self, name)
            if field not in section.model_fields_set:
                section = section.model_copy()  # which keeps what counts as given
                section.__dict__[field] = value
                self.__dict__[name] = section
        return self

    def contradictions(self) -> Iterator[Problem]:
        """Yield every refused combination, except of settings that recipe=auto has yet to fill in."""
        filled_later = AUTO_KEYS - given_keys(self) if self.recipe == "auto" else frozenset[str]()
        for problem in self._problems():
            if not filled_later.intersection(problem.keys):
                yield problem
        if self.budget.epochs is not None and self.recipe != "auto":  # which fits the phases to the run
            epochs = self.budget.epochs
            yield from checks.check_phases(self.optim, self.loss, self.init, epochs, "budget.epochs")

    def _problems(self) -> Iterator[Problem]:
        yield from checks.check_model(self.model, self.optim)
        yield from checks.check_views(self.views, self.augment, self.model)
        yield from checks.check_channels(self.data, self.augment)
        yield from checks.check_temperatures(self.loss)
        yield from checks.check_masks(self.loss, self.head, self.views, self.model)
        yield from checks.check_rates(self.optim, self.data)
        yield from checks.check_lengths(self.budget, self.run)
