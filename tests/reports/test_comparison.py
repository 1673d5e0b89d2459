"""The page of a comparison in a browser: curves, intervals and images, with names that look like scripts."""

import pytest

import dino_vit
from tests.support.browser import set_screen, text_of
from tests.support.reports import ParsedPage


@pytest.fixture(scope="module")
def compared(made):
    """A run, its state after half of its steps, and an untrained network."""
    first = min((made / "checkpoints").iterdir())
    return dino_vit.compare(
        made.parent / "images",
        weights=[made, first] if first != max((made / "checkpoints").iterdir()) else [made],
        untrained=True,
        measures=["knn"],
        output=made.parent / "comparison",
        cache=made.parent / "cache",
        verbose=False,
    )


def test_the_curves_of_the_runs_are_drawn(compared):
    charts = {chart["title"]: chart for chart in ParsedPage(compared.page.read_text()).data["charts"]}
    logged = charts["Effective rank during training"]["series"]["run"]
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    assert logged[-1][0] == 20
    assert "k-NN during training" in charts


def test_a_browser_shows_the_page_without_a_complaint(browser, compared):
    for width, dark in ((1300, False), (390, True)):
        set_screen(browser, width, dark=dark)
        browser.get(compared.page.as_uri())
        assert text_of(browser, "h1") == f"{len(compared.ranks)} backbones"
        assert compared.verdict in text_of(browser, ".outcome")
        assert browser.find_elements("css selector", "#charts svg polyline")
        points = browser.find_elements("css selector", ".intervals circle")
        assert len(points) == len(compared.ranks)
        places = {
            point.get_attribute("cx"): compared.figures["k-NN top-1"][name].percent
            for point, name in zip(points, compared.ranks, strict=True)
        }
        in_order = sorted(places, key=float)
        assert [places[x] for x in in_order] == sorted(places.values())  # better is further to the right
        pictures = browser.find_elements("css selector", "#maps img")
        assert all(one.get_property("naturalWidth") > 0 for one in pictures)
        assert len(pictures) == 4 * (1 + 2 * len(compared.ranks))  # four images, attention and patches
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.execute_script(overflow) <= 0
        assert browser.get_log("browser") == []
