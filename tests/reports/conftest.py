import shutil

import pytest

from dino_vit.cli import main
from tests.support.browser import open_browser
from tests.support.labelling import LabelPage, write_images
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


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of two colours, and which is which."""
    folder = tmp_path_factory.mktemp("label") / "photos"
    return folder, write_images(folder)


@pytest.fixture
def page(browser, photos, tmp_path):
    """The page to label them by."""
    with LabelPage.opened(browser, *photos, tmp_path) as label_page:
        yield label_page
