"""Slips on the page to label by: a click or a key too many, and a page that is written anew."""

import csv

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.browser import set_screen


@pytest.fixture
def guessed(page):
    """The page with guesses: all photos are red."""
    with (page.folder / "rest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("name", "label"), *((name, "red") for name in page.truth)])
    page.open(guesses=page.folder / "rest.csv")
    return page


def find_button(page, text):
    return page.browser.find_element(By.XPATH, f"//*[@id='view']//button[contains(., '{text}')]")


def double_click(page, text):
    """Click twice, as the browser counts it, however long the page takes in between."""
    rect = find_button(page, text).rect
    left, top = page.ask("[scrollX, scrollY]")
    mouse = {"x": rect["x"] + 5 - left, "y": rect["y"] + 5 - top, "button": "left"}
    for count in (1, 2):
        for event in ("mousePressed", "mouseReleased"):
            page.browser.execute_cdp_cmd(
                "Input.dispatchMouseEvent", {**mouse, "type": event, "clickCount": count}
            )


ANSWERED = "page.answers.rows.length"


def test_a_double_click_confirms_only_what_was_shown(guessed):
    double_click(guessed, "red")
    assert guessed.ask("page.view.title") == "red?"
    assert guessed.ask(ANSWERED) == 0
    assert guessed.ask("page.view.marked.size") == 0
    guessed.browser.execute_script("scrollTo(0, 200)")
    double_click(guessed, "All are right: 48")
    assert guessed.ask(ANSWERED) == 48
    assert guessed.ask("scrollY") == 0
    double_click(guessed, "All are right: 16")
    assert guessed.ask(ANSWERED) == 64, "neither undone"


def test_enter_confirms_only_once_a_photo_was_gone_to(guessed):
    guessed.browser.find_element(By.CSS_SELECTOR, ".class").send_keys(Keys.ENTER, Keys.ENTER)
    guessed.press(Keys.ENTER)
    assert guessed.ask(ANSWERED) == 0
    guessed.press(Keys.ARROW_RIGHT, Keys.ENTER, Keys.ENTER, Keys.ENTER)
    assert guessed.ask(ANSWERED) == 48
    find_button(guessed, "All are right").send_keys(Keys.ENTER)
    guessed.press(Keys.ENTER)
    assert guessed.ask(ANSWERED) == 64


def test_a_row_is_looked_through_before_its_name_is_its_label(page):
    page.open()
    page.browser.find_element(By.CSS_SELECTOR, ".row input").send_keys("red")
    double_click(page, "Name")
    assert page.ask("page.view.title") == "red?"
    page.press(Keys.ENTER, Keys.ENTER)
    assert page.ask(ANSWERED) == 0


def test_a_double_click_labels_one_photo_and_undo_may_be_clicked_fast(page):
    page.open()
    page.show("Label")
    page.label(3)
    double_click(page, "red")
    assert page.ask(ANSWERED) == 4
    double_click(page, "Undo")
    assert page.ask(ANSWERED) == 2


def test_on_a_phone_the_photos_come_before_the_button_that_confirms_them(guessed):
    set_screen(guessed.browser, 400)
    find_button(guessed, "red").click()
    below = "document.querySelector('.tools').getBoundingClientRect().top"
    lowest = "[...document.querySelectorAll('.grid img')].at(-1).getBoundingClientRect().bottom"
    assert guessed.ask(f"{below} > {lowest}")
    guessed.browser.find_element(By.CSS_SELECTOR, ".grid .tile").click()
    assert guessed.ask(f"{below} > {lowest}")
    assert guessed.ask("document.querySelector('.side input').getBoundingClientRect().bottom < innerHeight")
    guessed.browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    find_button(guessed, "The others are right: 47").click()
    assert guessed.ask("scrollY") == 0
