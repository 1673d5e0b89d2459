"""The page of a comparison: the curves of its runs, and what a browser shows."""

from dataclasses import replace

import pytest
from selenium.webdriver.support.ui import WebDriverWait

import dino_vit
from dino_vit.eval.comparison.page import joint_charts
from dino_vit.reports.page import charts
from dino_vit.reports.record import read_run
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


def test_a_run_has_one_line_in_each_chart(compared, made):
    drawn = {chart["title"]: chart for chart in ParsedPage(compared.page.read_text()).data["charts"]}
    assert {"Loss", "k-NN accuracy", "Entropy gap", "Learning rate"} <= set(drawn)
    assert all(list(chart["series"]) == ["run"] for chart in drawn.values())
    run_charts = {chart["title"]: chart for chart in charts(read_run(made))}
    assert drawn["Effective rank"]["series"]["run"] == [
        list(point) for point in run_charts["Effective rank"]["series"]["effective rank"]
    ]
    record = read_run(made)
    record = replace(record, baseline=replace(record.baseline, raw_pixels=12.5))
    (knn,) = [it for it in joint_charts({"a": read_run(made), "b": record}) if it["title"] == "k-NN accuracy"]
    assert list(knn["series"]) == ["a", "b"]
    assert "untrained" in knn["levels"]
    assert "raw pixels" not in knn["levels"], "the runs differ in it"


def test_a_browser_shows_the_page_without_a_complaint(browser, compared):
    for width, dark in ((1400, False), (390, True)):
        set_screen(browser, width, dark=dark)
        browser.get(compared.page.as_uri())
        assert text_of(browser, "h1") == ", ".join(compared.ranks)
        assert text_of(browser, ".folder").startswith("3 backbones on 72 images of ")
        assert compared.verdict in text_of(browser, ".outcome")
        assert text_of(browser, "#charts .legend").startswith("step 20\nrun ")
        points = browser.find_elements("css selector", ".interval .figure")
        lefts = [point.rect["x"] for point in points]
        percents = [figure.value for figure in compared.figures["k-NN top-1"].values()]
        assert sorted(range(3), key=lefts.__getitem__) == sorted(range(3), key=percents.__getitem__)
        pictures = browser.find_elements("css selector", "#features img")
        assert len(pictures) == 4 * (1 + 2 * 3)  # four images, attention and patches
        assert {picture.get_property("naturalWidth") for picture in pictures} == {32, 192}, "whole"
        wide = "[document.documentElement, ...document.querySelectorAll('.wide')]"
        beyond = f"return {wide}.map((it) => it.scrollWidth - it.clientWidth)"
        assert max(browser.execute_script(beyond)) == 0, "nothing scrolls sideways"
        assert browser.get_log("browser") == []


def test_a_run_that_ended_earlier_keeps_its_last_value(browser, compared):
    browser.get(compared.page.as_uri())
    texts = {"title": "Loss", "caption": "", "unit": ""}
    data = {**texts, "levels": {}, "series": {"a": [[1, 2], [3, 4]], "b": [[1, 5], [2, 6]]}}
    browser.execute_script("new Chart(document.getElementById('charts'), arguments[0])", data)
    legend = browser.find_elements("css selector", ".legend")[-1]
    WebDriverWait(browser, 10).until(lambda _: legend.text == "step 3\na 4\nb 6 at 2")
