"""Imports point one way: a module may import what stands in a layer below its own, or beside it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dino_vit"
LAYERS = [
    {
        "diagnosis",
        "distributed",
        "jobs",
        "linear",
        "positions",
        "randomness",
        "schedules",
        "storage",
        "yaml12",
    },
    {"spelling"},
    {"settings"},
    {"settings_load"},
    {"settings_text"},
    {"config", "rules"},
    {"recipes"},
    {"block", "head", "loss", "noise", "optim", "stems", "views"},
    {"augment", "data", "vit"},
    {"dino", "features", "preparation", "weights"},
    {"checkpoint", "meter", "monitor", "processes", "unreadable"},
    {"eval", "session"},
    {"feeding"},
    {"placing", "resolving"},
    {"opening"},
    {"inspection", "introduction"},
    {"reporting"},
    {"report", "train"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> list[str]:
    """The dotted names of all that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    module = module_of(path)
    assert module in LEVEL, f"give {module} a layer"
    for name in imported(path):
        root, *rest = name.split(".")
        if root == "dino_vit" and rest[0] != "__version__":
            assert LEVEL[rest[0]] <= LEVEL[module], f"{module} imports {rest[0]}, which stands above it"


def test_every_layer_exists():
    assert set(LEVEL) == {module_of(path) for path in FILES}


def test_only_these_modules_know_accelerate():
    knowing = {
        module_of(path) for path in FILES if any(n.split(".")[0] == "accelerate" for n in imported(path))
    }
    assert knowing == {"feeding", "opening", "processes", "session"}
