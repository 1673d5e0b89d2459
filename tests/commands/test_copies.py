"""The command that finds originals: of own copies and of copies that it makes, in one process or two."""

import json
import re
import shutil

import pytest
from PIL import Image

from dino_vit.data.sources.scenes import SceneSource
from tests.support.processes import command_in_two
from tests.support.runs import command

SCENES = SceneSource(length=16, size=24)


@pytest.fixture
def folders(tmp_path):
    """Scenes 0 to 9 as originals, 0 to 4 and 10 again as queries, 11 to 15 as distractors."""
    of_folder = {"originals": range(10), "queries": [0, 1, 2, 3, 4, 10], "others": range(11, 16)}
    for folder, indices in of_folder.items():
        (tmp_path / folder).mkdir()
        for index in indices:
            picture = Image.fromarray(SCENES.read(index).permute(1, 2, 0).numpy())
            picture.save(tmp_path / folder / f"{index:02d}.{'bmp' if folder == 'queries' else 'png'}")
    return tmp_path


def own(folders, weights, *more):
    paths = [f"{name}={folders / name}" for name in ("originals", "queries")]
    return [
        "copies",
        *paths,
        f"weights={weights}",
        f"output={folders / 'copies.json'}",
        "precision=no",
        *more,
    ]


def test_own_copies_are_found_among_distractors(folders, weights):
    said = command(
        folders / "log",
        *own(folders, weights, f"distractors={folders / 'others'}", "whitening=synthetic:scenes:40:24"),
    )
    found = json.loads((folders / "copies.json").read_text())
    assert "5 copies and 1 query without an original, searched for among 15 images" in said
    assert (found["searched"], found["distractors"], found["queries"]) == (15, 5, 6)
    assert (found["recall_at_1"]["correct"], found["recall_at_1"]["images"]) == (5, 5)
    assert found["mean_ap"]["percent"] == found["micro_ap"]["percent"] == 100  # they are the same pixels
    with Image.open(folders / "copies-examples.png") as picture:
        assert picture.height > picture.width  # five rows of three pictures


def test_wrong_originals_are_not_found(folders, weights):
    (folders / "pairs.csv").write_text("query,original\n00.bmp,01.png\n01.bmp,01.png\n")
    said = command(folders / "log", *own(folders, weights, f"pairs={folders / 'pairs.csv'}", "examples=0"))
    found = json.loads((folders / "copies.json").read_text())
    assert "2 copies and 4 queries without an original" in said
    assert (found["recall_at_1"]["correct"], found["recall_at_1"]["images"]) == (1, 2)
    assert not (folders / "copies-examples.png").exists()


def test_copies_of_photos_are_judged_by_kind_and_strength(folders, weights):
    shutil.copy(folders / "originals/00.png", folders / "originals/same.png")
    (folders / "originals/bad.png").write_bytes(b"no image")
    output = folders / "photos.json"
    settings = [f"weights={weights}", f"output={output}", "precision=no", "kinds=[mirror,dark]", "examples=2"]
    settings += [f"cache={folders / 'cache'}", "sample=20"]
    argv = ["copies", folders / "originals", *settings]
    said = command(folders / "log", *argv)
    found = json.loads(output.read_text())
    assert "copies of 11 photos, searched for among 11 images" in said
    assert found["unchanged"]["recall_at_1"]["correct"] == 9  # one photo is there twice
    strengths = [(one["kind"], one["strength"]) for one in found["copies"]]
    assert strengths == [("mirror", 1), ("dark", 30), ("dark", 50), ("dark", 70), ("dark", 90)]
    assert all(one["recall_at_1"]["images"] == 11 for one in found["copies"])
    assert re.search(r"(?m)^dark +70 % less light  ", said)
    for name in ("photos.png", "photos-examples.png"):
        with Image.open(folders / name) as picture:
            assert picture.width > 300
    said = "\n".join(command_in_two(folders / "log", *argv[:-2], f"cache={folders / 'other'}", argv[-1]))
    two = json.loads(output.read_text())
    for name in ("unchanged", "copies"):
        assert two[name] == found[name]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ([], "give photos to make copies of, or originals=FOLDER queries=FOLDER with own copies"),
        (["originals=a", "queries=a"], "each image of queries would find itself in originals"),
        (
            ["source=photos", "queries=copies"],
            "source=photos asks for copies of these photos, queries= for own",
        ),
        (["originals=a", "queries=b", "sample=3"], "sample is for copies of source, which is not given"),
        (["source=photos", "kinds=[squeeze]"], "crop"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, sentence, weights, tmp_path):
    assert sentence in command(tmp_path / "log", "copies", f"weights={weights}", *settings, code=2)
