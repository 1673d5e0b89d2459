"""Charts in a real browser."""

from itertools import pairwise

import pytest

from tests.support.browser import text_of

pytest.importorskip("selenium")

from selenium.webdriver import Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


def test_curves_are_drawn_with_axes_levels_and_captions(page):
    for name in ("loss", "entropies", "knn", "rank", "lr", "momentum", "embedding_std", "images_per_second"):
        points = page.execute_script(
            "return document.querySelector(`#chart-${arguments[0]} polyline`).getAttribute('points')", name
        )
        xs = [float(point.split(",")[0]) for point in points.split()]
        assert len(xs) >= 2
        assert xs == sorted(xs)
        assert all(46 <= x <= 800 for x in xs)
        assert page.find_elements(By.CSS_SELECTOR, f"#chart-{name} .grid")
        assert page.find_element(By.CSS_SELECTOR, f"#chart-{name} svg").get_attribute("aria-label")
        assert text_of(page, f"#chart-{name} .caption")
    assert "ln(256) 5.545" in text_of(page, "#chart-loss svg")
    assert "raw pixels" in text_of(page, "#chart-knn svg")


def test_names_of_levels_do_not_overlap(page):
    boxes = page.execute_script(
        "const knn = report.charts.knn, levels = {one: 16.9, two: 17.8, three: 17.2};"
        "knn.update({...knn.data, levels});"
        "return [...knn.svg.querySelectorAll('.name')].map((name) => name.getBoundingClientRect())"
        ".map((box) => [box.top, box.bottom])"
    )
    assert len(boxes) == 3
    for (_, bottom), (top, _) in pairwise(sorted(boxes)):
        assert top >= bottom - 3


def test_a_curve_tells_its_values_to_the_keyboard_and_as_a_table(page):
    drawing = page.find_element(By.CSS_SELECTOR, "#chart-loss svg")
    drawing.send_keys(Keys.HOME)
    values = dict(page.execute_script("return report.charts.loss.series[0].points"))
    assert text_of(page, "#chart-loss .reading").startswith("step 1: ")
    drawing.send_keys(Keys.END)
    said = text_of(page, "#chart-loss .reading")
    assert said.startswith("step 20: ")
    assert float(said.split()[-1]) == pytest.approx(values[20], rel=1e-3)
    page.execute_script("document.querySelector('#chart-loss details').open = true")
    WebDriverWait(page, 10).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#chart-loss table"))
    assert "20" in text_of(page, "#chart-loss table")
