"""The page to label by in a real browser: by keys alone, and its table read back."""

import csv
from itertools import pairwise

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from dino_vit.data.label_files import read_table
from dino_vit.data.labels import NO_LABEL
from dino_vit.data.open import open_source
from dino_vit.eval.statistics import wilson_interval
from tests.support.browser import set_screen, text_of
from tests.support.labelling import NAMES

VIEWS = "Overview", "Label", "Check by chance"  # without guesses


def test_every_image_is_labelled_by_keys_and_its_name_comes_back(page):
    page.open()
    page.show("Label")
    page.press(*f"  {page.thing}x", Keys.BACKSPACE, Keys.ENTER)
    page.label(len(NAMES) - 1)
    assert "All are done" in text_of(page.browser, ".lead")
    table = page.save("few.csv")
    assert {name: label for name, (label, _) in table.items()} == page.truth
    assert {origin for _, origin in table.values()} == {"random", "chosen"}
    path = str(page.folder / "few.csv")
    source = open_source(str(page.photos), path)
    read = {source.name(n): source.labels.names_of(code)[0] for n, code in enumerate(source.codes())}
    assert read == page.truth
    assert {name: (row.label, row.origin) for name, row in read_table(path, False).items()} == table


def test_labels_alike_are_one_and_undoing_goes_back(page):
    page.open()
    page.show("Label")
    first = page.name
    page.press(*"Red Apple", Keys.ENTER)
    page.press(*"  rED   apple ", Keys.ENTER)
    page.press(*"red a", Keys.TAB, Keys.ENTER)
    third = page.ask("page.answers.actions.length")
    assert third == 3
    assert page.ask("page.answers.inUse") == ["Red Apple"]
    page.press(*"7", Keys.ENTER)
    assert page.ask("[...page.answers.keys()]") == [["7", "7"], ["Red Apple", "1"]], "7 is the key of 7"
    page.press("?")
    page.press("-")
    assert page.ask("page.answers.actions.map((it) => it.label)")[3:] == ["7", None, "none of these"]
    for _ in range(5):
        page.press(Keys.BACKSPACE)
    page.press_with(Keys.CONTROL, "z")
    assert page.name == first
    assert page.ask("page.answers.actions") == []
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.ask("page.view.place") == 1
    page.press(Keys.BACKSPACE)
    assert page.ask("page.answers.answers.filter(Boolean)") == []


def test_what_tables_have_for_no_label_is_not_taken_for_one(page):
    page.open()
    page.show("Label")
    for word in NO_LABEL:
        page.press("x", Keys.BACKSPACE, *word.upper(), Keys.ENTER)
        assert page.ask("page.answers.actions.length") == 0
        assert "write another word" in text_of(page.browser, ".labels")
        page.press(Keys.ESCAPE)


def test_a_key_that_is_held_down_labels_one_image(page):
    page.open()
    page.show("Label")
    page.press(*"red", Keys.ENTER)
    for repeat in (False, True, True):
        event = f"new KeyboardEvent('keydown', {{ key: '1', repeat: {str(repeat).lower()}, bubbles: true }})"
        page.browser.execute_script(f"document.body.dispatchEvent({event})")
    assert page.ask("page.answers.actions.length") == 2


def test_ticked_neighbours_get_the_same_label_and_are_a_group(page):
    page.open()
    page.show("Label")
    name, boxes = page.name, page.browser.find_elements(By.CSS_SELECTOR, ".beside input")
    kept = page.ask("data.sample.map((n) => data.names[n])")
    ticked = [box.get_attribute("aria-label") for box in boxes[:2]]
    assert not {*kept} & {box.get_attribute("aria-label") for box in boxes}
    for box in boxes[:2]:
        box.send_keys(Keys.SPACE)
    page.press(*"thing", Keys.ENTER)
    page.press("1")
    table = page.save("few.csv")
    assert {name: row for name, row in table.items() if row[1] == "group:1"} == dict.fromkeys(
        [name, *ticked], ("thing", "group:1")
    )
    assert len(table) == 4


