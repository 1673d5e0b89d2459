"""Follow the objects of a video's first frame through the others, by the patches of a frozen backbone.

o objects, (H, W) pixels
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dino_vit.commands import Result, format_table
from dino_vit.commands.maps.attention import file_stems
from dino_vit.commands.maps.dense import Value
from dino_vit.config.settings import Dimension, Few, FewOrZero, Positive, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import all_gather, is_main_process, limit_waits, rank, wait_for_all, world_size
from dino_vit.core.progress import plural, progress
from dino_vit.core.runtime import DTYPES, choose_precision, start_processes
from dino_vit.core.sizes import Size
from dino_vit.data.sources.files import plain
from dino_vit.data.sources.masks import Mask, write_mask
from dino_vit.eval.accuracy import write_results
from dino_vit.eval.confidence import Interval, with_confidence
from dino_vit.eval.features.frozen import describe_weights
from dino_vit.eval.maps.attention import patch_tokens
from dino_vit.eval.maps.pictures import Panel, as_picture, blend, resize, side_by_side, write_sheet
from dino_vit.eval.video.clips import Clip, open_clips
from dino_vit.eval.video.files import writing_video
from dino_vit.eval.video.overlap import Figures, figures, mean_over_objects, measures
from dino_vit.eval.video.propagation import Propagation, classes_of_pixels, frame_size, patch_labels
from dino_vit.models.backbone import Backbone
from dino_vit.views.preparation import preparation_of, squeeze
from dino_vit.weights import load_backbone

BACKGROUND = 0  # the value that is no object
LONGEST_VIDEO = 24 * 60  # minutes that a process without a video left waits for the others
SHEET_FRAMES = 8
SHEET_PIXELS = 320  # of the longer side of a frame on a sheet


class PropagateConfig(Settings):
    """Follow the objects of a video's first frame through the others by their patches."""

    source: str = Field(
        description="video, folder of frames (or another source of images), or folder of DAVIS"
    )
    weights: str = Field(description="run folder or weights file")
    mask: str | None = setting(
        None, "PNG of the objects in the first frame, with a palette or grey; 0 is background"
    )
    truth: str | None = setting(
        None, "folder of PNG masks to judge by, named as the frames; of a video 00000.png, ..."
    )
    ignore_value: Value | None = setting(None, "value of pixels of masks that belong to no class")
    output: str = setting("propagated", "folder for masks, videos, sheets and propagate.json")
    network: Literal["teacher", "student"] = setting("teacher", "network of a checkpoint")
    size: Dimension = setting(
        480, "pixels to resize the shorter side of frames to; larger finds smaller objects"
    )
    last_frames: FewOrZero = setting(7, "previous frames, beside the first, whose labels are passed on")
    radius: FewOrZero = setting(12, "the nearest patches are searched within this many rows and columns")
    k: Few = setting(5, "nearest patches whose labels are averaged")
    temperature: Positive = setting(0.1, "a patch weighs exp(cosine / temperature)")
    precision: Literal["auto", "no", "bf16", "fp16"] = setting("auto", "auto: bf16 where it is native")

    positional: ClassVar = ("source",)


@dataclass(frozen=True, kw_only=True)
class PropagateResult(Result):
    """The masks that were written, and how well they fit if that is known."""

    folder: Path  # one folder of masks for each video, with its sheet and video beside
    figures: dict[str, dict[int, Figures]]  # by video and value of the object; empty without truth
    mean: Figures | None  # over all objects
    path: Path  # of the JSON file
    details: dict[str, Any] = field(repr=False)  # all that the JSON file holds


class Describer:
    """Turn frames into features of patches with a frozen backbone."""

    def __init__(self, config: PropagateConfig, model: Backbone) -> None:
        self._model, self._preparation = model, preparation_of(model)
        self._normalise = self._preparation.normaliser(model.device)
        precision = choose_precision(config.precision, model.device)
        self._autocast = DTYPES[precision] if precision != "no" else None
        self.pixels, self.patch_size = self._preparation.pixels, model.patch_size

    def __call__(self, frame: Tensor, size: Size) -> Tensor:
        """Return the L2-normalised features (h, w, d) of a frame (C, H, W) that is resized to a size."""
        images = self._normalise(squeeze(frame, size)[None])
        device, enabled = images.device.type, self._autocast is not None
        with torch.autocast(device, self._autocast, enabled=enabled):
            return F.normalize(patch_tokens(self._model, images)[0].float(), dim=2)


