import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import get, settings_of, values
from tests.support.cake import Cake


def test_python_is_checked_like_yaml() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Cake(eggs=0)
    with pytest.raises(ValueError, match="frozen"):
        Cake().eggs = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="extra"):
        Cake(egs=3)  # type: ignore[call-arg]


def test_settings_by_dotted_key() -> None:
    cake = load(Cake, None, ["eggs=4", "icing.colour=red"])
    assert set(values(Cake())) == {key for key in settings_of(Cake) if not key.startswith("icing.")}
    assert set(values(cake)) == settings_of(Cake).keys() - {"icing"}
    assert (values(cake)["eggs"], get(cake, "icing.colour"), get(Cake(), "icing.colour")) == (4, "red", None)
    assert cake.given == {"eggs", "icing.colour"}


def test_the_home_folder_may_be_written_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(PretrainConfig, None, {"output": "~/runs/a", "data.source": ("~/photos", "a~b")})
    assert (config.output, config.data.source) == ("/home/someone/runs/a", ("/home/someone/photos", "a~b"))
