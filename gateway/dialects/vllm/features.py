"""`features` of `/inference/v1/generate`: the media of a prompt that `/render` made, with all their tokens."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pydantic import Field

from gateway.errors import invalid
from gateway.media.check import MediaFile
from gateway.validation import Listed, NotNegative, Positive, Strict

Kind = Literal["image", "audio", "video"]


class Placeholder(Strict):
    """The tokens that stand for a medium."""

    offset: NotNegative
    length: Positive


class Features(Strict):
    """Media by their kind, those of a kind in their order."""

    mm_hashes: dict[Kind, Listed[str]] = Field(description="accepted; a medium is known by its content")
    mm_placeholders: dict[Kind, Listed[Placeholder]] = Field(description="where they stand among token_ids")
    kwargs_data: dict[Kind, Listed[str | None]] | None = Field(
        default=None, description="their files in base64, as /render gives them"
    )
    mm_metadata: None = Field(default=None, description="null: nothing goes without its file")

    def collapsed(self, token_ids: Sequence[int], field: str) -> tuple[list[int], list[MediaFile]]:
        """(ids with one placeholder for each medium, the media in their order). Raises ApiError."""
        ids, files, begin = list[int](), list[MediaFile](), 0
        for place, name, kind, data in sorted(self._media(field), key=lambda each: each[0].offset):
            if place.offset < begin or place.offset + place.length > len(token_ids):
                raise invalid(f"{field}.mm_placeholders", "must lie within token_ids, and apart from each other")
            ids += token_ids[begin : place.offset + 1]
            begin = place.offset + place.length
            files.append(MediaFile(name, kind, f"data:;base64,{data}"))
        return ids + list(token_ids[begin:]), files

    def _media(self, field: str) -> Iterator[tuple[Placeholder, str, Kind, str]]:
        """(place, name in the request, kind, file in base64) of each."""
        files = self.kwargs_data or {}
        for kind in get_args(Kind):
            places, data = self.mm_placeholders.get(kind, []), files.get(kind, [])
            if len(self.mm_hashes.get(kind, [])) != len(places):
                raise invalid(f"{field}.mm_hashes", f"must have as many of {kind} as mm_placeholders")
            if len(data) != len(places) or not all(data):
                reason = f"must have the file of each {kind}: none is kept here, nor taken as tensors"
                raise invalid(f"{field}.kwargs_data", reason)
            for i, (place, each) in enumerate(zip(places, data, strict=True)):
                yield place, f"{field}.kwargs_data.{kind}[{i}]", kind, each or ""
