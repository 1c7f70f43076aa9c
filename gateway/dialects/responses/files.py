"""Uploaded files that items name."""

from collections.abc import Iterable, Mapping

from gateway.answers.files.contents import FileContent
from gateway.dialects.responses.parts import Item

_FILES = {"input_image": ("image_url",), "input_file": ("file_data", "file_url")}  # what wins over file_id


def named_files(items: Iterable[tuple[str, Item]]) -> dict[str, str]:
    """By id, the member of the request that names it.

    Args:
        items: each with its place in the request, or with the member that named an earlier turn.
    """
    wanted: dict[str, str] = {}
    for place, item in items:
        for member in ("content", "output"):
            for i, part in enumerate(_parts(item, member)):
                if _is_named(part):
                    field = f"{place}.{member}[{i}].file_id" if place.startswith("input[") else place
                    wanted.setdefault(part["file_id"], field)
    return wanted


def filled(item: Item, files: Mapping[str, FileContent]) -> Item:
    """`item`, with the files that it names in it."""
    changed = {
        member: [_filled(part, files) for part in _parts(item, member)]
        for member in ("content", "output")
        if any(map(_is_named, _parts(item, member)))
    }
    return item | changed if changed else item


def _filled(part: Item, files: Mapping[str, FileContent]) -> Item:
    if not _is_named(part):
        return part
    name, url = files[part["file_id"]]
    return {_FILES[part["type"]][0]: url, "filename": name} | part


def _parts(item: Item, member: str) -> list[Item]:
    parts = item.get(member)
    return parts if isinstance(parts, list) else []


def _is_named(part: Item) -> bool:
    members = _FILES.get(part["type"], ())
    return bool(members and part.get("file_id")) and not any(map(part.get, members))