def test_an_image_met_elsewhere_is_random_only_once_all_before_it_are_labelled(page):
    page.open()
    origins = "data.sample.map((n) => page.answers.answers[n]?.origin)"
    for place, expected in (
        (2, [None, None, "chosen"]),
        (0, ["random", None, "chosen"]),
        (1, ["random"] * 3),
    ):
        page.browser.execute_script(f"page.answers.act('label', [data.sample[{place}]], 'red')")
        assert page.ask(origins)[:3] == expected
    assert page.ask("data.sample.some((n) => page.answers.isOpen(n))") is False


def test_a_row_that_is_named_is_looked_through(page):
    page.open()
    kept = page.ask("data.clusters[0].images.filter((n) => page.answers.isKept(n)).length")
    size = page.ask("data.clusters[0].size")
    assert text_of(page.browser, ".row .caption") == f"{size} images ({kept} kept for the check)"
    field = page.browser.find_element(By.CSS_SELECTOR, ".row input")
    field.send_keys("red", Keys.ENTER)
    assert text_of(page.browser, "#view h2") == "red?"
    shown = [tile.get_attribute("alt") for tile in page.browser.find_elements(By.CSS_SELECTOR, ".grid img")]
    assert len(shown) == size - kept > 1
    assert text_of(page.browser, "nav [aria-pressed=true]") == "Overview"
    assert not {*shown} & {*page.ask("data.sample.map((n) => data.names[n])")}
    page.press(Keys.ARROW_RIGHT, Keys.SPACE)
    page.press(*"odd", Keys.ENTER)
    page.press(Keys.ARROW_RIGHT, Keys.ENTER)
    table = page.save("few.csv")
    assert table.pop(shown[0]) == ("odd", "corrected")
    assert table == dict.fromkeys(shown[1:], ("red", "group:1"))


def test_a_grid_is_done_before_others_come_and_what_is_undone_comes_back(page):
    page.open()
    grid = "page.open(new Grid(page, [...data.names.keys()], { title: 'all', back: () => {} }))"
    page.browser.execute_script(grid)
    shown = page.ask("page.view.shown")
    assert len(shown) == 48
    page.press(Keys.ARROW_RIGHT, Keys.SPACE, *"red", Keys.ENTER)
    assert page.ask("page.view.shown") == shown[1:]
    page.browser.execute_script("page.view.shown.slice(1).forEach((n) => page.view.marked.add(n))")
    page.press(Keys.ARROW_RIGHT, Keys.SPACE, "1")
    others = page.ask("page.view.shown")
    assert len(others) == len(NAMES) - page.ask("data.sample.length") - 48
    page.press(Keys.BACKSPACE)
    assert page.ask("page.view.shown")[:47] == shown[1:]


