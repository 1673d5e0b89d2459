"""Imports point one way between packages, in no circle between modules; calls are those in the docs."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import pytest

from dino_vit.cli import main
from tests.support.runs import arguments

ROOT = Path(__file__).parents[2] / "dino_vit"
# From the bottom up: a package may import those in the groups before its own.
GROUPS = (
    ("core",),
    ("config",),
    ("models",),
    ("data",),
    ("views", "method"),
    ("weights",),
    ("features",),
    ("eval",),
    ("reports",),
    ("training",),
    ("commands",),
    ("cli", "run_folder"),
    ("functions",),
    ("__main__",),
)
LEVEL = {package: level for level, group in enumerate(GROUPS) for package in group}
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name of a module; a package goes by its own name."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """Return the modules of the library that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name.partition(".")[0] == "dino_vit"}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "dino_vit"])
def test_packages_import_only_lower_layers(name):
    package = name.split(".")[1]
    for other in imported(MODULES[name]) - {"dino_vit"}:
        below = other.split(".")[1]
        assert below == package or LEVEL[below] < LEVEL[package], f"{name} imports {other}"


def test_modules_import_each_other_in_no_circle():
    graph = {name: imported(path) - {"dino_vit", name} for name, path in MODULES.items()}
    del graph["dino_vit"]  # it names what users import, and imports that when it is asked for
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def paths(heading):
    """Return the calls of a list in docs/architecture.md, each with the file that follows them."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text().split(f"## {heading}\n")[1]
    text = text.split("\n## ")[0]
    groups = re.findall(r"((?:`[\w.]+\(\)`(?:, | and )?)+) in `([\w/]+\.py)`", text)
    calls = [(call, file) for names, file in groups for call in re.findall(r"([\w.]+)\(\)", names)]
    assert len(calls) == text.count("()`") >= 9
    return calls


def test_the_calls_from_the_command_line_to_the_loss_are_those_in_the_docs(tmp_path, monkeypatch):
    calls = list[tuple[str, str]]()

    def raise_with_calls(*_, **__):
        frame = sys._getframe(1)
        while frame:
            if ROOT in Path(frame.f_code.co_filename).parents:
                file = str(Path(frame.f_code.co_filename).relative_to(ROOT))
                calls.append((frame.f_code.co_qualname, file))
            frame = frame.f_back
        raise ValueError("seen")

    monkeypatch.setattr("dino_vit.method.terms.cls.chunked_cross_entropy", raise_with_calls)
    assert main(arguments(tmp_path / "run")) == 2
    named = paths("From the command line to the loss")
    assert [*calls[::-1], ("chunked_cross_entropy", "method/cross_entropy.py")] == named
    assert len(named) <= 10


@pytest.mark.parametrize("heading", ["The path of one image", "The path of one configuration"])
def test_the_calls_in_the_docs_are_where_they_are_said_to_be(heading):
    for call, file in paths(heading):
        module = f"dino_vit/{file}".removesuffix(".py").replace("/", ".")
        assert callable(resolve_name(f"{module}:{call}"))