def run(config: PropagateConfig) -> PropagateResult:
    """Write the masks of every frame, a video, a sheet and figures; processes share the videos."""
    accelerator = start_processes()
    limit_waits(LONGEST_VIDEO)
    model = load_backbone(config.weights, network=config.network).to(accelerator.device)
    if not model.has_patches:
        raise ValueError(f"{config.weights} has no patches: its features are made after pooling")
    describe = Describer(config, model)
    clips = open_clips(config.source, config.mask, config.truth, describe.pixels)
    if find_spec("av") is None:
        log.info("no video of the masks is written, which takes PyAV: pip install 'dino-vit[video]'")
    frames = torch.zeros(len(clips), dtype=torch.long, device=model.device)
    measured = [torch.zeros(0, 6)]
    for number, (name, open_clip) in list(enumerate(clips.items()))[rank() :: world_size()]:
        frames[number], rows = follow(open_clip(), name, describe, config)
        measured.append(F.pad(rows, (1, 0), value=number))
    wait_for_all()  # NCCL would not notice a process that has ended
    frames = all_gather(frames[None]).sum(0)
    table = all_gather(torch.cat(measured).to(model.device)).cpu().double()
    result = summarise(config, dict(zip(clips, frames.tolist(), strict=True)), table, model)
    if is_main_process():
        write_results(result.path, result.details)
    return result


def follow(clip: Clip, name: str, describe: Describer, config: PropagateConfig) -> tuple[int, Tensor]:
    """Write the masks of a video, a video and a sheet of them; return the number of frames and measures.

    A row of measures (n, 5) has the value of an object, its J and F in a frame, and those of the first mask.
    """
    values, palette, folder = values_of(clip.mask, config), clip.mask.palette, Path(config.output)
    objects, excerpt, rows, frames = values[values != BACKGROUND], Excerpt(), [torch.zeros(0, 5)], 0
    stems = file_stems(clip.names) if clip.names else None
    target = (folder / name).resolve()
    beside_mask = config.mask is not None and target == Path(plain(config.mask)).resolve().parent
    if beside_mask or any(target.is_relative_to(one.resolve()) for one in clip.folders):
        raise ValueError(
            f"the masks would go to {folder / name}, among the frames or masks given: set another output"
        )

    def draw(mask: Tensor, picture: Tensor) -> Tensor:
        return blend(palette[mask.long()], picture, torch.isin(mask, objects))

    with (
        progress(f"frames of {name}", len(stems) if stems else None) as advance,
        _video(folder, name, clip) as show,
    ):
        for frame, found in label_frames(clip, values, describe, config):
            stem = stems[frames] if stems else clip.name_of(frames)
            write_mask(Mask(found, palette), folder / name / f"{stem}.png")
            picture, caption = as_picture(frame), stem
            drawn = [draw(found, picture)]
            show(side_by_side([picture, *drawn]))
            if clip.truth and not frames:
                drawn *= 2  # the first mask is given, and true
            elif read := clip.truth.get(clip.name_of(frames)):
                true = read().values
                check_size(true, found.shape, f"the true mask of frame {stem}")
                both = [
                    measures(one, true, objects, config.ignore_value) for one in (found, clip.mask.values)
                ]
                rows.append(torch.cat([objects[:, None], *both], dim=1))
                drawn.append(draw(true, picture))
                caption = f"{stem}: J&F {100 * both[0].mean():.1f} %"
            excerpt.add([Panel(one, caption) for one in drawn])
            frames += 1
            advance(1)
        if frames < 2:
            raise ValueError(f"{config.source} has {plural(frames, 'frame')}, which leaves none to label")
    if clip.truth and len(rows) == 1:
        log.warning("no frame but the first has a mask in %s, so there are no figures", config.truth)
    if others := len(list(target.glob("*.png"))) - frames:
        log.warning("%s also holds %s of an earlier run", folder / name, plural(others, "mask"))
    excerpt.write(folder / f"{name}.sheet.png")
    return frames, torch.cat(rows)


