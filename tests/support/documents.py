"""What is checked in Markdown: its commands, code, tables and words in backticks; the README itself."""

import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(text: str) -> list[list[str]]:
    """Return the commands of the shell blocks, continued lines joined, comments dropped."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [parts for line in lines if (parts := shlex.split(line, comments=True))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables, headings left out."""
    lines = re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    rules = [place for place, row in enumerate(cells) if set("".join(row)) <= set("-:")]
    return [row for place, row in enumerate(cells) if not {place, place + 1} & set(rules)]


def quoted(text: str) -> list[str]:
    """Return what is in backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def with_images(lines: str) -> str:
    """Return lines of Python that an export prints, with tensors called `given` in the place of a photo."""
    given = "given.numpy()" if "onnxruntime" in lines else "given"
    photo = r"^import numpy as np\n.*?^images = \(\(.*?$(\nimages = torch\.from_numpy\(images\)$)?"
    return re.sub(photo, f"images = {given}", lines, flags=re.M | re.S).replace(
        "images = ...", f"images = {given}"
    )
