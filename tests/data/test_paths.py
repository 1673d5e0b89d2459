import os

import pytest

from dino_vit.data.open import expand
from dino_vit.data.stores.files import open_folder


@pytest.fixture
def siblings(tmp_path):
    """Two folders with an image each, and links that lead from each to the other and to both."""
    root = tmp_path / "photos"
    for name, other in (("a", "b"), ("b", "a")):
        (root / name).mkdir(parents=True)
        (root / name / f"{name}.png").write_bytes(name.encode())
        (root / name / "other").symlink_to(f"../{other}")
    for number in range(3):
        (root / f"link-{number}").symlink_to("b")
        (root / "a" / f"up-{number}").symlink_to("..")
    return root


def test_links_that_lead_to_each_other_make_no_images(siblings):
    source = open_folder(siblings)
    assert [source.name(index) for index in range(len(source))] == ["a/a.png", "b/b.png"]
    assert source.labels.names == ("a", "b")


def test_a_folder_that_may_not_be_read_is_an_error(siblings, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"photos cannot be indexed: .*Permission denied"):
        open_folder(siblings)


def test_two_stars_match_any_folders_but_hidden_ones(tmp_path, monkeypatch):
    for name in ("1.png", "a/2.png", "a/b/3.png", "a/b/4.jpg", ".c/5.png", "d/e/6.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert expand("**/*.png") == ["1.png", "a/2.png", "a/b/3.png", "d/e/6.png"]
    assert expand("a/**/*.[pj]*g") == ["a/2.png", "a/b/3.png", "a/b/4.jpg"]
    assert expand(f"{tmp_path}/*/e/**/6.png") == [f"{tmp_path}/d/e/6.png"]
    assert expand("missing/**/*.png") == []