def label_frames(
    clip: Clip, values: Tensor, describe: Describer, config: PropagateConfig
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each frame (C, H, W) and the values (H, W) of its mask, that of the first as it is given."""
    how = {name: getattr(config, name) for name in ("last_frames", "radius", "k", "temperature")}
    mask, tracker = clip.mask.values, None
    size: Size = mask.shape[0], mask.shape[1]
    resized = frame_size(size, config.size, describe.patch_size, published=clip.published)
    for number, frame in enumerate(clip.frames):
        check_size(frame, size, f"frame {clip.name_of(number)} of {config.source}")
        features = describe(frame, resized)
        if tracker is None:
            grid: Size = features.shape[0], features.shape[1]
            labels = patch_labels(mask.to(features.device), values.to(features.device), grid)
            if lost := values[labels.cpu().sum((1, 2)) == 0].tolist():
                text = "%s of the mask, which cover the centre of no patch, are lost; try a larger size"
                log.warning(text, f"pixels of value {', '.join(map(str, lost))}")
            tracker = Propagation(features, labels, **how)
            yield frame, mask
        else:
            yield frame, values[classes_of_pixels(tracker.label(features), resized, size).cpu()]


def check_size(pixels: Tensor, size: Sequence[int], what: str) -> None:
    """Raise if a frame or mask (..., H, W) has another size than the mask of the first frame."""
    height, width = pixels.shape[-2:]
    if (height, width) != tuple(size):
        raise ValueError(
            f"{what} has {width} × {height} pixels, the mask of the first frame {size[1]} × {size[0]}; "
            "they must be the same"
        )


def values_of(mask: Mask, config: PropagateConfig) -> Tensor:
    """Return the values that are classes of the first frame."""
    values = torch.unique(mask.values)
    values = values if config.ignore_value is None else values[values != config.ignore_value]
    if len(values) < 2:
        found = f"only pixels of value {int(values[0])}" if len(values) else "no pixel of a class"
        raise ValueError(
            f"{config.mask or config.source}: the mask of the first frame has {found}; it needs 0 for the "
            "background and another value for each object"
        )
    return values


def _video(folder: Path, name: str, clip: Clip) -> AbstractContextManager[Callable[[Tensor], object]]:
    """Return what writes a video; without PyAV, what does nothing."""
    if find_spec("av") is None:
        return nullcontext(lambda picture: None)
    return writing_video(folder / f"{name}.overlay.mp4", clip.rate)


class Excerpt:
    """Keep a few pictures from all over a video, whose length need not be known."""

    def __init__(self) -> None:
        self._kept: list[list[Panel]] = []
        self._seen, self._step = 0, 1

    def add(self, panels: Sequence[Panel]) -> None:
        """Show what was found in the next frame, and what is true if that is known."""
        if self._seen % self._step == 0:
            small = [resize(one.picture, None, SHEET_PIXELS) for one in panels if one.picture is not None]
            self._kept.append([one._replace(picture=two) for one, two in zip(panels, small, strict=True)])
        self._seen += 1
        if len(self._kept) == 2 * SHEET_FRAMES:
            self._kept, self._step = self._kept[::2], 2 * self._step

    def write(self, path: Path) -> None:
        """Write a sheet with a row of what was found, and one of what is true."""
        count = min(SHEET_FRAMES, len(self._kept))
        chosen = [self._kept[column * len(self._kept) // count] for column in range(count)]
        write_sheet(list(zip_longest(*chosen)), path, names=("found", "truth"))


def summarise(
    config: PropagateConfig, frames: Mapping[str, int], table: Tensor, model: Backbone
) -> PropagateResult:
    """Return the figures of all objects, by their measures in all frames with truth."""
    found: dict[str, dict[int, Figures]] = {name: {} for name in frames}
    videos: dict[str, Any] = {name: {"frames": count, "objects": {}} for name, count in frames.items()}
    for number, name in enumerate(frames):
        of_video = table[table[:, 0] == number]
        for value in torch.unique(of_video[:, 1]).int().tolist():
            measured = of_video[of_video[:, 1] == value, 2:]
            found[name][value] = figures(measured)
            curves = {"j_by_frame": measured[:, 0].tolist(), "f_by_frame": measured[:, 1].tolist()}
            videos[name]["objects"][value] = {**found[name][value].to_json(), **curves}
    judged = {name: list(objects.values()) for name, objects in found.items() if objects}
    mean = mean_over_objects([one for objects in judged.values() for one in objects]) if judged else None
    interval = over_videos(list(judged.values())) if len(judged) > 1 else None
    folder = Path(config.output)
    path = folder / "propagate.json"
    (*_, name) = frames
    one_of = name if len(frames) == 1 else "*"
    lines = [
        _table(found, mean, interval) if mean else "",
        f"{folder / one_of}/*.png: masks of {plural(sum(frames.values()), 'frame')}",
        f"{folder / one_of}.sheet.png: some frames with their masks"
        + (f"; {one_of}.overlay.mp4: all" if find_spec("av") else ""),
        str(path),
    ]
    return PropagateResult(
        folder=folder,
        figures=found,
        mean=mean,
        path=path,
        details={
            "weights": describe_weights(model),
            "settings": config.model_dump(mode="json"),
            "mean": mean and {**mean.to_json(), "interval": interval and interval._asdict()},
            "videos": videos,
        },
        text="\n".join(lines).lstrip("\n"),
    )


def over_videos(judged: Sequence[Sequence[Figures]]) -> Interval:
    """Return J&F over all objects with its confidence interval over videos."""
    sums = torch.tensor([[sum(one.j_and_f for one in objects) / 100] for objects in judged])
    counts = torch.tensor([[len(objects)] for objects in judged])
    return with_confidence([sums, counts], lambda total, count: (total / count)[..., 0])


def _table(found: Mapping[str, Mapping[int, Figures]], mean: Figures, interval: Interval | None) -> str:
    if len(found) == 1:
        (objects,) = found.values()
        rows = {f"object {value}": one for value, one in objects.items()}
    else:
        rows = {name: mean_over_objects(list(objects.values())) for name, objects in found.items() if objects}
    rows["mean over objects"] = mean
    header = ["%", "J&F", "J mean", "recall", "decay", "F mean", "recall", "decay", "first mask"]
    cells = [
        [name, *(f"{one:.1f}" for one in (figure.j_and_f, *figure.j, *figure.f, figure.unmoved))]
        for name, figure in rows.items()
    ]
    text = f"{format_table(header, cells)}\nfirst mask: J&F if the first mask were that of every frame"
    if interval:
        text += (
            f"\nJ&F over videos like these: {interval.low:.1f} to {interval.high:.1f} with 95 % confidence"
        )
    return f"{text}\n"
