"""Images of two colours with awkward names, and the page to label images by, driven by keys."""

import csv
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import dino_vit
from dino_vit.core.text import printable
from tests.support.browser import set_screen

AWKWARD = [
    "plain.png",
    "with space .png",
    ' leading space "and quotes".png',
    "comma, semicolon; tab\there.png",
    "line\nbreak.png",
    "carriage\r\nreturn.png",
    "<script>alert(1)</script>.png",
    "</script><!--.png",
    "שלום עולם.png",
    "مرحبا\u202egnp.png",
    "=1+1.png",
    "ümläut café.png",
    "日本.png",
    "back\\slash.png",
    "'single'.png",
    "per%20cent & ampersand.png",
    "sub folder,/a \"b\".png",
    "\ufeffbom.png",
    "emoji 🍏.png",
    "#hash?.png",
]  # fmt: skip
NAMES = [*AWKWARD, *(f"IMG_{number:04}.png" for number in range(60))]


def write_images(folder: Path) -> dict[str, str]:
    """Write red and blue images, each a little different; return the colour by the name that is shown."""
    colours = {}
    for number, name in enumerate(NAMES):
        red = number % 3 > 0
        pixels = np.full((24, 32, 3), (200, 30, 30) if red else (30, 30, 200), np.uint8)
        pixels[:, number % 32] = 255 - number
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        colours[printable(name)] = "red" if red else "blue"
    return colours


class LabelPage:
    """The page in a browser, driven by keys, and what its user sees on it, who knows the truth."""

    def __init__(self, browser, photos, truth, folder):
        self.browser, self.photos, self.truth, self.folder = browser, photos, truth, folder
        command = {"downloadPath": str(folder), "behavior": "allow"}
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", command)

    @classmethod
    @contextmanager
    def opened(cls, browser, photos, truth, folder):
        page = cls(browser, photos, truth, folder)
        yield page
        assert browser.get_log("browser") == []
        browser.execute_script("localStorage.clear(); page.answers.changed = false")
        browser.get("about:blank")

    def open(self, weights="pixels", **settings):
        page = self.folder / "label.html"
        dino_vit.label(self.photos, weights, output=page, overwrite=True, verbose=False, **settings)
        set_screen(self.browser, 1280)
        self.browser.get(page.as_uri())

    def press(self, *keys):
        ActionChains(self.browser, duration=0).send_keys(*keys).perform()

    def press_with(self, held, key):
        ActionChains(self.browser).key_down(held).send_keys(key).key_up(held).perform()

    def show(self, view):
        """Go to a view by the keyboard."""
        self.browser.find_element(By.XPATH, f"//nav/button[text()='{view}']").send_keys(Keys.ENTER)

    def ask(self, script, *arguments):
        return self.browser.execute_script(f"return {script}", *arguments)

    def wait_for(self, script, value):
        """Wait until a script returns a value: a browser tells other tabs when it can."""
        WebDriverWait(self.browser, 60).until(lambda _: self.ask(script) == value)

    @property
    def name(self):
        """The image that is shown, as its photo tells."""
        return self.browser.find_element(By.CSS_SELECTOR, ".subject img").get_attribute("alt")

    @property
    def thing(self):
        return self.truth[self.name]

    def write(self, label):
        """Give a label by its key, or write it."""
        key = self.ask("page.answers.keys().get(arguments[0])", label)
        self.press(*(key or [*label, Keys.ENTER]))

    def label(self, count):
        """Label images as they are."""
        names = []
        for _ in range(count):
            names.append(self.name)
            self.write(self.thing)
        return names

    def correct(self, count):
        """Correct some wrong guesses, label by label, the least sure first; confirm the others."""
        corrected = []
        for label in self.ask("page.answers.toCheck().map(([label]) => label)"):
            self.show("Check guesses")
            xpath = f"//*[@class='labels']/button[b/text()='{label}']"
            self.browser.find_element(By.XPATH, xpath).send_keys(Keys.ENTER)
            while True:
                shown = self.ask("page.view.shown.map((n) => data.names[n])")
                wrong = [self.truth[name] for name in shown if self.truth[name] != label]
                if not wrong or len(corrected) >= count:
                    break
                marked = [name for name in shown if self.truth[name] == wrong[0]]
                keys = ([Keys.ARROW_RIGHT, *[Keys.SPACE] * (name in marked)] for name in shown)
                self.press(*chain.from_iterable(keys))
                self.write(wrong[0])
                corrected += marked
            if len(corrected) >= count:
                break
            self.press(Keys.ARROW_RIGHT, Keys.ENTER)
        return corrected

    def save(self, name):
        """Save by the keyboard, and return the rows of the file."""
        self.press_with(Keys.CONTROL, "s")
        path = self.folder / name
        WebDriverWait(self.browser, 20).until(lambda _: path.exists() and path.stat().st_size)
        with path.open(encoding="utf-8-sig", newline="") as file:
            return {name: (label, origin) for name, label, origin in [*csv.reader(file)][1:]}
