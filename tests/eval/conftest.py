import pytest

from tests.support.backbones import use_few_penalties


@pytest.fixture
def few_penalties(monkeypatch):
    use_few_penalties(monkeypatch.setattr)
