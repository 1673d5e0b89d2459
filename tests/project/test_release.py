"""Files of a release agree with the project: metadata, changelog, citation and the workflow."""

import re

import yaml
from packaging.specifiers import SpecifierSet

import dino_vit
from tests.support.documents import PROJECT, ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_the_version_and_its_date_are_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert PROJECT["version"] == dino_vit.__version__ == citation["version"] == newest[1]
    assert str(citation.get("date-released", "unreleased")) == newest[2]
    assert citation["license"] == PROJECT["license"]


def test_the_workflow_tests_every_python_that_is_supported():
    supported = SpecifierSet(PROJECT["requires-python"])
    versions = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in supported]
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == versions
    stated = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert stated == versions
