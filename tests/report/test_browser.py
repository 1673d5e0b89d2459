"""The page in a real browser: Chromium, without a window."""

import json
import os
import shutil
import statistics
import threading
from itertools import pairwise

import pytest

from dino_vit.cli import main
from dino_vit.report.page import Pictures
from dino_vit.report.serving import Page, PageServer
from tests.support.reports import HOSTILE, IMAGES, make_run

REQUIRED = os.environ.get("DINO_VIT_BROWSER") == "required"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

if not REQUIRED:
    pytest.importorskip("selenium")
    if not (BROWSER and DRIVER):
        pytest.skip(
            "no chromium or no chromedriver; on Debian: apt-get install chromium chromium-driver",
            allow_module_level=True,
        )

from selenium import webdriver  # noqa: E402
from selenium.webdriver import ActionChains, Keys  # noqa: E402
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402


@pytest.fixture(scope="module")
def browser():
    assert BROWSER, "DINO_VIT_BROWSER=required, but there is no chromium"
    assert DRIVER, "DINO_VIT_BROWSER=required, but there is no chromedriver"
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run and its report."""
    output = make_run(tmp_path_factory.mktemp("browser"))
    assert main(["report", str(output)]) == 0
    return output


@pytest.fixture
def page(browser, folder):
    show(browser, 1440)
    browser.get((folder / "report.html").as_uri())
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return report.explorer.thumbnails.complete"))
    yield browser
    assert browser.get_log("browser") == []


def show(browser, width, *, dark=False):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def where(browser, number):
    """Bring the map into sight; return where an image of it is in the window."""
    canvas = browser.find_element(By.CSS_SELECTOR, "#explorer canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    return browser.execute_script(
        "const box = report.explorer.canvas.getBoundingClientRect();"
        "const [x, y] = report.explorer.onScreen(arguments[0]); return [box.left + x, box.top + y]",
        number,
    )


def press_at(browser, x, y):
    mouse = ActionChains(browser, duration=0)
    mouse.w3c_actions.pointer_action.move_to_location(round(x), round(y))
    mouse.click().perform()


def text_of(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector).text


def test_curves_are_drawn_with_axes_levels_and_words(page):
    for name in ("loss", "entropies", "knn", "rank", "lr", "momentum", "std", "speed"):
        points = page.execute_script(
            "return document.querySelector(`#chart-${arguments[0]} polyline`).getAttribute('points')", name
        )
        xs = [float(point.split(",")[0]) for point in points.split()]
        assert len(xs) >= 2
        assert xs == sorted(xs)
        assert all(46 <= x <= 800 for x in xs)
        assert page.find_elements(By.CSS_SELECTOR, f"#chart-{name} .grid")
        assert page.find_element(By.CSS_SELECTOR, f"#chart-{name} svg").get_attribute("aria-label")
        assert text_of(page, f"#chart-{name} .words")
    assert "ln(256) 5.545" in text_of(page, "#chart-loss svg")
    assert "raw pixels" in text_of(page, "#chart-knn svg")


def test_names_of_levels_do_not_overlap(page):
    boxes = page.execute_script(
        "const knn = report.charts.knn; knn.update({...knn.data, levels: [16.9, 17.8, 17.2].map((value, n) =>"
        "({name: `level ${n}`, value}))}); return [...knn.svg.querySelectorAll('.name')].map((name) =>"
        "{ const box = name.getBoundingClientRect(); return [box.top, box.bottom]; })"
    )
    assert len(boxes) == 3
    for (_, bottom), (top, _) in pairwise(sorted(boxes)):
        assert top >= bottom - 3


def test_a_curve_tells_its_values_to_the_keyboard_and_as_a_table(page):
    drawing = page.find_element(By.CSS_SELECTOR, "#chart-loss svg")
    drawing.send_keys(Keys.HOME)
    values = dict(page.execute_script("return report.charts.loss.data.series[0].points"))
    assert text_of(page, "#chart-loss .reading").startswith("step 1: ")
    drawing.send_keys(Keys.END)
    said = text_of(page, "#chart-loss .reading")
    assert said.startswith("step 20: ")
    assert float(said.split()[-1]) == pytest.approx(values[20], rel=1e-3)
    page.execute_script("document.querySelector('#chart-loss details').open = true")
    WebDriverWait(page, 10).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#chart-loss table"))
    assert "20" in text_of(page, "#chart-loss table")


def test_a_click_on_a_point_shows_the_image_and_its_neighbours(page):
    page.execute_script("report.explorer.show('PCA')")
    page.execute_script("report.explorer.zoom(3)")
    number = page.execute_script("const e = report.explorer; return e.at(e.width / 2, e.height / 2) ?? 0")
    page.execute_script("const e = report.explorer; e.goTo(arguments[0]); e.choose(null)", number)
    assert "Choose an image" in text_of(page, ".chosen")
    press_at(page, *where(page, number))
    data = page.execute_script("return report.data.explorer")
    chosen = page.execute_script("return report.explorer.chosen")
    assert text_of(page, ".chosen h3") == data["names"][chosen]
    near = page.execute_script("return report.explorer.nearest(arguments[0])", chosen)
    buttons = page.find_elements(By.CSS_SELECTOR, ".chosen .near button")
    assert [button.get_attribute("title") for button in buttons] == [data["names"][n] for n in near]
    assert data["names"][near[0]] in page.find_element(
        By.CSS_SELECTOR, "#explorer [role=status]"
    ).get_attribute("textContent")
    for canvas in page.find_elements(By.CSS_SELECTOR, ".chosen canvas"):
        levels = page.execute_script(
            "const c = arguments[0]; return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
            ".data).size",
            canvas,
        )
        assert levels > 3, "a picture is empty"
    buttons[0].click()
    assert page.execute_script("return report.explorer.chosen") == near[0]


def test_the_map_obeys_the_keyboard(page):
    canvas = page.find_element(By.CSS_SELECTOR, "#explorer canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    first = page.execute_script("return report.explorer.chosen")
    assert first is not None
    x = where(page, first)[0]
    for key, axis, sign in ((Keys.ARROW_LEFT, 0, -1), (Keys.ARROW_RIGHT, 0, 1), (Keys.ARROW_UP, 1, -1)):
        before = page.execute_script("return report.explorer.chosen")
        canvas.send_keys(key)
        after = page.execute_script("return report.explorer.chosen")
        if after != before:
            assert sign * (where(page, after)[axis] - where(page, before)[axis]) > 0
    assert x
    scale = page.execute_script("return report.explorer.scale")
    canvas.send_keys("+")
    assert page.execute_script("return report.explorer.scale") > scale
    canvas.send_keys("0")
    assert page.execute_script("return report.explorer.scale") == 1
    canvas.send_keys(Keys.ESCAPE)
    assert page.execute_script("return report.explorer.chosen") is None


def test_the_map_follows_the_mouse(page):
    x, y = where(page, 0)
    mouse = ActionChains(page, duration=0)
    mouse.w3c_actions.pointer_action.move_to_location(round(x), round(y)).pointer_down()
    mouse.w3c_actions.pointer_action.move_to_location(round(x) + 60, round(y) - 40).pointer_up()
    mouse.perform()
    moved = where(page, 0)
    assert moved[0] - x == pytest.approx(60, abs=1.5)
    assert moved[1] - y == pytest.approx(-40, abs=1.5)
    assert page.execute_script("return report.explorer.chosen") is None, "a drag is no click"
    canvas = page.find_element(By.CSS_SELECTOR, "#explorer canvas")
    ActionChains(page).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -300).perform()
    assert page.execute_script("return report.explorer.scale") > 1


def test_colours_follow_the_choice_and_can_be_seen_alone(page):
    names = [button.text for button in page.find_elements(By.CSS_SELECTOR, ".classes button")]
    assert [name.split(" (")[0] for name in names[:3]] == ["bricks", "nets", "dots"] or len(names) == 4
    assert sum(int(name.rpartition("(")[2][:-1]) for name in names) == IMAGES
    where(page, 0)
    page.find_element(By.CSS_SELECTOR, ".classes button").click()
    assert page.find_element(By.CSS_SELECTOR, ".classes button").get_attribute("aria-pressed") == "true"
    assert page.execute_script("return report.explorer.only") is not None
    page.execute_script("report.explorer.colourBy('cluster')")
    assert text_of(page, ".classes button").startswith("prototype ")


def test_a_hostile_name_is_shown_as_a_name(page):
    data = page.execute_script("return report.data.explorer.names")
    page.execute_script("report.explorer.choose(arguments[0])", data.index(HOSTILE))
    assert text_of(page, ".chosen h3") == HOSTILE
    assert len(page.find_elements(By.TAG_NAME, "script")) == 2


MANY = """
const count = 5000, one = report.data.explorer, places = new Uint16Array(2 * count);
for (let n = 0; n < 2 * count; n++) places[n] = 65535 * Math.random();
const raw = new Uint8Array(places.buffer);
let text = "";
for (let n = 0; n < raw.length; n++) text += String.fromCharCode(raw[n]);
const spread = (values) => Array.from({length: count}, (_, n) => values[n % one.count]);
const size = one.attention.size[0] * one.attention.size[1];
const empty = (bytes) => btoa("\\0".repeat(bytes * count));
const made = {...one, count, names: spread(one.names), labels: spread(one.labels),
  clusters: spread(one.clusters), layouts: [{name: "many", places: btoa(text)}], neighbours: empty(2 * one.k),
  similarities: empty(2 * one.k), attention: {...one.attention, maps: empty(size)}};
