import json
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from dino_vit.cli import main
from dino_vit.commands.maps import propagate
from dino_vit.commands.maps.propagate import Excerpt
from dino_vit.core.distributed import limit_waits
from dino_vit.data.sources.open import open_source
from dino_vit.eval.maps.pictures import Panel
from dino_vit.eval.video.clips import in_order
from dino_vit.eval.video.files import writing_video
from dino_vit.eval.video.overlap import measures
from tests.support.moving_scenes import moving_scene, write_scene
from tests.support.processes import command_in_two

FRAMES, SIZE = 10, "size=96"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A backbone that was not trained: its patches still tell textures and colours apart."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "a.safetensors"
    model = VisionTransformer(image_size=96, patch_size=8, width=64, depth=2, heads=2, registers=2)
    save_backbone(model, path, mean=(0.5,) * 3, std=(0.5,) * 3)
    return path


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A folder with frames/ and masks/ of a video in which two objects move."""
    return write_scene(tmp_path_factory.mktemp("scene"), *moving_scene(FRAMES, seed=2, speed=5))


def arguments(scene, weights, output, *settings):
    inputs = [f"{scene}/frames", f"mask={scene}/masks/00000.png", f"weights={weights}"]
    return ["propagate", *inputs, f"output={output}", SIZE, *settings]


def read(path):
    with Image.open(path) as image:
        return np.array(image), image.mode, image.getpalette()


def test_objects_that_move_are_followed(scene, weights, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(scene, weights, out, f"truth={scene}/masks")) == 0
    said = capsys.readouterr().out
    header = "% J&F J mean recall decay F mean recall decay first mask"
    assert " ".join(said.splitlines()[0].split()) == header
    found = json.loads((out / "propagate.json").read_text())
    mean, video = found["mean"], found["videos"]["frames"]
    assert mean["j_and_f"] > 70, "of two objects in all frames"
    assert mean["unmoved"] < 35
    assert f"{mean['j_and_f']:.1f}" in said.split("mean over objects")[1].split()
    assert video["frames"] == FRAMES
    assert video["objects"].keys() == {"1", "2"}
    assert {path.name for path in (out / "frames").iterdir()} == {f"{n:05}.png" for n in range(FRAMES)}
    first = [read(folder / "00000.png") for folder in (out / "frames", scene / "masks")]
    np.testing.assert_array_equal(first[0][0], first[1][0])
    # The figures are those of the files that were written, read by another hand.
    for number in range(1, FRAMES):
        values, mode, palette = read(out / "frames" / f"{number:05}.png")
        assert (mode, palette[:9]) == ("P", first[1][2][:9])
        true = read(scene / "masks" / f"{number:05}.png")[0]
        for value, of_object in video["objects"].items():
            one, other = values == int(value), true == int(value)
            expected = (one & other).sum() / max((one | other).sum(), 1)
            assert of_object["j_by_frame"][number - 1] == pytest.approx(expected, abs=1e-6)
    assert video["objects"]["1"]["j"]["mean"] == pytest.approx(
        100 * np.mean(video["objects"]["1"]["j_by_frame"])
    )
    with Image.open(out / "frames.sheet.png") as sheet:
        assert sheet.width > 2 * sheet.height, "eight frames above those with the true masks"


def test_a_video_becomes_masks_and_a_video(scene, weights, tmp_path, capsys, caplog):
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with writing_video(tmp_path / "clip.mp4", Fraction(10)) as write:
        for path in sorted((scene / "frames").iterdir()):
            write(torch.from_numpy(read(path)[0]).permute(2, 0, 1))
    (tmp_path / "some").mkdir()
    for number in (3, 7):  # not every frame has a true mask
        name = f"{number:05}.png"
        (tmp_path / "some" / name).write_bytes((scene / "masks" / name).read_bytes())
    found = dino_vit.propagate(
        tmp_path / "clip.mp4",
        mask=scene / "masks/00000.png",
        truth=tmp_path / "some",
        weights=weights,
        output=tmp_path / "out",
        size=96,
        verbose=False,
    )
    assert len(found.details["videos"]["clip"]["objects"][1]["j_by_frame"]) == 2
    assert found.mean.j_and_f > 60
    assert len(list((tmp_path / "out/clip").iterdir())) == FRAMES
    for name, refused in (("00000.png", True), ("00099.png", False)):
        only = tmp_path / name[:5]
        only.mkdir()
        (only / name).write_bytes((scene / "masks/00000.png").read_bytes())
        argv = [*arguments(scene, weights, tmp_path / "none"), f"truth={only}"]
        argv[1] = str(tmp_path / "clip.mp4")
        assert main(argv) == (2 if refused else 0)
        said = capsys.readouterr().err
        assert ("has no masks of later frames than the first; name them by frame" in said) == refused
    assert f"no frame but the first has a mask in {only}, so there are no figures" in caplog.text
    with av.open(str(tmp_path / "out/clip.overlay.mp4")) as reader:
        shapes = {frame.to_ndarray(format="rgb24").shape for frame in reader.decode(video=0)}
        assert reader.streams.video[0].average_rate == 10
    assert shapes == {(96, 2 * 128 + 4, 3)}


def test_without_truth_there_are_masks_but_no_figures(scene, weights, tmp_path, capsys, caplog):
    first = read(scene / "masks/00000.png")[0]
    Image.fromarray(255 * (first == 1).astype(np.uint8)).save(tmp_path / "grey.png")
    out = tmp_path / "out"
    assert main([*arguments(scene, weights, out), f"mask={tmp_path / 'grey.png'}"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}/frames/*.png: masks of {FRAMES} frames\n")
    values, mode, palette = read(out / "frames/00005.png")
    assert mode == "P"
    assert set(np.unique(values)) == {0, 255}
    assert tuple(palette[3 * 255 :]) == (224, 224, 192), "the colour of PASCAL VOC"
    assert json.loads((out / "propagate.json").read_text())["mean"] is None
    assert "of an earlier run" not in caplog.text
    few = [f"{scene}/frames/0000{number}.png" for number in range(3)]
    (tmp_path / "frames.txt").write_text("\n".join(few))
    assert main(["propagate", str(tmp_path / "frames.txt"), *arguments(scene, weights, out)[2:]]) == 0
    assert f"{out}/frames also holds {FRAMES} masks of an earlier run" in caplog.text


def test_ignored_pixels_are_of_no_class_and_not_judged(scene, weights, tmp_path):
    def masks(folder, change):
        folder.mkdir()
        for path in (scene / "masks").iterdir():
            Image.fromarray(change(read(path)[0])).save(folder / path.name)
        return folder

    known = masks(tmp_path / "known", lambda mask: np.where(mask == 2, 9, mask).astype(np.uint8))
    how = {"weights": weights, "size": 96, "verbose": False, "ignore_value": 9}
    found = dino_vit.propagate(
        scene / "frames", mask=known / "00000.png", truth=known, output=tmp_path / "o", **how
    )
    assert found.figures["frames"].keys() == {1}
    assert set(np.unique(read(tmp_path / "o/frames/00004.png")[0])) <= {0, 1}
    for number, j in enumerate(found.details["videos"]["frames"]["objects"][1]["j_by_frame"], 1):
        one, true = (read(folder / f"{number:05}.png")[0] for folder in (tmp_path / "o/frames", known))
        expected = measures(*map(torch.from_numpy, (one * (true != 9), true)), torch.tensor([1]))[0, 0]
        assert j == pytest.approx(float(expected), abs=1e-6)


def test_without_pyav_there_is_no_video(scene, weights, tmp_path, monkeypatch, caplog, capsys):
    caplog.set_level("INFO", "dino_vit")
    monkeypatch.setitem(sys.modules, "av", None)
    assert main(arguments(scene, weights, tmp_path / "out")) == 0
    assert "no video of the masks is written, which takes PyAV: pip install" in caplog.text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "frames",
        "frames.sheet.png",
        "propagate.json",
    }
    assert "overlay.mp4" not in capsys.readouterr().out
    (tmp_path / "clip.mp4").write_bytes(b"")
    argv = ["propagate", str(tmp_path / "clip.mp4"), *arguments(scene, weights, tmp_path / "none")[2:]]
    assert main(argv) == 2
    assert "to read or write a video, install PyAV" in capsys.readouterr().err


def test_an_object_smaller_than_a_patch_is_named(scene, weights, tmp_path, caplog):
    mask = read(scene / "masks/00000.png")[0]
    mask[0, :2] = 7, 8
    Image.fromarray(mask).save(tmp_path / "first.png")
    argv = [*arguments(scene, weights, tmp_path / "out"), f"mask={tmp_path}/first.png"]
    assert main(argv) == 0
    assert "pixels of value 7, 8 of the mask, which cover the centre of no patch, are lost" in caplog.text
    assert set(np.unique(read(tmp_path / "out/frames/00001.png")[0])) == {0, 1, 2}


def test_a_process_waits_for_one_with_longer_videos(scene, weights, tmp_path):
    command_in_two(tmp_path / "log", *arguments(scene, weights, tmp_path / "out"), before=take_longer)
    assert (tmp_path / "out/propagate.json").exists()


def take_longer():
    """Start with collectives that wait for a second, and let the first process take two."""
    start, follow = propagate.start_processes, propagate.follow

    def start_in_haste():
        accelerator = start()
        limit_waits(1 / 60)
        return accelerator

    def follow_slowly(*given):
        time.sleep(2)
        return follow(*given)

    propagate.start_processes, propagate.follow = start_in_haste, follow_slowly


@pytest.mark.parametrize("frames", [3, 8, 9, 100])
def test_a_sheet_has_up_to_eight_frames_from_all_over(frames, monkeypatch):
    excerpt, written = Excerpt(), []
    monkeypatch.setattr(propagate, "write_sheet", lambda rows, path, names: written.append(rows))
    for number in range(frames):
        excerpt.add([Panel(torch.zeros(3, 8, 8, dtype=torch.uint8), str(number))])
    excerpt.write(None)
    ((row,),) = written
    numbers = [int(panel.caption) for panel in row]
    assert len(numbers) == min(frames, 8)
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert max(np.diff([*numbers, frames])) <= -(-frames // 3)


def test_frames_come_in_the_order_of_their_numbers(tmp_path):
    names = ["2.png", "10.png", "1.png", "b-3-2.png", "b-3-11.png", "b-20-1.png"]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    source = open_source(str(tmp_path))
    found = [source.name(index) for index in in_order(source)]
    assert found == ["1.png", "2.png", "10.png", "b-3-2.png", "b-3-11.png", "b-20-1.png"]


def test_mistakes_are_explained(scene, weights, tmp_path, capsys):
    small, flat, colour, one = (tmp_path / name for name in ("small.png", "flat.png", "colour.png", "one"))
    Image.fromarray(np.eye(50, dtype=np.uint8)).save(small)
    Image.fromarray(np.zeros((96, 128), np.uint8)).save(flat)
    Image.new("RGB", (128, 96)).save(colour)
    one.mkdir()
    (one / "00000.png").write_bytes((scene / "frames/00000.png").read_bytes())
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "00000.png").write_bytes((scene / "frames/00000.png").read_bytes())
    Image.new("RGB", (40, 30)).save(mixed / "00001.png")
    apart = tmp_path / "apart.png"
    apart.write_bytes((scene / "masks/00000.png").read_bytes())

    def davis(names):
        listed = tmp_path / f"davis-{names}" / "ImageSets/2017/val.txt"
        listed.parent.mkdir(parents=True)
        listed.write_text(names)
        return tmp_path / f"davis-{names}"

    for settings, message in (
        ([f"mask={small}"], f"frame 00000 of {scene}/frames has 128 × 96 pixels, the mask of the"),
        ([f"mask={flat}"], "has only pixels of value 0; it needs 0 for the background and another value"),
        ([f"mask={colour}"], "must be a PNG with a palette, or grey with 8 bits, but is PNG RGB"),
        ([f"mask={tmp_path}/none.png"], "none.png is not a file: give a PNG file"),
        ([f"mask={scene}/masks"], "masks is not a file: give a PNG file"),
        (["mask=null"], "mask is needed: give a PNG file"),
        ([f"truth={one}"], f"no frame of {scene}/frames but the first has a mask in {one}"),
        ([f"source={one}"], f"{one} has 1 frame, which leaves none to label"),
        ([f"source={mixed}"], f"frame 00001 of {mixed} has 40 × 30 pixels, the mask of the"),
        (["source=nowhere"], "nowhere"),
        ([f"output={scene}"], f"would go to {scene}/frames, among the frames or masks given"),
        ([f"output={scene}/frames/out"], "would go to"),
        ([f"source={scene}"], f"{scene}/masks/00000.png is both a mask and a frame of {scene}"),
        ([f"source={scene}", f"mask={apart}", f"truth={scene}/masks"], "is both a mask and a frame"),
        ([f"source={davis('')}", "mask=null"], "val.txt names no video: download"),
        ([f"source={davis('bear')}", "mask=null"], "JPEGImages/480p/bear does not exist: download"),
        (["neighbours=3"], "did you mean k?"),
    ):
        given = dict(setting.split("=", 1) for setting in settings)
        ordinary = arguments(scene, weights, tmp_path / "out")
        kept = [f"source={scene}/frames", *ordinary[2:]]
        argv = ["propagate", *(one for one in kept if one.split("=")[0] not in given), *settings]
        assert main(argv) == 2
        assert message in capsys.readouterr().err
