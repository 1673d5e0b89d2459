"""Copies and originals are paired by name or by a table; what is not clear is refused."""

import pytest

from dino_vit.data.sources.open import open_source
from dino_vit.eval.retrieval.pairs import true_pairs
from tests.support.image_sets import FILES, NAMES, write_folder

IMAGE = FILES[NAMES[0]]


@pytest.fixture
def folders(tmp_path):
    def make(queries, originals):
        for folder, names in (("queries", queries), ("originals", originals)):
            write_folder(tmp_path / folder, dict.fromkeys(names, IMAGE))
        return [open_source(str(tmp_path / name)) for name in ("queries", "originals")]

    return make


def named(sources, pairs):
    return {(sources[0].name(query), sources[1].name(one)) for query, one in pairs}


def test_by_name_but_for_the_suffix_or_the_folder_too(folders):
    sources = folders(
        ["a.jpg", "sub/b.png", "x/c.webp", "other.png"], ["a.png", "deep/b.png", "x/c.png", "y/c.png"]
    )
    assert named(sources, true_pairs(*sources, None)) == {
        ("a.jpg", "a.png"),
        ("sub/b.png", "deep/b.png"),
        ("x/c.webp", "x/c.png"),
    }


def test_by_a_table_where_a_query_may_have_several_originals(folders, tmp_path):
    sources = folders(["1.png", "2.png"], ["a.png", "b.png"])
    table = tmp_path / "pairs.csv"
    table.write_text("query,original\n1.png,b.png\n1.png,a.png\n")
    assert named(sources, true_pairs(*sources, str(table))) == {("1.png", "a.png"), ("1.png", "b.png")}
    table.write_text("1.png,b\n")
    with pytest.raises(ValueError, match=r"no original is called 'b'; a line is query,original.* as a\.png"):
        true_pairs(*sources, str(table))
    table.write_text("query,copied,by\n1.png,b.png,me\n")
    with pytest.raises(ValueError, match=r"'1\.png' has no original; a line is query,original"):
        true_pairs(*sources, str(table))
    table.write_text("")
    with pytest.raises(ValueError, match="needs lines of query,original"):
        true_pairs(*sources, str(table))


def test_names_that_fit_none_or_several_are_refused(folders):
    sources = folders(["c.png"], ["x/c.png", "y/c.png"])
    with pytest.raises(ValueError, match=r"the query c\.png is named as x/c\.png and y/c\.png; give pairs"):
        true_pairs(*sources, None)


def test_no_pair_is_refused(folders):
    sources = folders(["c.png"], ["d.png"])
    with pytest.raises(ValueError, match=r"no query is named as an original: .* for c\.png"):
        true_pairs(*sources, None)
