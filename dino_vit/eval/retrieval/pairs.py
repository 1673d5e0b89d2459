"""Which query is a copy of which original: by a table, or by their names."""

from collections import defaultdict
from pathlib import PurePath

from dino_vit.core.text import printable
from dino_vit.data.labels import read_entries
from dino_vit.data.sources.files import read_file
from dino_vit.data.sources.open import Source


def true_pairs(queries: Source, originals: Source, table: str | None) -> list[tuple[int, int]]:
    """Return the indices of queries and their originals."""
    of_queries, of_originals = ([one.name(i) for i in range(len(one))] for one in (queries, originals))
    if table is None:
        return _by_name(of_queries, of_originals)
    return _by_table(of_queries, of_originals, table)


def _by_table(queries: list[str], originals: list[str], table: str) -> list[tuple[int, int]]:
    """Read lines of query,original; a query may have several originals, on a line each."""
    of_queries, of_originals = ({name: row for row, name in enumerate(one)} for one in (queries, originals))
    found = []
    for entry in read_entries(table, read_file(table), ("original",)):
        if entry.label is None:
            raise ValueError(f"{table}: {printable(entry.name)!r} has no original; a line is query,original")
        query = _find(entry.name, of_queries, f"{table}: no query", queries[0])
        found.append((query, _find(entry.label, of_originals, f"{table}: no original", originals[0])))
    if not found:
        raise ValueError(f"{table} has no line; it needs lines of query,original")
    return found


def _find(name: str, known: dict[str, int], what: str, example: str) -> int:
    if (index := known.get(printable(name))) is None:
        raise ValueError(
            f"{what} is called {printable(name)!r}; a line is query,original, each by its name below its "
            f"folder with the suffix, such as {example}"
        )
    return index


def _by_name(queries: list[str], originals: list[str]) -> list[tuple[int, int]]:
    """Pair images of the same name but for the suffix, or else for the folder too."""
    whole, last = defaultdict(list), defaultdict(list)
    for index, name in enumerate(originals):
        whole[PurePath(name).with_suffix("")].append(index)
        last[PurePath(name).stem].append(index)
    found = []
    for query, name in enumerate(queries):
        fitting = whole.get(PurePath(name).with_suffix("")) or last.get(PurePath(name).stem, [])
        if len(fitting) > 1:
            several = " and ".join(originals[index] for index in fitting[:2])
            raise ValueError(f"the query {name} is named as {several}; give pairs=FILE with query,original")
        found += [(query, index) for index in fitting]
    if not found:
        raise ValueError(
            f"no query is named as an original: there is no original for {queries[0]}. A copy is called as "
            "its original but for folder and suffix, or pairs=FILE has a line query,original for each copy"
        )
    return found