document.getElementById("explorer").replaceChildren();
report.explorer = new Explorer(document.getElementById("explorer"), made);
"""

PAN = """
const done = arguments[arguments.length - 1], map = report.explorer, pen = map.canvas.getContext("2d");
const timed = (work) => {
  const began = performance.now();
  work();
  pen.getImageData(0, 0, 1, 1); // waits until all is painted
  return performance.now() - began;
};
const squares = () => {
  for (let n = 0; n < 5000; n++) {
    pen.fillStyle = n % 2 ? "#123456" : "#654321";
    pen.fillRect((n * 37) % 600, (n * 61) % 500, 4, 4);
  }
};
map.scale = arguments[0];
const frames = [], plain = [];
function step(count) {
  map.middle[0] += 0.001 / map.scale;
  plain.push(timed(squares));
  frames.push(timed(() => map.draw()));
  if (count) requestAnimationFrame(() => step(count - 1));
  else done([frames, plain]);
}
requestAnimationFrame(() => step(30));
"""


@pytest.mark.parametrize("scale", [1, 6])
def test_a_map_of_5000_images_moves_fluidly(page, scale):
    """A frame costs little more than as many plain squares do, which any machine draws fluidly."""
    page.execute_script(MANY)
    WebDriverWait(page, 30).until(
        lambda b: b.execute_script("return report.explorer.thumbnails.naturalWidth")
    )
    where(page, 0)
    frames, squares = map(statistics.median, page.execute_async_script(PAN, scale))
    print(f"zoom {scale}: {frames:.1f} ms a frame; 5000 plain squares {squares:.1f} ms")
    assert frames < 5 * squares + 5
    assert page.execute_script("return document.querySelectorAll('#explorer *').length") < 120
    assert all("getImageData" in entry["message"] for entry in page.get_log("browser"))  # of this test's own


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 900, 1440])
def test_the_page_fits_its_width_in_both_colours(page, width, dark):
    show(page, width, dark=dark)
    page.execute_script("report.explorer.choose(3)")
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


def test_a_live_page_shows_the_news(browser, folder, tmp_path):
    run = shutil.copytree(folder, tmp_path / "run")
    whole = (run / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:8]))
    live = Page(run, lambda record, found: Pictures(notes=["drawn"]))
    server = PageServer(live, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.execute_script("window.kept = true")
        assert "8 of 20 steps" in text_of(browser, "#run")
        (run / "metrics.jsonl").write_bytes(whole)
        live.draw_if_new()
        WebDriverWait(browser, 30).until(lambda b: "20 of 20 steps" in text_of(b, "#run"))
        points = browser.execute_script("return report.charts.loss.data.series[0].points.length")
        assert points == len(lines)
        assert browser.execute_script("return window.kept"), "the page was loaded anew"
        button = browser.find_element(By.CSS_SELECTOR, "#news button")
        assert "Pictures of step 20 are ready" in text_of(browser, "#news")
        button.click()
        WebDriverWait(browser, 30).until(lambda b: "drawn" in text_of(b, ".top"))
        assert json.loads(browser.execute_script("return document.getElementById('data').textContent"))[
            "live"
        ]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert browser.get_log("browser") == []
    WebDriverWait(browser, 30).until(lambda b: "does not answer" in text_of(b, "#news"))
