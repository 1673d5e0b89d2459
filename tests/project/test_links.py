"""Relative links of all Markdown lead to files of the repository, so they work on GitHub and on the site."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify, unique

from tests.support.documents import ROOT


def tracked_files() -> set[Path]:
    """Return the files of the repository; of a copy without its history, those that are there."""
    if not (ROOT / ".git").exists():
        return {path for path in ROOT.rglob("*") if path.is_file()}
    named = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {ROOT / name for name in named.stdout.split("\0") if name}


TRACKED = tracked_files()
MARKDOWN = sorted(path for path in TRACKED if path.suffix == ".md")


def prose(text: str) -> str:
    """Return Markdown without its code blocks, where `#` is a comment."""
    return re.sub(r"(?ms)^```.*?^```", "", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of headings that are the same on GitHub and on the site."""
    seen: Counter[str] = Counter()
    site_anchors: set[str] = set()
    same = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", prose(text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip()
        slug = re.sub(r"[^\w\s-]", "", plain.lower()).replace(" ", "-")
        github_anchor = f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1
        if github_anchor == unique(slugify(plain, "-"), site_anchors):
            same.add(github_anchor)
    return same


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)", prose(page.read_text())):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked in TRACKED, f"{target}: there is no such file in the repository"
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}: there is no such heading"
