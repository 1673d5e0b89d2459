import json
from pathlib import Path

import pytest

from dino_vit.config.display import json_schema, to_yaml
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


def test_schema_describes_every_setting() -> None:
    schema = json.loads(json.dumps(json_schema(Cake)))
    eggs = schema["properties"]["eggs"]
    assert (eggs["minimum"], eggs["default"], eggs["description"]) == (1, 3, "how many")
    assert schema["additionalProperties"] is False
    assert set(schema["$defs"]) == {"Oven", "Icing"}
