"""Text for files and screens: names of files may hold any bytes, line breaks and escape sequences too."""

import logging
import re

# Control characters, what ends a line or turns its direction, and what UTF-8 cannot encode.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)  # bytes of a name that are not UTF-8, as Python decodes them


def printable(text: object) -> str:
    """Return text on one line, its control characters and undecodable bytes escaped (`\\n`, `\\xff`)."""
    return _UNPRINTABLE.sub(_escape, str(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return rf"\x{code - 0xDC00:02x}" if code in _BYTES else found[0].encode("unicode_escape").decode()


def brief(text: object, length: int = 60) -> str:
    """Return the beginning of `printable` text, for a message."""
    line = printable(str(text)[: length + 1])
    return line if len(line) <= length else f"{line[: length - 4]} ..."


def printable_lines(text: str) -> str:
    """Escape text as `printable` does, but keep its line breaks."""
    return "\n".join(map(printable, text.split("\n")))


class PrintableFormatter(logging.Formatter):
    """Format log lines without escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))