def test_guesses_are_checked_by_label_and_one_by_one_and_by_chance(page):
    colours = list(page.truth.items())
    wrong = {name for name, _ in colours[30:38]}
    given = colours[50:]
    few, rest = page.folder / "few-4.csv", page.folder / "rest.csv"
    with few.open("w") as file:
        rows = [*given, ("gone.png", "red")]
        csv.writer(file).writerows([("name", "label", "origin"), *((*row, "group:7") for row in rows)])
    guesses = [(name, colour if name not in wrong else "blue", 0.5) for name, colour in colours[:50]]
    with rest.open("w", newline="") as file:
        csv.writer(file).writerows([("name", "label", "confidence"), *guesses])
    page.open(labels=few, guesses=rest)
    assert text_of(page.browser, ".count") == f"{len(given) + 1} labelled", "also what is not shown"
    assert "blue" in text_of(page.browser, "#view .labels")
    page.browser.find_element(By.XPATH, "//b[text()='blue']/..").send_keys(Keys.ENTER)
    tiles = page.browser.find_elements(By.CSS_SELECTOR, ".grid .tile img")
    blue = [tile.get_attribute("alt") for tile in tiles]
    for tile, name in zip(tiles, blue, strict=True):
        if page.truth[name] == "red":
            tile.find_element(By.XPATH, "..").send_keys(Keys.SPACE)
    page.press(page.ask("page.answers.keys().get('red')"))
    page.press(Keys.ARROW_RIGHT, Keys.ENTER)
    assert page.ask("page.answers.toCheck().map(([label]) => label)") == ["red"]
    captions = [it.text for it in page.browser.find_elements(By.CSS_SELECTOR, ".grid span")]
    assert captions == [page.truth[name] for name in blue], "what was decided is in sight"
    page.show("Check guesses")
    left = page.ask("page.answers.toCheck()[0][1].length")
    assert f"{left} guesses to look through. 10 more are kept for Check by chance" in text_of(
        page.browser, ".lead"
    )
    assert f"✓ {len(blue)} looked at" in text_of(page.browser, "#view .labels")
    page.show("Check by chance")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.ask("page.view.place") == 0, "none of the random ones is skipped"
    sample = page.label(page.ask("data.sample.length"))
    assert len(sample) == 10
    right = sum(name not in wrong or page.truth[name] == "blue" for name in sample)
    low, high = (round(100 * bound) for bound in wilson_interval(right / 10, 10))
    sentence = f"{right} of 10 random images are guessed right ({low} to {high} %)"
    assert text_of(page.browser, ".learned") == sentence
    view = text_of(page.browser, "#view")
    assert f"Expect {100 - high} to {100 - low} wrong ones among 100 guesses before your corrections." in view
    assert "with fewer than 10 random images: too few to say" in view
    assert "Good enough? Then predict once more" in view
    assert f"output={rest} overwrite=true labels=few-5.csv" in view
    name = page.ask("data.names[page.answers.toCheck()[0][1][0]]")
    page.browser.execute_script("page.answers.act('label', [page.answers.toCheck()[0][1][0]], 'RED')")
    table = page.save("few-5.csv")
    assert table[name] == ("red", "checked"), "the same as its guess"
    assert table.pop("gone.png") == ("red", "group:7")
    assert {name: label for name, (label, _) in table.items()}.items() <= page.truth.items()
    origins = {name: origin for name, (_, origin) in table.items()}
    assert {origins[name] for name, _ in given} == {"group:7"}
    assert {origins[name] for name in sample} == {"random"}
    for name in blue:
        assert origins[name] == ("corrected" if page.truth[name] == "red" else "checked")


def test_what_was_done_is_kept_and_files_are_numbered(page):
    page.open()
    page.show("Label")
    page.press(*"red", Keys.ENTER)
    assert page.ask("page.answers.changed")
    page.browser.get("about:blank")
    page.browser.get((page.folder / "label.html").as_uri())
    assert text_of(page.browser, ".count") == "1 labelled, not saved yet"
    assert len(page.save("few.csv")) == 1
    assert text_of(page.browser, ".count") == "1 labelled, saved"
    said = text_of(page.browser, ".saved")
    assert "output=rest.csv labels=few.csv" in said, "there is none to be replaced yet"
    assert "label 50 or more images in Check by chance" in said
    assert not page.ask("page.answers.changed")
    page.show("Label")
    page.press("1")
    assert text_of(page.browser, ".count") == "2 labelled, not saved yet"
    assert text_of(page.browser, ".saved") == "", "true no longer"
    assert len(page.save("few-1.csv")) == 2
    closes = "dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    assert page.ask(closes)
    page.press("1")
    assert not page.ask(closes), "the browser asks"


def test_what_is_labelled_in_another_tab_is_not_lost(page):
    page.open()
    page.show("Label")
    page.label(2)
    first, address = page.browser.current_window_handle, page.browser.current_url
    page.browser.switch_to.new_window("tab")
    page.browser.get(address)
    page.show("Label")
    page.label(2)
    page.browser.execute_script("page.answers.changed = false")
    page.browser.close()
    page.browser.switch_to.window(first)
    page.wait_for("document.querySelector('.count').textContent", "4 labelled, not saved yet")
    page.label(1)
    assert len(page.save("few.csv")) == 5


