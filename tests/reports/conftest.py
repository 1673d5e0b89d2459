import shutil

import pytest

from dino_vit.cli import main
from tests.support.browser import open_browser
from tests.support.reports import make_run


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A finished run, which tests must not change."""
    return make_run(tmp_path_factory.mktemp("report"))


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the run to change."""
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture(scope="session")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def written(made):
    """The report of the run."""
    path = made.parent / "page.html"
    assert main(["report", str(made), f"output={path}"]) == 0
    return path
