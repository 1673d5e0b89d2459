"""Pages that the site has beside those in docs/: commands, functions, figures and copied files."""

import ast
import io
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from matplotlib.figure import Figure
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import dino_vit
from dino_vit.commands import COMMANDS, Command
from dino_vit.config.loading import write_yaml
from dino_vit.config.settings import Settings, section_of, settings_of

ROOT = Path(__file__).parents[1]
# Files of the repository, by their page.
COPIED = {
    "index.md": "README.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
    "background/measured.md": "benchmarks/RESULTS.md",
    "background/tried.md": "benchmarks/TRIED.md",
    "background/minimal.md": "examples/minimal.py",
}
# What the page of figures shows: the stored results of a benchmark, and their heading.
PLOTTED = {
    "small": "Small sets, in ten minutes of one core",
    "hours": "Small sets, in an hour of two cores",
    "race": "Small sets, in one and five minutes of one core, beside lightly-train",
    "cifar10": "CIFAR-10, in an hour of two cores with AVX-512 and bf16",
    "step": "A step of training",
    "input": "Reading and cropping of images",
    "knn": "k-NN",
}
FUNCTIONS = "reference/python.md"
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")
log = get_plugin_logger("dino_vit")  # a warning fails the build


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made of code and of other files."""
    pages = {page: (ROOT / path).read_text() for page, path in COPIED.items()}
    for page, path in COPIED.items():
        if path.endswith(".py"):
            pages[page] = f"# {path}\n\n```python\n{pages[page]}```\n"
    pages |= {f"reference/commands/{name}.md": command_page(name, COMMANDS[name]) for name in COMMANDS}
    pages["reference/commands/index.md"] = list_of_commands()
    for name, plot in plots().items():
        files.append(File.generated(config, f"background/{name}.svg", content=plot))
    pages["background/figures.md"] = figures_page()
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    for name in undocumented():
        log.warning("%s has no docstring", name)
    texts = [*pages.values(), functions_list(), *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    named = set(re.findall(r"^::: dino_vit\.(?:\w+\.)*(\w+)$", "\n".join(texts), flags=re.MULTILINE))
    for name in sorted(set(dir(dino_vit)) - named):
        log.warning("dino_vit.%s is on no page of the reference", name)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links between files of the repository to their pages; add what a page has on the site alone."""
    here = page.file.src_uri
    if here == FUNCTIONS:
        return f"{markdown}\n{functions_list()}"
    pages = {path: copied for copied, path in COPIED.items()}
    folder = posixpath.dirname(COPIED.get(here, f"docs/{here}"))

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        target = pages.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}"

    return LINK.sub(lead, markdown)


def undocumented() -> Iterator[str]:
    """Yield what is public but has no docstring: names of the package, and methods of its classes."""
    package = griffe.load(
        "dino_vit", search_paths=[ROOT], extensions=griffe.load_extensions(ROOT / "docs/overloads.py")
    )
    for name in dir(dino_vit):
        documented: Any = package[name]
        members = documented.members if documented.is_class else {}
        public = {f"{name}.{key}": member for key, member in members.items() if not key.startswith("_")}
        methods = {key: member for key, member in public.items() if member.is_function}
        yield from (key for key, value in {name: documented, **methods}.items() if not value.docstring)


def list_of_commands() -> str:
    """Return the page with a line for each command."""
    rows = "\n".join(f"| [`{name}`]({name}.md) | {command.help} |" for name, command in COMMANDS.items())
    return f"""# Commands

Values come from the defaults, then from `--config FILE`, then from `key=value` (or `--key value`) on the
command line. `dino-vit config COMMAND` prints all settings of a command as YAML, which
`--config` reads; those left at their defaults are comments.

| `dino-vit ...` | |
|---|---|
{rows}
"""


def command_page(name: str, command: Command) -> str:
    """Return the page of a command: what it does, examples and every setting."""
    cls: type[Settings] = command.config_class
    examples = [f"dino-vit {example}" for example in cls.examples or (name,)]
    function = name.replace("-", "_")
    parts = [f"# {name}", str(cls.__doc__), "```bash\n" + "\n".join(examples) + "\n```"]
    if cls.positional:
        names = " ".join(key.rpartition(".")[2].upper() for key in cls.positional)
        parts.append(f"By position: `dino-vit {name} {names}`.")
    if cls.resumes:
        parts.append("The same command resumes what was interrupted; *resumable* settings may change then.")
    parts += [f"In Python: [`dino_vit.{function}`](../python.md#dino_vit.{function}).", "## Settings"]
    parts += settings_list(cls, resumes=cls.resumes)
    for key, field in cls.model_fields.items():
        if section := section_of(field.annotation):
            parts += [f"## {key}", str(section.__doc__), *settings_list(section, f"{key}.", cls.resumes)]
    return "\n\n".join(parts) + "\n"


