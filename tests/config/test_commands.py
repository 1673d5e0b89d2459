"""Settings of the commands that need no torch."""

from dino_vit.config.commands import side_by_side


def test_a_plus_joins_weights_unless_a_path_has_it(tmp_path):
    assert side_by_side("runs/a+edges") == ["runs/a", "edges"]
    (tmp_path / "a+b.pth").touch()
    assert side_by_side(str(tmp_path / "a+b.pth")) == [str(tmp_path / "a+b.pth")]
