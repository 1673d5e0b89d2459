"""Ways to damage bytes, and texts, numbers and types that programs trip over."""

import json
from random import Random
from typing import Any

import pyarrow as pa

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
DTYPES = ["|u1", "<u2", "<f2", "<f4", ">f8", "<c16", "|b1", "<U9", "<i8"]
NUMBERS = ["nan", "1e999", "-1", "1_000", "9" * 5000, "0x1f", "", "١", "1,5"]
WORDS = "a.png b.png cat é日 ../../etc/passwd { NaN memory://x.png nosuch://x.png C:\\x.png"
QUOTES = ['"', "'", ",", '{"label": 1}', '{"label": "\\ud800"}']
CONTROLS = ["\x1b[31mred", "\n", "\r", "\t", "\0", "\u2028", "\ufeff"]
TEXTS = [*WORDS.split(), *QUOTES, *CONTROLS, "x" * 10_000, *NUMBERS]
VALUES: list[tuple[Any, pa.DataType]] = [
    (b"\x89PNG", pa.binary()),
    ("a.png", pa.string()),
    (1, pa.int64()),
    (2**64 - 1, pa.uint64()),
    (1.5, pa.float32()),
    (True, pa.bool_()),
    ([1, 2], pa.list_(pa.int64())),
    ({"bytes": b"x", "path": "p"}, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
    ({"bytes": "x", "path": 3}, pa.struct({"bytes": pa.string(), "path": pa.int32()})),
    (None, pa.null()),
    ("cat", pa.dictionary(pa.int32(), pa.string())),
]


def damaged(rng: Random, data: bytes) -> bytes:
    """Return bytes with a few flips, cuts, repeats and numbers at the edges of their types."""
    content = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        if not content:
            break
        start = rng.choice([rng.randrange(len(content)), rng.randrange(min(len(content), 64))])
        match rng.randrange(5):
            case 0:
                content[start] ^= 1 << rng.randrange(8)
            case 1:
                del content[start : start + rng.choice([1, 4, 100, len(content)])]
            case 2:
                content[start:start] = content[start : start + rng.choice([1, 16, 512])]
            case 3:
                size = rng.choice([1, 2, 4, 8])
                number = rng.choice(EDGES) % 256**size
                content[start : start + size] = number.to_bytes(size, rng.choice(["little", "big"]))
            case _:
                content[start : start + 8] = rng.randbytes(8)
    return bytes(content)


def text(rng: Random, suffix: str) -> bytes:
    """Return a list or an object of names and labels, in any encoding."""
    if suffix == ".json":
        whole = {
            "a.png": rng.choice([1, "cat", None, [1], {"x": 1}, 1e400, "\ud800"]),
            rng.choice(TEXTS): "b",
        }
        content = rng.choice([json.dumps(whole), rng.choice(TEXTS)])
    else:
        separator = "\t" if suffix == ".tsv" else ","
        rows = [
            [rng.choice(TEXTS) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(rng.choice([1, 3, 9]))
        ]
        head = rng.choice(["", f"path{separator}label\n", f"label{separator}path{separator}x\n", "\ufeff"])
        content = head + rng.choice(["\n", "\r\n", "\r"]).join(separator.join(row) for row in rows)
        content = rng.choice([content, f"a.png{separator}cat\nb.png{separator}dog\n"])
    encoded = content.encode(rng.choice(["utf-8", "utf-8", "utf-16", "utf-32"]), "surrogatepass")
    return encoded if rng.random() < 0.6 else damaged(rng, encoded)
