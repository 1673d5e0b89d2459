"""The settings of a run while they are decided: the first that decides on one counts, the user before all."""

from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple, TypeVar

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import nested, settings_of, values

T = TypeVar("T")


class Choice(NamedTuple):
    """A setting that was chosen, and why."""

    key: str
    value: object
    reason: str


class Draft:
    """Values of all settings by dotted key, and the choices among them.

    `before` are those of a checkpoint.
    """

    def __init__(self, config: PretrainConfig, before: Mapping[str, Any] | None = None) -> None:
        self.given, self.before = config.given, before
        self.values: dict[str, Any] = values(config)
        self.choices: dict[str, Choice] = {}
        self._config = config

    def copy(self) -> "Draft":
        """Return a draft of the same values, which may be decided in another way."""
        copied = copy(self)
        copied.values, copied.choices = {**self.values}, {**self.choices}
        return copied

    def __getitem__(self, key: str) -> Any:
        """Return the value in force; None in an optional section that is null."""
        return self.values.get(key)

    def is_open(self, key: str) -> bool:
        """Tell whether nobody has decided on a setting yet."""
        return key not in self.given and key not in self.choices

    def choose(self, key: str, value: T, reason: str) -> T:
        """Choose a value unless one was given or chosen before; return the value in force.

        A run that resumes keeps what it was started with.
        """
        if self.is_open(key):
            if self.before is not None and (self.before.get(key) is not None or not _rivals(key)):
                self.override(key, self.before.get(key), "as the run started")
            else:
                self.override(key, value, reason)
        return self.values[key]

    def override(self, key: str, value: object, reason: str) -> None:
        """Choose a value, whatever was given or chosen before."""
        if value is not None:
            self.values |= dict.fromkeys(_rivals(key))
        self.values[key] = value
        self.choices[key] = Choice(key, value, reason)

    @property
    def config(self) -> PretrainConfig:
        """The settings so far, which nothing has validated."""
        update = nested(self.values)
        for name, section in update.items():
            if isinstance(section, dict):
                update[name] = getattr(self._config, name).model_copy(update=section)
        return self._config.model_copy(update=update)


def _rivals(key: str) -> frozenset[str]:
    """Return the settings that one excludes, such as budget.steps of budget.epochs."""
    return settings_of(PretrainConfig)[key].rivals
