"""Break the code a little, one place at a time, and list what no test notices.

`python -m tests.fuzz.mutate --seed 1 --count 20 dino_vit/weights` changes 20 operators, comparisons and
constants in a copy of the checkout, each alone, and runs the tests of their module, then of its package.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SWAPS = [
    *[(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)],
    *[(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Mod, ast.FloorDiv), (ast.And, ast.Or)],
]
OTHER = {first: second for pair in SWAPS for first, second in (pair, pair[::-1])}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield a field and another value of it for each thing that may be changed in a node itself."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            if type(operator) in OTHER:
                yield "ops", [*node.ops[:number], OTHER[type(operator)](), *node.ops[number + 1 :]]
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        yield "op", OTHER[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "operand", ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield "id", NAMES[node.id]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "value", not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "value", node.value + 1


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: not annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from within(child)


def mutate(source: str, draw: random.Random) -> tuple[str, str] | None:
    """Return a source with one of its places changed, and a line about it; None if it has no place."""
    tree = ast.parse(source)
    places = [(node, *change) for node in within(tree) for change in changes(node)]
    if not places:
        return None
    node, field, value = draw.choice(places)
    before = ast.unparse(node)
    setattr(node, field, value)
    return ast.unparse(ast.fix_missing_locations(tree)), f"{node.lineno}: {before} → {ast.unparse(node)}"


def tried_by(module: Path) -> list[str]:
    """Return the tests that may notice a change: the file that mirrors a module, then all of its package."""
    own = Path("tests", *module.parts[1:]).with_name(f"test_{module.name}")
    return [str(path) for path in (own, Path("tests", module.parts[1])) if (ROOT / path).exists()] or [
        "tests"
    ]


def passes(copy: Path, tests: str, limit: float | None = None) -> bool:
    """Tell whether tests pass in a copy; what takes too long does not."""
    options = ["-xqm", "not slow and not gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, tests]
    environ = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=environ, timeout=limit, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutate", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="modules or packages, from the root")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args()
    modules = sorted(file for path in args.paths for file in ([path] if path.suffix else path.rglob("*.py")))
    print(f"seed {args.seed}", flush=True)
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "site", "results"))

        @cache
        def limit(tests: str) -> float:
            start = time.monotonic()
            assert passes(copy, tests), f"{tests} fails without a change"
            return 60 + 5 * (time.monotonic() - start)

        survivors = 0
        for _ in range(args.count):
            module = draw.choice(modules)
            source = (ROOT / module).read_text()
            if not (mutated := mutate(source, draw)):
                continue
            limits = {tests: limit(tests) for tests in tried_by(module)}
            (copy / module).write_text(mutated[0])
            survives = all(passes(copy, *each) for each in limits.items())
            (copy / module).write_text(source)
            survivors += survives
            print("SURVIVES" if survives else "noticed ", f"{module}:{mutated[1]}", flush=True)
    print(f"seed {args.seed}: {survivors} of {args.count} survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