def settings_list(cls: type[Settings], prefix: str = "", resumes: bool = False) -> Iterator[str]:
    """Yield each setting with its default, meaning and choices."""
    for key, info in settings_of(cls, prefix).items():
        if key.rpartition(".")[2] not in cls.model_fields or not key.startswith(prefix):
            continue
        choices = ", ".join(f"`{choice}`" for choice in info.choices)
        meaning = info.meaning.removesuffix(f" [{'|'.join(info.choices)}]").replace("*", r"\*")
        default = "required" if info.required else f"default `{write_yaml(info.default)}`"
        texts = [
            meaning,
            f"one of {choices}" if choices else "",
            "*resumable*" * (resumes and info.resumable),
        ]
        yield f"`{key}`{{ #{key} }} — {default}\n:   " + "; ".join(filter(None, texts))


def functions_list() -> str:
    """Return what follows on the page of Python: the functions, their texts and signatures, from the stub."""
    tree = ast.parse((ROOT / "dino_vit/__init__.pyi").read_text())
    docs = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    parts = []
    for name in COMMANDS:
        function = name.replace("-", "_")
        text = str(docs[function]).partition("The settings and their defaults:")[0].strip()
        text = re.sub(r"(?m)^    (dino_vit\..*)$", r"```python\n\1\n```", text)
        options = "heading_level: 3\n      show_docstring_description: false"
        parts.append(f"::: dino_vit.{function}\n    options:\n      {options}\n\n{text}\n")
        parts.append(f"Settings: [`dino-vit {name}`](commands/{name}.md#settings).\n")
    return "\n".join(parts)


def results(name: str) -> dict[str, dict[str, Any]]:
    """Return what a benchmark has measured, by the kind of device."""
    paths = sorted((ROOT / "benchmarks/results").glob(f"*/{name}.json"))
    return {path.parent.name: json.loads(path.read_bytes()) for path in paths}


def plots() -> dict[str, bytes]:
    """Return the first table of each plotted benchmark as a chart of bars, by its name."""
    return {
        f"{name}-{device}": bars(result["tables"][0])
        for name in PLOTTED
        for device, result in results(name).items()
    }


def bars(table: dict[str, Any]) -> bytes:
    """Draw a group of bars for each row of a table, and return the SVG."""
    rows, names = table["rows"], list(table["rows"][0]["speed"])
    figure = Figure(figsize=(8, 1 + 0.27 * len(rows) * (len(names) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for offset, name in enumerate(names):
        heights = [row * (len(names) + 1) + offset for row in range(len(rows))]
        drawn = axes.barh(heights, [row["speed"][name] for row in rows], label=name)
        axes.bar_label(drawn, fmt="{:,.4g}", padding=3)
    middles = [row * (len(names) + 1) + (len(names) - 1) / 2 for row in range(len(rows))]
    axes.set_yticks(middles, [re.sub(", to reach .*", "", row["name"]) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(table["unit"])
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def figures_page() -> str:
    """Return the page of plots, with machine, date and command."""
    parts = [FIGURES]
    for name, heading in PLOTTED.items():
        measured = results(name)
        parts += [f"## {heading}"] if measured else []
        for device, result in measured.items():
            title, note = (result["tables"][0][key] for key in ("title", "note"))
            parts.append(f"![{title}]({name}-{device}.svg)")
            parts.append(f"*{title}.* {note.partition('What the runs said')[0]}")
            parts.append(f"Measured on {result['day']}, on {result['machine']}.")
    return "\n\n".join(parts) + "\n"


FIGURES = """# Figures

Drawn from the stored results of the programs in `benchmarks/`; longer bars are better.
[All that is measured](measured.md) has every table. `make bench` repeats them on your machine.

No ImageNet run has been measured yet. A machine with another processor has other figures: only
those of one plot were measured together."""
