"""Settings with a section, an optional section, exclusive groups and a contradiction."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from dino_vit.config.settings import Count, Positive, Settings, setting


class Oven(Settings):
    """Where it is baked."""

    one_of: ClassVar = (("degrees",), ("gas", "mark"))
    degrees: Positive | None = setting(180.0, "heat")
    gas: bool | None = setting(None, "with gas")
    mark: Count | None = setting(None, "on the dial")
    fan: Literal["on", "off"] = setting("on", "blow")


class Icing(Settings):
    """What comes on top."""

    colour: str = Field(description="its colour")
    layers: Count = setting(1, "how many")


class Cake(Settings):
    """A cake."""

    name: str = setting("plain", "what to call it", resumable=True)
    eggs: Count = setting(3, "how many")
    sizes: tuple[Positive, Positive] = setting((1.0, 2.0), "from, to")
    tiers: tuple[str, ...] = setting((), "names of the tiers")
    oven: Oven = Oven()
    icing: Icing | None = setting(None, "null: none")

    def contradictions(self) -> Iterator[str]:
        """Yield what is wrong with settings that are valid one by one."""
        if self.eggs > 10 and (self.oven.degrees or 0) > 200:
            yield "that is an omelette"
        if self.sizes[0] > self.sizes[1]:
            yield "sizes run backwards"
