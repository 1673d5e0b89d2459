"""The map in a real browser."""

import statistics

import pytest

from tests.support.browser import text_of
from tests.support.reports import HOSTILE, IMAGES

pytest.importorskip("selenium")

from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


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


def test_a_click_on_a_point_shows_the_image_and_its_neighbours(page):
    page.execute_script("report.explorer.show('PCA')")
    page.execute_script("report.explorer.zoom(3)")
    number = page.execute_script("const e = report.explorer; return e.at(e.width / 2, e.height / 2) ?? 0")
    page.execute_script("const e = report.explorer; e.goTo(arguments[0]); e.select(null)", number)
    assert "Select an image" in text_of(page, ".selection")
    press_at(page, *where(page, number))
    data = page.execute_script("return report.data.explorer")
    chosen = page.execute_script("return report.explorer.selected")
    assert text_of(page, ".selection h3") == data["names"][chosen]
    near = page.execute_script("return report.explorer.nearest(arguments[0])", chosen)
    buttons = page.find_elements(By.CSS_SELECTOR, ".selection .near button")
    assert [button.get_attribute("title") for button in buttons] == [data["names"][n] for n in near]
    assert data["names"][near[0]] in page.find_element(
        By.CSS_SELECTOR, "#explorer [role=status]"
    ).get_attribute("textContent")
    labels = [data["labels"][n] for n in near]
    assert [button.find_element(By.TAG_NAME, "span").text for button in buttons] == [
        data["classes"][label] for label in labels
    ]
    for canvas in page.find_elements(By.CSS_SELECTOR, ".selection canvas"):
        levels = page.execute_script(
            "const c = arguments[0]; return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
            ".data).size",
            canvas,
        )
        assert levels > 3, "a picture is empty"
    buttons[0].click()
    assert page.execute_script("return report.explorer.selected") == near[0]


def test_the_map_follows_the_keyboard(page):
    canvas = page.find_element(By.CSS_SELECTOR, "#explorer canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    first = page.execute_script("return report.explorer.selected")
    assert first is not None
    x = where(page, first)[0]
    for key, axis, sign in ((Keys.ARROW_LEFT, 0, -1), (Keys.ARROW_RIGHT, 0, 1), (Keys.ARROW_UP, 1, -1)):
        before = page.execute_script("return report.explorer.selected")
        canvas.send_keys(key)
        after = page.execute_script("return report.explorer.selected")
        if after != before:
            assert sign * (where(page, after)[axis] - where(page, before)[axis]) > 0
    assert x
    scale = page.execute_script("return report.explorer.scale")
    canvas.send_keys("+")
    assert page.execute_script("return report.explorer.scale") > scale
    canvas.send_keys("0")
    assert page.execute_script("return report.explorer.scale") == 1
    canvas.send_keys(Keys.ESCAPE)
    assert page.execute_script("return report.explorer.selected") is None


def test_the_map_follows_the_mouse(page):
    x, y = where(page, 0)
    mouse = ActionChains(page, duration=0)
    mouse.w3c_actions.pointer_action.move_to_location(round(x), round(y)).pointer_down()
    mouse.w3c_actions.pointer_action.move_to_location(round(x) + 60, round(y) - 40).pointer_up()
    mouse.perform()
    moved = where(page, 0)
    assert moved[0] - x == pytest.approx(60, abs=1.5)
    assert moved[1] - y == pytest.approx(-40, abs=1.5)
    assert page.execute_script("return report.explorer.selected") is None, "a drag is no click"
    canvas = page.find_element(By.CSS_SELECTOR, "#explorer canvas")
    ActionChains(page).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -300).perform()
    assert page.execute_script("return report.explorer.scale") > 1


def test_colours_follow_the_choice_and_can_be_highlighted(page):
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
    page.execute_script("report.explorer.select(arguments[0])", data.index(HOSTILE))
    assert text_of(page, ".selection h3") == HOSTILE
    assert len(page.find_elements(By.TAG_NAME, "script")) == 2


MANY = """
const count = 5000, one = report.data.explorer, positions = new Uint16Array(2 * count);
for (let n = 0; n < 2 * count; n++) positions[n] = 65535 * Math.random();
const raw = new Uint8Array(positions.buffer);
let text = "";
for (let n = 0; n < raw.length; n++) text += String.fromCharCode(raw[n]);
const spread = (values) => Array.from({length: count}, (_, n) => values[n % one.count]);
const size = one.attention.size[0] * one.attention.size[1];
const empty = (bytes) => btoa("\\0".repeat(bytes * count));
const made = {...one, count, names: spread(one.names), labels: spread(one.labels),
  clusters: spread(one.clusters), layouts: [{name: "many", positions: btoa(text)}],
  neighbours: empty(2 * one.k), similarities: empty(4 * one.k),
  attention: {...one.attention, maps: empty(size)}};
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
