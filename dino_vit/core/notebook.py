"""A bar in the output of a notebook's cell, which is drawn anew in its place."""

import sys
from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType

COLUMNS = 100


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")  # which the shell of a terminal has not


class NotebookLive:
    """What `rich.live.Live` is on a terminal; rich's own needs ipywidgets in a notebook."""

    def __init__(self, get_renderable: Callable[[], RenderableType], *, transient: bool = False) -> None:
        self.get_renderable, self.transient = get_renderable, transient
        self.console = Console(file=sys.stderr, width=COLUMNS, force_jupyter=False)  # of lines that stay
        self.handle: Any = None

    def start(self, refresh: bool = True) -> None:
        """Show the bar, unless it is shown already."""
        from IPython.display import display

        if self.handle is None:
            self.handle = display({"text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            if refresh:
                self.refresh()

    @property
    def is_started(self) -> bool:
        """Whether the bar is shown."""
        return self.handle is not None

    def refresh(self) -> None:
        """Draw the bar as it is now."""
        page = Console(record=True, file=StringIO(), width=COLUMNS, force_jupyter=False)
        page.print(self.get_renderable())
        style = "margin:0; line-height:normal; font-family:monospace"
        drawn = page.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
        self._show(drawn)

    def stop(self) -> None:
        """Leave the bar as it is, or remove it if it is transient."""
        if self.handle is not None and self.transient:
            self._show("")
        elif self.handle is not None:
            self.refresh()

    def _show(self, page: str) -> None:
        self.handle.update({"text/html": page}, raw=True)
