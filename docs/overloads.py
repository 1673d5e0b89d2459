"""What mkdocstrings shows of a function that the stub has for several classes of results."""

from typing import Any

import griffe


class Overloads(griffe.Extension):  # type: ignore[misc]
    """Show the last definition of a function; without an implementation griffe would leave it out."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add the function to the module."""
        for name, definitions in mod.overloads.items():
            if definitions and name not in mod.members:
                mod.set_member(name, definitions[-1])
