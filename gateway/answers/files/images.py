"""Images that a request names: each by a URL, or as an uploaded file."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from gateway.answers.files.contents import read_files
from gateway.answers.gateway import Gateway
from gateway.media.check import MediaFile
from gateway.validation import Strict


class ImageReference(Strict):
    """An image: one of the two."""

    image_url: str | None = Field(default=None, min_length=1, description="https, http or data URL of an image")
    file_id: str | None = Field(default=None, description="of an uploaded image, instead of image_url")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.image_url is None) == (not self.file_id):
            raise ValueError("must be {image_url: an https, http or data URL}, {file_id}, or a file of a form")
        return self


async def named_images(gateway: Gateway, named: Mapping[str, ImageReference], owner: str | None) -> list[MediaFile]:
    """`owner`'s images, not fetched yet.

    Args:
        named: by their places in the request.

    Raises:
        ApiError: as `read_files`.
    """
    wanted: dict[str, str] = {}
    for field, image in named.items():
        if image.file_id:
            wanted.setdefault(image.file_id, f"{field}.file_id")
    files = await read_files(gateway, wanted, owner)
    urls = [files[image.file_id].url if image.file_id else image.image_url or "" for image in named.values()]
    return [MediaFile(field, "image", url) for field, url in zip(named, urls, strict=True)]
