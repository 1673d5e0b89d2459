import logging
import os
import re

import pytest

from dino_vit.core import text
from dino_vit.core.text import brief, did_you_mean, printable, printable_lines


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain \xc3\xa9 \xe6\x97\xa5 \\n.png", "plain é 日 \\n.png"),
        (b"\xff\xe9.png", r"\xff\xe9.png"),
        (b"a\nb\r\t\x1b[31m\x07\x7f", r"a\nb\r\t\x1b[31m\x07\x7f"),
        (b"\xc2\x9b31m \xc2\x85 \xe2\x80\xa8", r"\x9b31m \x85 \u2028"),
    ],
)
def test_only_what_cannot_be_shown_or_written_is_escaped(raw, shown):
    assert printable(os.fsdecode(raw)) == printable(shown) == shown
    assert printable_lines(f"{os.fsdecode(raw)}\n2") == "\n".join(
        [*map(printable, os.fsdecode(raw).split("\n")), "2"]
    )
    assert printable("\ud800") == r"\ud800"
    assert printable_lines("a\x1b\n2") == "a\\x1b\n2"


def test_a_text_in_a_message_is_short_and_printable():
    assert brief("a" * 60) == "a" * 60
    assert brief("a" * 61) == "a" * 56 + " ..."
    assert brief("photos of apples", 11) == "photos ..."
    assert brief("\n" * 10**6, 10) == "\\n" * 3 + " ..."
    assert brief("photo\u202egpj.exe") == r"photo\u202egpj.exe"


def test_work_within_work_is_told_with_it(monkeypatch, caplog):
    monkeypatch.setattr(text, "PATIENCE", -1)
    monkeypatch.setattr(text, "LINE_EVERY", -1)
    monkeypatch.setattr(text.time, "monotonic", iter(range(100)).__next__)
    with caplog.at_level(logging.INFO, "dino_vit"), text.progress("Folds", 2) as outer:
        with text.progress("Heads", 3) as inner:
            inner(1)
        outer(1)
    lines = [re.sub(r"[\d.]+/s| in .*", "", line) for line in caplog.messages]
    assert lines == ["Folds: 0 of 2,  (Heads: 1 of 3, )", "Folds: 1 of 2, ", "Folds: 1 of 2, "]


@pytest.mark.parametrize(("seconds", "counts"), [(3, [5, 10, 15]), (15, [1, 2, 3]), (50, [1, 2, 3])])
def test_in_a_file_a_line_comes_every_15_seconds(monkeypatch, caplog, seconds, counts):
    now = 7.0
    monkeypatch.setattr(text.time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO, "dino_vit"), text.progress("Images", 100) as advance:
        for _ in range(counts[-1]):
            now += seconds
            advance(1)
        shown = [int(line.split()[1]) for line in caplog.messages]
    assert shown == counts


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("https://me:p@ss@host:80/a.tar?token=secret#x", "https://host:80/a.tar"),
        ("HTTPS://me:p w'\"@host/my photo.jpg?sig=a b'c\"d&e", "HTTPS://host/my photo.jpg"),
        ("s3://key:secret@bucket/a.jpg?versionId=b", "s3://bucket/a.jpg"),
        ("s3://bucket/a?.tar", "s3://bucket/a?.tar"),  # a pattern
        ("gs://bucket/a b.jpg#token=x", "gs://bucket/a b.jpg"),
        ("az://container/a.jpg?sv=1&sig=x", "az://container/a.jpg"),
        ("hf://datasets/owner/name@main/a.jpg?token=x", "hf://datasets/owner/name@main/a.jpg"),
        ("zip://a?.png::HTTPS://me:p@host/a.zip?sig=a::b", "zip://a?.png::HTTPS://host/a.zip"),
        ("http://host/a.jpg?secret", "http://host/a.jpg"),
        ("https://host/@user/a.jpg", "https://host/@user/a.jpg"),
        ("cat/a?b=c@d.jpg", "cat/a?b=c@d.jpg"),
    ],
)
def test_what_is_shown_of_an_address_has_no_secrets(given, shown):
    assert text.public(given) == shown
    assert text.public(shown) == shown
    assert text.public_values({"a": [given, (3, None, {given: 1.5})]}) == {
        "a": [shown, (3, None, {shown: 1.5})]
    }
    assert not re.search("sig|secret|token", text.brief(f"{'/' * 20} {given}", 40))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("read HTTPS://me:p'@ss@host:80/a.tar?token=secret#x in", "read HTTPS://host:80/a.tar in"),
        ("url='gs://host/a?sig=b'c'), next", "url='gs://host/a'), next"),
        ("['https://host/a?b=1','s3://key:secret@k/b?y=2']", "['https://host/a','s3://k/b']"),
        ('{"a": "s3://key:secret@bucket/a?.tar", "b": 3}', '{"a": "s3://bucket/a?.tar", "b": 3}'),
        ("mail me@host?, see a/b?c=d", "mail me@host?, see a/b?c=d"),
    ],
)
def test_addresses_in_sentences_have_no_secrets(given, shown):
    assert text.public_text(given) == text.printable_lines(given) == shown


@pytest.mark.parametrize(
    "unit",
    ["a", "://", "a://x@", "a::b://", "?", "'", "https://h/ "],
)
def test_long_texts_take_time_in_proportion_to_their_length(unit):
    """One that grew with the square would take hours."""
    for start in ("", "https://", "https://h/"):
        long = start + unit * (2 * 10**5 // len(unit))
        assert len(text.public(long)) <= len(long) >= len(text.public_text(long))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("photo", "photos"),
        ("Photos/", "photos"),
        ("phots/train/a.png", "photos/train/a.png"),
        ("photos/trian/a.png", "photos/train/a.png"),
        ("photos/train/b.png", "photos/train/a.png"),
        ("phots/val", None),
        ("runs", None),
        ("https://photo/train", None),
        ("", None),
    ],
)
def test_a_path_that_does_not_exist_may_be_nearly_one_that_does(tmp_path, monkeypatch, typed, meant):
    (tmp_path / "photos" / "train").mkdir(parents=True)
    (tmp_path / "photos" / "train" / "a.png").touch()
    monkeypatch.chdir(tmp_path)
    for start in ("", f"{tmp_path}/") if typed and "://" not in typed else ("",):
        expected = f"; did you mean {start}{meant}?" if meant else "; give one"
        assert did_you_mean(f"{start}{typed}", "; give one") == expected
