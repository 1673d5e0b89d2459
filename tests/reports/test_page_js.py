"""The page in a real browser: its widths, colours, headings and news."""

import json
from itertools import pairwise

import pytest

from dino_vit.reports.page import Page, Pictures
from tests.support.browser import set_screen, text_of
from tests.support.reports import serving

pytest.importorskip("selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 800, 1400])
def test_the_page_fits_its_width_in_both_colours(page, width, dark):
    set_screen(page, width, dark=dark)
    page.execute_script("report.data.explorer.classes.fill('a_long_label_without_a_gap_'.repeat(4))")
    page.execute_script("report.explorer.colourBy('label'); report.explorer.select(3)")
    page.execute_script("document.querySelectorAll('details').forEach((it) => { it.open = true })")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    ink, paper = page.execute_script(
        "const of = getComputedStyle(document.body); return [of.color, of.backgroundColor]"
    )
    assert (brightness(ink) > brightness(paper)) == dark
    for soft in page.execute_script(
        "return [colour('ink'), colour('soft'), colour('accent'), colour('good')]"
    ):
        assert contrast(soft, paper) >= 4.5


def channels(colour):
    return [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]


def brightness(colour):
    """Relative luminance, as accessibility guidelines have it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [320, 390, 800])
def test_every_section_can_be_gone_to_and_its_title_is_seen(page, width):
    set_screen(page, width)
    for link in page.find_elements(By.CSS_SELECTOR, "nav a"):
        box = page.execute_script("return arguments[0].getBoundingClientRect().toJSON()", link)
        assert 0 <= box["left"] < box["right"] <= width
        link.click()  # raises if something else is in its place
        heights = "return [document.querySelector('header').getBoundingClientRect().bottom, "
        heights += f"document.querySelector('{link.get_attribute('hash')} h2').getBoundingClientRect().top]"
        header, title = page.execute_script(heights)
        assert header <= title


WORDS = """
const range = document.createRange();
return [...document.querySelectorAll("td, th")].flatMap((cell) => [...cell.childNodes]).flatMap((text) =>
  [...(text.data ?? "").matchAll(/[^\\s/-]+/g)].filter((word) => {
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return word[0].length < 16 && range.getClientRects().length > 1;
  }).map((word) => word[0]))
"""


@pytest.mark.parametrize("width", [390, 800])
def test_no_word_of_a_table_is_broken(page, width):
    set_screen(page, width)
    page.execute_script("document.querySelectorAll('details').forEach((it) => { it.open = true })")
    assert len(page.find_elements(By.CSS_SELECTOR, "td")) > 100
    assert page.execute_script(WORDS) == []


def test_rows_of_pictures_and_the_table_use_a_wide_screen(page):
    set_screen(page, 1400)
    middle, right = page.execute_script(
        "const box = document.querySelector('main').getBoundingClientRect(); "
        "return [(box.left + box.right) / 2, box.right]"
    )
    last = "return document.querySelector(arguments[0]).getBoundingClientRect().right"
    for section in ("attention", "neighbours", "views"):
        assert middle * 1.1 < page.execute_script(last, f"#{section} figure:last-child") <= right
    assert page.execute_script(last, "#run table") > right - 50


def test_the_theme_can_be_chosen(page):
    button = page.find_element(By.ID, "theme")
    seen = []
    for _ in range(3):
        button.click()
        seen.append((button.text, page.execute_script("return getComputedStyle(document.body).color")))
    assert [text for text, _ in seen] == ["Theme: light", "Theme: dark", "Theme: auto"]
    assert seen[0][1] != seen[1][1]
    assert seen[0][1] == seen[2][1]


def test_headings_are_in_order_and_everything_has_a_name(page):
    levels = page.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3')].map((heading) => Number(heading.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    nameless = page.execute_script(
        "return [...document.querySelectorAll('img, button, canvas[tabindex], svg, select')].filter((it) =>"
        "!(it.alt || it.textContent.trim() || it.ariaLabel || it.labels?.length)).map((it) => it.outerHTML)"
    )
    assert nameless == []


def test_a_live_page_shows_the_news(browser, folder):
    whole = (folder / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:8]))
    live = Page(folder, lambda record: Pictures(notes=["drawn"]))
    with serving(live) as server:
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.execute_script("window.kept = true")
        assert "8 of 20 steps" in text_of(browser, "#run")
        (folder / "metrics.jsonl").write_bytes(whole)
        live.draw_if_new()
        WebDriverWait(browser, 30).until(lambda b: "20 of 20 steps" in text_of(b, "#run"))
        points = browser.execute_script("return report.charts.loss.series[0].points.length")
        assert points == len(lines)
        assert browser.execute_script("return window.kept"), "the page was loaded again"
        button = browser.find_element(By.CSS_SELECTOR, "#news button")
        assert "Pictures of step 20 are ready" in text_of(browser, "#news")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
        button.click()
        WebDriverWait(browser, 30).until(lambda b: "drawn" in text_of(b, ".top"))
        assert json.loads(browser.execute_script("return document.getElementById('data').textContent"))[
            "live"
        ]
    assert browser.get_log("browser") == []
    WebDriverWait(browser, 30).until(lambda b: "does not answer" in text_of(b, "#news"))
    browser.get("about:blank")  # the page goes on to ask its server, which other tests would find in the log
    browser.get_log("browser")
