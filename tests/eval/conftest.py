import pytest

from tests.support.backbones import use_few_penalties
from tests.support.coloured_photos import write_photos


@pytest.fixture
def few_penalties(monkeypatch):
    use_few_penalties(monkeypatch.setattr)


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder with coloured photos and labels of half of them, where commands write by default."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path)
    return tmp_path
