"""Chromium without a window, for tests of the page; without Chromium they are skipped."""

import os
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def open_browser():
    """Return a browser; DINO_VIT_BROWSER=required fails the test where there is none."""
    browser, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if os.environ.get("DINO_VIT_BROWSER") == "required":
        assert browser, "DINO_VIT_BROWSER=required, but there is no chromium"
        assert driver, "DINO_VIT_BROWSER=required, but there is no chromedriver"
    elif not (browser and driver):
        pytest.skip("no chromium or no chromedriver; on Debian: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    opened.set_script_timeout(60)
    return opened


def set_screen(browser, width, *, dark=False):
    """Set the width of the window and the colours that the user prefers, without animations."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    preferences = {
        "prefers-color-scheme": "dark" if dark else "light",
        "prefers-reduced-motion": "reduce",  # what is clicked must not move
    }
    features = [{"name": name, "value": value} for name, value in preferences.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def text_of(browser, selector):
    """Return the visible text of the first element of a CSS selector."""
    return browser.find_element("css selector", selector).text
