"""Answers of HTTP servers, of which no more is read than was asked for."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from dino_vit.core.text import public


class WholeFile(OSError):
    """A server does not know how to send a part of a file."""


class LongFile(OSError):
    """A file is longer than it may be."""


def read_range(system: Any, inner: str, start: int, size: int, limits: Mapping[str, Any]) -> Any:
    """Return a range of a file; refuse an answer of another length before it is read into memory."""

    async def check(answer: Any) -> None:
        length = answer.content_length
        if answer.ok and (length is None or length > size):
            answered = "any length" if length is None else f"{length:,} bytes"
            text = f"{public(inner)}: the server answers with {answered}, where {size:,} bytes were asked for"
            raise WholeFile(text) if answer.status == 200 else OSError(text)

    headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    settings = {**limits, "headers": headers, "raise_for_status": check}
    return system.cat_file(inner, start=start, end=start + size, **settings)


def read_whole(system: Any, inner: str, limit: int, limits: Mapping[str, Any]) -> Any:
    """Return a file of up to `limit` bytes, whose length the server need not state."""
    from fsspec.asyn import sync

    async def read() -> bytes:
        session, content = await system.set_session(), BytesIO()
        async with session.get(system.encode_url(inner), **{**system.kwargs, **limits}) as answer:
            if answer.status == 404:
                raise FileNotFoundError(inner)
            answer.raise_for_status()
            size = answer.content_length or 0
            async for part in answer.content.iter_any():
                size = max(size, content.tell() + len(part))
                if size > limit:
                    raise LongFile(f"{public(inner)} has more than {limit:,} bytes")
                content.write(part)
        return content.getvalue()

    return sync(system.loop, read)
