"""The page of a comparison in a browser: curves, intervals and images, with names that look like scripts."""

import pytest

import dino_vit
from tests.support.browser import set_screen, text_of
from tests.support.reports import ParsedPage


@pytest.fixture(scope="module")
def compared(made):
    """A run, its state after half of its steps, and an untrained network."""
    return dino_vit.compare(
        made.parent / "images",
        weights=[made, min((made / "checkpoints").iterdir())],
        untrained=True,
        measures=["knn"],
        output=made.parent / "comparison",
        cache=made.parent / "cache",
        verbose=False,
    )


def test_the_curves_of_the_runs_are_drawn(compared):
    charts = {chart["title"]: chart for chart in ParsedPage(compared.page.read_text()).data["charts"]}
    logged = charts["Effective rank"]["series"]["run"]
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    assert logged[-1][0] == 20
    assert "k-NN" in charts


def test_a_browser_shows_the_page_without_a_complaint(browser, compared):
    for width, dark in ((1300, False), (390, True)):
        set_screen(browser, width, dark=dark)
        browser.get(compared.page.as_uri())
        assert text_of(browser, "h1") == f"{len(compared.ranks)} backbones"
        assert compared.verdict in text_of(browser, ".outcome")
        assert browser.find_elements("css selector", "#charts svg polyline")
        points = browser.find_elements("css selector", ".interval .figure")
        places = "return arguments[0].map((point) => point.getBoundingClientRect().left)"
        lefts = dict(zip(compared.ranks, browser.execute_script(places, points), strict=True))
        figures = compared.figures["k-NN top-1"]
        by_place = sorted(figures, key=lambda name: lefts[name])
        assert [figures[name].percent for name in by_place] == sorted(of.percent for of in figures.values())
        pictures = browser.find_elements("css selector", "#features img")
        assert all(picture.get_property("naturalWidth") > 0 for picture in pictures)
        assert len(pictures) == 4 * (1 + 2 * len(compared.ranks))  # four images, attention and patches
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.execute_script(overflow) <= 0
        assert browser.get_log("browser") == []
