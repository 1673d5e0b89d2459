import json
import shlex

import numpy as np
import pytest
from PIL import Image

from dino_vit.cli import main
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from tests.support.images import write_synthetic


@pytest.fixture
def mixed(tmp_path):
    """Ten files of several formats: two the same, two broken, one grey, one deep, one see-through."""
    folder = tmp_path / "mixed"
    (folder / "cat").mkdir(parents=True)
    (folder / "dog").mkdir()
    generator = np.random.default_rng(0)

    def pixels(*shape, kind=np.uint8):
        return generator.integers(0, np.iinfo(kind).max + 1, shape, dtype=kind)

    for number in range(4):
        Image.fromarray(pixels(20 + number, 40, 3)).save(folder / "cat" / f"{number}.png")
    (folder / "cat" / "copy.png").write_bytes((folder / "cat" / "3.png").read_bytes())
    Image.fromarray(pixels(60, 30)).save(folder / "dog" / "grey.bmp")
    Image.fromarray(pixels(20, 20, kind=np.uint16)).save(folder / "dog" / "deep.png")
    Image.fromarray(pixels(20, 20, 4)).save(folder / "dog" / "alpha.webp", lossless=True)
    (folder / "dog" / "empty.jpg").write_bytes(b"")
    (folder / "torn.png").write_bytes((folder / "cat" / "0.png").read_bytes()[:60])
    return folder


def test_facts_as_json(mixed, capsys):
    assert main(["inspect-data", str(mixed), "as_json=true", "sheet=null"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["images"], facts["inspected"], facts["without_label"]) == (10, 10, 1)
    assert facts["labels"] == {"cat": 5, "dog": 4}
    assert facts["formats"] == {"PNG": 6, "BMP": 1, "WebP": 1}
    assert facts["pixels"]["RGB (uint8)"] == 5
    assert facts["pixels"]["RGB with alpha (uint8)"] == 1
    assert facts["pixels"]["grey (uint8)"] == facts["pixels"]["grey (uint16)"] == 1
    assert facts["height"] == {"min": 20, "median": 21.5, "max": 60}
    assert facts["values"][0] == 0
    assert facts["values"][1] > 255
    assert [one["name"] for one in facts["unreadable"]] == ["dog/empty.jpg", "torn.png"]
    assert facts["unreadable"][0]["reason"] == "the file is empty"


def test_facts_in_words_and_a_sheet(mixed, tmp_path, capsys, recwarn):
    (mixed / "cat" / "0.png").rename(mixed / "cat" / "日本.png")  # which the font lacks
    (mixed / "Cat").mkdir()
    (mixed / "cat" / "1.png").rename(mixed / "Cat" / "1.png")
    assert main(["inspect-data", str(mixed), f"sheet={tmp_path / 'views.png'}"]) == 0
    said = capsys.readouterr().out
    assert [str(warning.message) for warning in recwarn] == []
    assert "10 images, 3 labels: Cat: 1, cat: 4, dog: 4; 1 without" in said
    assert "labels perhaps the same but for capital letters: Cat, cat\n" in said
    settings = said.partition("  mean, std   ")[2].partition("\n")[0]
    config = load(PretrainConfig, None, shlex.split(settings))
    main(["inspect-data", str(mixed), "as_json=true"])
    facts = json.loads(capsys.readouterr().out)
    assert config.data.mean == pytest.approx(facts["mean"], abs=1e-3)
    assert config.data.std == pytest.approx(facts["std"], abs=1e-3)
    assert "dog/empty.jpg: the file is empty" in said
    with Image.open(tmp_path / "views.png") as sheet:
        assert sheet.width > 1000


def test_several_labels_are_described(tmp_path, capsys, caplog):
    for number in range(6):
        write_synthetic(tmp_path / "images" / f"{number}.png", number)
    (tmp_path / "labels.csv").write_text("\n".join(map("{0}.png,a;{0}t".format, range(6))))
    argv = ["inspect-data", str(tmp_path / "images"), f"labels={tmp_path / 'labels.csv'}"]
    assert main(argv) == 0
    assert "labels.csv: 'a;0t' is one class; several=true reads several labels" in caplog.text
    assert main([*argv, "several=true"]) == 0
    assert "several labels for each of 6 images" in capsys.readouterr().out


def test_values_beyond_0_and_1_have_no_mean(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.linspace(-500, 3000, 4 * 16 * 16, dtype=np.float32).reshape(4, 16, 16))
    assert main(["inspect-data", str(tmp_path / "a.npy"), "count=2"]) == 0
    said = capsys.readouterr().out
    assert "2 of them inspected" in said
    assert "grey (float32): 2" in said
    assert "from -500 to " in said
    assert "set data.range" in said


def test_images_that_training_cannot_use_are_said_and_not_drawn(mixed, tmp_path, capsys, caplog):
    (mixed / "cat" / "copy.png").unlink()  # so that the sheet has room for all that can be read
    np.save(mixed / "degrees.npy", np.linspace(-9, 40, 256, dtype=np.float32).reshape(16, 16))
    np.save(mixed / "gap.npy", np.full((16, 16), np.nan, np.float32))
    sheet = tmp_path / "views.png"
    assert main(["inspect-data", str(mixed), "as_json=true", f"sheet={sheet}"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["values"][0] == -9
    assert facts["unreadable"][-2]["reason"].startswith("it contains infinite or NaN values")
    assert "no views of degrees.npy: its float32 values go from -9 to 40" in caplog.text
    assert sheet.exists()
    np.save(tmp_path / "all.npy", np.linspace(-9, 40, 1024, dtype=np.float32).reshape(4, 16, 16))
    assert main(["inspect-data", str(tmp_path / "all.npy"), f"sheet={tmp_path / 'none.png'}"]) == 2
    assert "none.png cannot be drawn: training could use none" in capsys.readouterr().err
