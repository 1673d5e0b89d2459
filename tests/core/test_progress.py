import io
import logging
import sys

from dino_vit.core import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_names_in_a_title_are_no_markup(monkeypatch, caplog):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE", -1)
    monkeypatch.setenv("TERM", "xterm")
    with (
        caplog.at_level(logging.INFO, "dino_vit"),
        progress.progress("Listing a[/x]\x1b[31m[red]", 1) as advance,
    ):
        advance.shown = 0
        advance(1)
    assert r"Listing a[/x]\x1b[31m[red]: 1" in screen.getvalue()
