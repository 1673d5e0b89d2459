"""Mistakes of hand on the page to label by: a click or a key too many, a page written over."""

import csv

import pytest
from PIL import Image
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
    is_shown = "document.querySelector('.side kbd').checkVisibility()"
    assert not guessed.ask(is_shown), "it does nothing yet"
    guessed.press(Keys.ARROW_RIGHT)
    assert guessed.ask(is_shown)
    guessed.press(Keys.ENTER, Keys.ENTER, Keys.ENTER)
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


def count(page):
    return page.ask("document.querySelector('.count').textContent")


def note(page):
    return page.ask("document.querySelector('.saved').textContent")


def give(page, first, last, label):
    """Label some of the images, in the order of their names, as a group."""
    numbers = "[...data.names.keys()].sort((one, other) => data.names[one] < data.names[other] ? -1 : 1)"
    act = f"page.answers.act('label', {numbers}.slice({first}, {last}), '{label}', true); page.draw()"
    page.browser.execute_script(act)
    page.press(Keys.ARROW_RIGHT)  # Chromium does not let a page that nobody has used ask before it closes


def test_labels_that_were_not_saved_come_to_the_next_page_of_the_images(page):
    page.open()
    give(page, 0, 4, "red")
    page.open(seed=3)
    assert count(page) == "4 labelled, not saved yet"
    assert note(page) == "4 labels that were not saved yet are back. ⌫Undo"
    few = page.save("few.csv")
    assert {*few.values()} == {("red", "group:1")}
    give(page, 10, 12, "blue")
    page.open(labels=page.folder / "few.csv")
    assert count(page) == "6 labelled, not saved yet"
    page.press(Keys.ARROW_RIGHT)
    page.browser.refresh()
    assert count(page) == "6 labelled, not saved yet", "once"
    table = page.save("few-1.csv")
    assert table.items() >= few.items()
    assert {*table.values()} == {("red", "group:1"), ("blue", "group:3")}, (
        "of another group than those before"
    )


def test_labels_that_are_back_can_be_undone_and_are_gone(page):
    page.open()
    give(page, 0, 3, "red")
    page.open(seed=3)
    page.browser.find_element(By.CSS_SELECTOR, ".saved button").click()
    assert (count(page), note(page)) == ("0 labelled, not saved yet", "")
    page.open(seed=4)
    assert count(page) == "0 labelled"


def test_a_table_that_was_changed_after_it_was_saved_is_what_counts(page):
    page.open()
    give(page, 0, 4, "red")
    few = page.save("few.csv")
    edited = [(name, "blue") for name in few]
    with (page.folder / "few.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("name", "label"), *edited])
    give(page, 5, 6, "red")
    page.browser.execute_script("page.undo()")
    page.open(labels=page.folder / "few.csv")
    assert count(page) == "4 labelled"
    assert {label for label, _ in page.save("few-1.csv").values()} == {"blue"}


def test_a_guess_that_was_accepted_stays_what_it_was(guessed):
    guessed.browser.execute_script("page.check('red'); page.view.accept()")
    guessed.press(Keys.ARROW_RIGHT)
    with (guessed.folder / "rest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("name", "label"), *((name, "blue") for name in guessed.truth)])
    guessed.open(guesses=guessed.folder / "rest.csv")
    assert count(guessed) == "48 labelled, not saved yet"
    assert {*guessed.save("few.csv").values()} == {("red", "checked")}


def test_other_photos_of_the_same_names_get_no_labels_and_added_ones_are_no_harm(page, tmp_path):
    for folder in ("one", "two"):
        for number in range(20):
            path = tmp_path / folder / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (9, 9), (number, 0, 200 if folder == "one" else 0)).save(path)
    page.photos = tmp_path / "one"
    page.open()
    give(page, 0, 3, "red")
    page.photos = tmp_path / "two"
    page.open()
    assert count(page) == "0 labelled"
    Image.new("RGB", (9, 9)).save(tmp_path / "one" / "new.png")
    page.photos = tmp_path / "one"
    page.open()
    assert count(page) == "3 labelled, not saved yet"


def test_enter_takes_the_only_label_that_begins_so_and_says_so(page):
    page.open()
    page.show("Label")
    page.press(*"Daisy", Keys.ENTER)
    page.press(*"dai")
    hints = "[...document.querySelectorAll('.labels button')].map((it) => it.textContent)"
    assert page.ask(hints) == ["EnterDaisy", "Shift Enternew: dai"]
    page.press(Keys.ENTER)
    assert page.ask("page.answers.inUse") == ["Daisy"]
    page.press(*"dai")
    page.press_with(Keys.SHIFT, Keys.ENTER)
    assert page.ask("page.answers.inUse") == ["Daisy", "dai"]
    page.press(*"da")
    page.press(Keys.ENTER)
    assert page.ask(hints) == ["TabDaisy", "dai", "Shift Enternew: da"], "which, nobody can say"
    page.press("i")
    assert page.ask(hints) == ["Daisy", "Enterdai"], "as it is written"
    page.press("x", Keys.ENTER)
    assert page.ask("page.answers.inUse") == ["Daisy", "dai", "daix"]
    assert page.ask("page.answers.actions.map((it) => it.label)") == ["Daisy", "Daisy", "dai", "daix"]


def test_a_digit_in_an_empty_field_chooses(page):
    page.open()
    page.show("Label")
    page.press(*"red", Keys.ENTER, *"x", Keys.BACKSPACE, "1")
    assert page.ask("page.answers.actions.map((it) => it.label)") == ["red", "red"]
    page.press(*"x", Keys.BACKSPACE, *"7", Keys.ENTER)
    assert page.ask("page.answers.inUse") == ["red", "7"], "one that is in use for none begins a label"
