"""Uploaded files that a request names, as if they had come with it in data URLs."""

import asyncio
import mimetypes
from collections.abc import Mapping
from contextlib import aclosing
from typing import NamedTuple

import pybase64

from gateway.answers.files.store import StoredFile
from gateway.answers.gateway import Gateway
from gateway.errors import ApiError, invalid
from gateway.media.fetch import media_errors, too_large
from gateway.tasks import held


class FileContent(NamedTuple):
    """A file's name, and its bytes as a data URL, whose type is that of the name."""

    filename: str
    url: str


async def read_files(gateway: Gateway, wanted: Mapping[str, str], owner: str | None) -> dict[str, FileContent]:
    """`owner`'s files by id, with one look into the store.

    Args:
        wanted: by id, the member of the request that names it.

    Raises:
        ApiError: 400 naming the member, there is no such file, or it is larger than media may be; 503, the request has
            no room for it.
    """
    if not wanted:
        return {}
    limits = gateway.fetcher.limits
    if len(wanted) > limits.media_max_parts:
        field = list(wanted.values())[limits.media_max_parts]
        raise invalid(field, f"the request names {len(wanted)} files; at most {limits.media_max_parts} are allowed")
    files, contents = await gateway.files.store.several(list(wanted), owner), dict[str, FileContent]()
    for file_id, field in wanted.items():
        if (file := files.get(file_id)) is None:
            raise _no_file(file_id, field)
        content = await _read(gateway, file, field, file.bytes * 4 // 3)
        media_type = mimetypes.guess_type(file.filename)[0] or "application/octet-stream"
        data = await asyncio.to_thread(pybase64.b64encode_as_string, content)
        contents[file_id] = FileContent(file.filename, f"data:{media_type};base64,{data}")
    return contents


async def read_file(gateway: Gateway, file_id: str, field: str, owner: str | None) -> bytes:
    """`owner`'s file, which the member `field` names. Raises ApiError: as `read_files`."""
    if (file := await gateway.files.get(file_id, owner)) is None:
        raise _no_file(file_id, field)
    return bytes(await _read(gateway, file, field, file.bytes))


def _no_file(file_id: str, field: str) -> ApiError:
    reason = f"there is no file {file_id[:80]!r}; it was deleted, has expired, or is another gateway's"
    return invalid(field, reason, "file_not_found")


async def _read(gateway: Gateway, file: StoredFile, field: str, room_bytes: int) -> bytearray:
    """Raises ApiError: 400, it is too large; 503, the request has no room for so much."""
    most = gateway.fetcher.limits.media_max_bytes
    with media_errors(field):
        if file.bytes > most:
            raise too_large(most)
    held.get()(room_bytes)
    content = bytearray()
    async with aclosing(await gateway.files.open(file)) as pieces:
        async for piece in pieces:
            content += piece
    return content
