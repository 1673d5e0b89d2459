"""The page in a real browser: its widths, colours, charts and map."""

from itertools import pairwise

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import set_screen, text_of
from tests.support.reports import HOSTILE

READY = "return report.map.atlas.naturalWidth"


@pytest.fixture
def page(browser, written):
    """A browser that shows the report, in which no script may complain."""
    set_screen(browser, 1440)
    browser.get(written.as_uri())
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(READY))
    yield browser
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 1400])
def test_the_page_fits_its_width_in_both_colours(page, width, dark):
    set_screen(page, width, dark=dark)
    page.execute_script(
        "report.data.map.classes.forEach((it) => { it[0] = 'a_long_label_without_a_gap_'.repeat(4) })"
    )
    hostile = page.execute_script("return report.data.map.names").index(HOSTILE)
    page.execute_script("report.map.drawLegend(document.querySelector('.tools'))")
    page.execute_script("report.map.select(arguments[0])", hostile)
    assert text_of(page, ".selection .caption").startswith(HOSTILE)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    body_colours = (
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    ink, paper = page.execute_script(body_colours)
    assert (brightness(ink) > brightness(paper)) == dark
    for selector in (".lead", ".pill", ".legend .c0", ".legend .c1"):
        colour = page.execute_script(f"return getComputedStyle(document.querySelector('{selector}')).color")
        low, high = sorted((brightness(colour), brightness(paper)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector


def brightness(colour):
    """Relative luminance, as accessibility guidelines have it."""
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_headings_are_in_order_and_everything_has_a_name(page):
    levels = page.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3')].map((heading) => Number(heading.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    nameless = page.execute_script(
        "return [...document.querySelectorAll('img, button, svg, #explorer canvas')].filter((it) =>"
        "!(it.alt || it.textContent.trim() || it.ariaLabel)).map((it) => it.outerHTML)"
    )
    assert nameless == []


def chart(page, title):
    """Return the element of a chart and its place in `report.charts`."""
    titles = page.execute_script("return report.charts.map((one) => one.data.title)")
    return page.find_elements(By.CSS_SELECTOR, ".chart")[titles.index(title)], titles.index(title)


def open_others(page):
    """Show the charts behind the line, by the keyboard."""
    page.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    drawn = "return [...document.querySelectorAll('.chart svg')].every((svg) => svg.children.length)"
    WebDriverWait(page, 10).until(lambda _: page.execute_script(drawn))


def test_curves_are_drawn_with_levels_and_tell_the_values_under_the_pointer(page):
    open_others(page)
    for element in page.find_elements(By.CSS_SELECTOR, ".chart"):
        points = element.find_element(By.TAG_NAME, "polyline").get_attribute("points").split()
        xs = [float(point.split(",")[0]) for point in points]
        assert len(xs) >= 2, element.text
        assert xs == sorted(xs)
        assert element.find_elements(By.CSS_SELECTOR, ".grid")
    knn, _ = chart(page, "k-NN accuracy")
    assert "pixels" in knn.text
    curves = max(it.rect["x"] + it.rect["width"] for it in knn.find_elements(By.TAG_NAME, "polyline"))
    names = [it.rect for it in knn.find_elements(By.CSS_SELECTOR, "text.name")]
    assert all(name["x"] > curves for name in names), "beside the curves"
    assert all(below["y"] - above["y"] >= 12 for above, below in pairwise(names)), "not on each other"
    loss, place = chart(page, "Loss")
    assert "all alike 5.545" in loss.text
    values = dict(page.execute_script(f"return [...report.charts[{place}].series[0][1]]"))
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", loss)
    svg = loss.find_element(By.TAG_NAME, "svg")
    for step in (20, 5):
        x = page.execute_script(f"return report.charts[{place}].x({step})") - svg.size["width"] / 2
        ActionChains(page, duration=0).move_to_element_with_offset(svg, round(x), 0).perform()
        shown = loss.find_element(By.CSS_SELECTOR, ".legend").text.split()
        assert shown[:3] == ["step", str(step), "loss"]
        assert float(shown[3]) == pytest.approx(values[step], rel=1e-3)


def where(page, number):
    """Bring the map into sight; return where an image of it is, from the middle of the canvas."""
    canvas = page.find_element(By.CSS_SELECTOR, ".explorer canvas")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    return canvas, *page.execute_script(
        "const [x, y] = report.map.onScreen(arguments[0]);"
        "return [Math.round(x - report.map.width / 2), Math.round(y - report.map.height / 2)]",
        number,
    )


def test_hovering_and_selecting_show_an_image_its_attention_and_its_neighbours(page):
    data = page.execute_script("return JSON.parse(document.getElementById('data').textContent).map")
    number = page.execute_script("return report.map.at(report.map.width / 2, report.map.height / 2)") or 0
    mouse = ActionChains(page, duration=0).move_to_element_with_offset(*where(page, number))
    mouse.perform()
    hovered = page.execute_script("return report.map.hovered")
    assert data["names"][hovered] in text_of(page, ".explorer .caption")
    mouse.click().perform()
    assert page.execute_script("return report.map.selected") == hovered
    assert text_of(page, ".selection .caption").startswith(data["names"][hovered])
    captions = [it.text for it in page.find_elements(By.CSS_SELECTOR, ".selection figcaption")]
    assert captions[:2] == ["image", "attention (mean of heads)"]
    near = data["neighbours"][hovered]
    for caption, other, cosine in zip(captions[2:], near, data["cosines"][hovered], strict=True):
        assert caption == f"{cosine:.3f} · {data['classes'][data['labels'][other]][0]}"
    pictures = page.find_elements(By.CSS_SELECTOR, ".selection img")
    WebDriverWait(page, 10).until(lambda _: all(it.get_property("naturalWidth") for it in pictures))
    photo, below, attention, *_ = pictures
    assert photo.get_property("src") == below.get_property("src") == data["photos"][hovered]
    assert attention.get_property("src") == data["attention"][hovered]
    assert photo.rect["width"] >= 200
    assert attention.rect["y"] == photo.rect["y"], "side by side"
    assert below.rect == attention.rect
    page.find_element(By.CSS_SELECTOR, ".selection button").click()
    assert page.execute_script("return report.map.selected") == near[0]


@pytest.mark.parametrize("width", [400, 1440])
def test_the_selected_image_is_on_the_map_as_a_whole(page, width):
    set_screen(page, width)
    WebDriverWait(page, 10).until(lambda _: page.execute_script("return report.map.width < innerWidth"))
    cut_off = (
        "const { map } = report, half = map.selectedSize() / 2;"
        "return map.data.names.filter((_, n) => map.onScreen(n).some("
        "(at, axis) => at < half || at > [map.width, map.height][axis] - half))"
    )
    assert page.execute_script(cut_off) == []


def test_on_a_telephone_a_selected_photo_comes_into_sight_below_the_map(page):
    set_screen(page, 400)
    assert page.execute_script("return scrollY") == 0, "the page begins at its top"
    ActionChains(page, duration=0).move_to_element_with_offset(*where(page, 0)).click().perform()
    in_sight = (
        "const sides = (selector) => document.querySelector(selector).getBoundingClientRect();"
        "const [map, photo] = [sides('.explorer canvas'), sides('.selection figure')];"
        "const below = photo.top > map.bottom && photo.height > 100;"
        "return map.top >= 0 && below && photo.bottom < innerHeight + 1"  # it scrolls by whole pixels
    )
    WebDriverWait(page, 10).until(lambda _: page.execute_script(in_sight))


def test_the_map_follows_the_mouse_and_zooms_to_thumbnails(page):
    page.execute_script("report.map.select(null)")
    canvas, x, y = where(page, 0)
    drag = ActionChains(page, duration=0).move_to_element_with_offset(canvas, x, y).click_and_hold()
    drag.move_by_offset(60, -40).release().perform()
    _, *moved = where(page, 0)
    assert moved == [pytest.approx(x + 60, abs=1.5), pytest.approx(y - 40, abs=1.5)]
    assert page.execute_script("return report.map.selected") is None, "a drag is no click"
    ActionChains(page).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -900).perform()
    assert page.execute_script("return report.map.scale") > 1
    assert page.execute_script("return report.map.size()") > 15
    page.find_element(By.XPATH, "//button[text()='Show all']").click()
    assert page.execute_script("return report.map.scale") == 1


def test_the_legend_counts_as_people_do(page):
    """Twelve classes, the largest of which is 2: ten colours, and one for all others."""
    page.execute_script(
        "const { data } = report.map; document.querySelector('.classes').remove();"
        "data.classes = [2, 10, 0, 1, 3, 4, 5, 6, 7, 8, 9, 11].map((it, n) => [String(it), 13 - n]);"
        "data.labels = data.labels.map((_, n) => n % 12); data.labels[0] = -1;"
        "report.map.drawLegend(document.querySelector('.tools'))"
    )
    shown = [it.text for it in page.find_elements(By.CSS_SELECTOR, ".classes button")]
    assert shown[:4] == ["0 11 images", "1 10 images", "2 13 images", "3 9 images"]
    assert [text.split()[0] for text in shown[4:8]] == ["4", "5", "6", "7"]
    assert shown[-3:] == ["10 12 images", "2 other classes 5 images", "without a label 1 image"]
    colours = "return [...document.querySelectorAll('.classes i')].map((it) => it.style.background)"
    assert len(set(page.execute_script(colours))) == 11, "others and unlabelled are grey"