def test_a_key_is_of_the_same_label_on_the_next_page(page):
    page.open()
    page.show("Label")
    page.press(*"pear", Keys.ENTER, *"fig", Keys.ENTER, "2", "2", *"apple", Keys.ENTER)
    keys = page.ask("[...page.answers.keys()]")
    assert keys == [["pear", "1"], ["fig", "2"], ["apple", "3"]]
    page.save("few.csv")
    page.open(labels=page.folder / "few.csv")
    assert page.ask("[...page.answers.keys()]") == keys


def test_an_image_that_was_not_sure_is_remembered_and_comes_last(page):
    page.open()
    page.show("Label")
    name = page.name
    page.press("?")
    page.press(*f"{page.thing}", Keys.ENTER)
    table = page.save("few.csv")
    assert table[name] == ("", "unsure")
    assert text_of(page.browser, ".count") == "1 labelled, saved"
    source = open_source(str(page.photos), str(page.folder / "few.csv"))
    assert sum(code >= 0 for code in source.codes().tolist()) == 1
    page.open(labels=page.folder / "few.csv")
    page.show("Label")
    names = page.label(len(NAMES) - 2)
    assert name not in names
    assert page.name == name, "after all others"
    assert "All are done, but you were not sure of 1." in text_of(page.browser, "#view")
    assert page.save("few-1.csv")[name] == ("", "unsure")
    page.press(*f"{page.thing}", Keys.ENTER)
    table = page.save("few-2.csv")
    assert table[name] == (page.truth[name], "chosen")


def test_keys_are_shown_where_there_is_a_keyboard(page):
    page.open()
    page.show("Label")
    shown = "getComputedStyle(document.querySelector('#view kbd')).display !== 'none'"
    assert page.ask(shown)
    touch = "Emulation.setTouchEmulationEnabled"
    page.browser.execute_cdp_cmd(touch, {"enabled": True, "maxTouchPoints": 5})
    assert not page.ask(shown), "however wide"
    page.browser.execute_cdp_cmd(touch, {"enabled": False})


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_views_fit_their_width_and_everything_has_a_name(page, width, dark):
    page.open()
    set_screen(page.browser, width, dark=dark)
    page.show("Label")
    page.press(*"a_long_label_without_a_gap_" * 3, Keys.ENTER)
    page.press(*"a long label with gaps " * 5, Keys.ENTER, Keys.ARROW_LEFT)
    assert text_of(page.browser, ".heading h2").startswith("a long label with gaps")
    assert page.ask("document.documentElement.scrollWidth") <= width
    for view in VIEWS:
        page.show(view)
        assert page.ask("document.documentElement.scrollWidth") <= width
        levels = page.ask("[...document.querySelectorAll('h1, h2, h3')].map((it) => Number(it.tagName[1]))")
        assert all(after - before <= 1 for before, after in pairwise(levels))
        nameless = (
            "[...document.querySelectorAll('img, button, input')].filter((it) =>"
            "!(it.alt || it.textContent.trim() || it.ariaLabel || it.querySelector?.('img[alt]')))"
        )
        assert page.ask(f"{nameless}.map((it) => it.outerHTML)") == []
    if width == 400:
        page.show("Label")
        page.browser.find_element(By.CSS_SELECTOR, ".labels button").click()
        assert page.ask("page.answers.actions.length") == 3


def test_buttons_stay_in_sight_below_many_labels(page):
    page.open()
    page.ask("data.queue.slice(0, 60).forEach((n) => page.answers.act('label', [n], `a longer label ${n}`))")
    for width in (400, 1280):
        set_screen(page.browser, width)
        page.show("Label")
        sides = [
            page.ask(f"document.querySelector('.one {each}').getBoundingClientRect().toJSON()")
            for each in (".labels", ".tools")
        ]
        assert sides[0]["bottom"] - sides[0]["top"] < 400
        assert sides[0]["bottom"] <= sides[1]["top"]


def test_saving_shows_what_is_to_be_done_next(page):
    page.open()
    page.show("Label")
    page.label(1)
    page.show("Overview")
    page.browser.execute_script("scrollTo(0, 400)")
    assert page.ask("scrollY") == 400
    page.save("few.csv")
    assert page.ask("document.querySelector('.saved').getBoundingClientRect().top") > 0
