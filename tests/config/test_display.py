from pathlib import Path

import pytest

from dino_vit.config.display import to_yaml
from dino_vit.config.loading import load
from dino_vit.config.settings import settings_of, values
from tests.support.cake import Cake


@pytest.mark.parametrize(
    "overrides", [[], ["name=1e-3", "eggs=4", "oven.mark=4", "icing.colour=no", "tiers=[a, 'null']"]]
)
def test_yaml_loads_back(tmp_path: Path, overrides: list[str]) -> None:
    cake = load(Cake, None, overrides)
    text = to_yaml(cake)
    (tmp_path / "cake.yaml").write_text(text)
    assert load(Cake, tmp_path / "cake.yaml") == cake
    assert all(f"# {settings_of(Cake)[key].doc}" in text for key in values(cake))
