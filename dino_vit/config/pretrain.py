"""The configuration of a pretraining: its sections, the names that people bring along, what auto fills in."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from dino_vit.config import checks, sections
from dino_vit.config.settings import Problem, Seed, Settings, given_keys, setting

# Names in the 2021 reference and in other libraries, for suggestions.
ALSO_KNOWN_AS = {
    "output": "output_dir out",
    "data.source": "data_path dataset path root",
    "data.batch_size": "batch_size_per_gpu",
    "data.workers": "num_workers",
    "data.channels": "in_chans in_channels",
    "data.bits": "bit_depth depth dtype",
    "data.range": "value_range min_max",
    "model.arch": "model backbone",
    "model.width": "embed_dim dim hidden_size",
    "model.depth": "num_layers layers",
    "model.heads": "num_heads",
    "model.patch_size": "patch",
    "model.registers": "num_register_tokens",
    "model.drop_path": "drop_path_rate",
    "head.prototypes": "out_dim n_prototypes output_dim",
    "head.layers": "nlayers",
    "head.batch_norm": "use_bn_in_head use_bn",
    "views.global_count": "global_crops_number n_global_views",
    "views.global_size": "global_crop_size image_size img_size",
    "views.global_scale": "global_crops_scale",
    "views.local_count": "local_crops_number n_local_views",
    "views.local_size": "local_crop_size",
    "views.local_scale": "local_crops_scale",
    "photometry.jitter": "color_jitter",
    "photometry.grey": "gray grayscale",
    "photometry.blur_sigma": "blur_radius",
    "photometry.solarise": "solarize solarization",
    "photometry.noise": "gaussian_noise",
    "photometry.noise_std": "noise_sigma",
    "data.weights": "sample_weights sampling_weights",
    "optim.name": "optimizer",
    "optim.lr": "learning_rate base_lr",
    "optim.min_lr": "final_lr",
    "optim.weight_decay": "wd",
    "optim.clip": "clip_grad max_norm",
    "optim.freeze_last_layer_epochs": "freeze_last_layer",
    "optim.layer_decay": "layerwise_decay",
    "optim.accumulate": "gradient_accumulation_steps accumulate_grad_batches",
    "teacher.momentum": "momentum_teacher ema",
    "budget.epochs": "max_epochs num_epochs",
    "budget.steps": "max_steps iterations",
    "budget.images": "samples",
    "run.precision": "use_fp16 amp",
    "run.log_every": "print_freq",
    "run.checkpoint_every": "saveckp_freq save_every",
    "run.trackers": "logger report_to",
    "init": "pretrained checkpoint",
    "anchor": "gram",
}

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
        *("views.global_size", "views.local_size", "photometry.blur_sigma"),
        *("photometry.saturation", "photometry.hue", "photometry.grey"),
        *("head.hidden_dim", "head.bottleneck_dim", "head.batch_norm", "loss.teacher_temp"),
        *("optim.lr", "optim.warmup_epochs", "optim.freeze_last_layer_epochs", "teacher.momentum"),
        *("loss.centring", "loss.koleo_weight", "run.eval_every"),
        *("model.drop_path", "model.drop_path_schedule", "model.layer_scale"),
        *("optim.layer_decay", "optim.patch_embed_lr"),
    )
)
# What it fits to the length of the run or to its minutes, also where the user gave something else or nothing.
FITTED_KEYS = frozenset(
    (
        *("loss.warmup_teacher_temp_epochs", "init.head_epochs"),
        *("model.width", "model.depth", "model.heads"),
    )
)


class PretrainConfig(Settings):
    """Self-supervised pretraining of a vision transformer with DINO."""

    method: Literal["dino", "dinov2"] = setting(
        "dino", "dino: the defaults of 2021; dinov2: of 2023, with masked patches"
    )
    recipe: Literal["dino", "auto"] = setting(
        "dino", "dino: the published recipe; auto: choose what is not given from the images"
    )
    seed: Seed = setting(0, "seed of every random number")
    output: str = setting("runs/pretrain", "folder of the run; a run in it is resumed", resumable=True)
    data: sections.Data = sections.Data()
    model: sections.Model = sections.Model()
    head: sections.Head = sections.Head()
    views: sections.Views = sections.Views()
    photometry: sections.Photometry = sections.Photometry()
    loss: sections.Loss = sections.Loss()
    masks: sections.Masks = sections.Masks()
    optim: sections.Optim = sections.Optim()
    teacher: sections.Teacher = sections.Teacher()
    budget: sections.Budget = sections.Budget()
    run: sections.Run = sections.Run()
    anchor: sections.Anchor | None = setting(None, "set anchor.weights to hold patches to an earlier teacher")
    init: sections.Init | None = setting(None, "set init.weights to start from trained weights")

    also_known_as: ClassVar = ALSO_KNOWN_AS

    @model_validator(mode="wrap")
    @classmethod
    def _defaults_of_the_method(cls, given: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Use the method's defaults where nothing was given, without their counting as given."""
        defaults = METHODS.get(given.get("method", "dino"), {}) if isinstance(given, dict) else {}
        whole: dict[str, Any] = dict(given) if defaults else given
        arch = whole["model"].get("arch") if defaults and isinstance(whole.get("model"), dict) else None
        unused = sections.OF_OUR_TRANSFORMERS if str(arch).startswith("timm:") else frozenset[str]()
        filled = []
        for key, value in defaults.items():
            if key in unused:
                continue
            section, _, name = key.partition(".")
            inside = whole.setdefault(section, {})
            if isinstance(inside, dict) and name not in inside:
                whole[section] = {**inside, name: value}
                filled.append((section, name))
        config = build(whole)
        for section, name in filled:
            getattr(config, section).model_fields_set.discard(name)
        return config

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
        yield from checks.check_parameters(self.model, self.head)
        yield from checks.check_views(self.views, self.photometry, self.model)
        yield from checks.check_channels(self.data, self.photometry)
        yield from checks.check_temperatures(self.loss)
        yield from checks.check_masks(self.loss, self.masks, self.head, self.views, self.model)
        yield from checks.check_rates(self.optim, self.teacher, self.data)
        yield from checks.check_lengths(self.budget, self.run)
