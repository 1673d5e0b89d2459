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
    known = [{name: index for index, name in enumerate(names)} for names in (queries, originals)]
    found = []
    for entry in read_entries(table, read_file(table), ("original",)):
        pair = []
        for name, index, role in zip(
            (entry.name, entry.label or ""), known, ("query", "original"), strict=True
        ):
            if printable(name) not in index:
                raise ValueError(
                    f"{table}: no {role} is called {printable(name)!r}; a line is query,original, each by "
                    f"its name below its folder with the suffix, such as {next(iter(index))}"
                )
            pair.append(index[printable(name)])
        found.append((pair[0], pair[1]))
    if not found:
        raise ValueError(f"{table} has no line; it needs lines of query,original")
    return found


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
