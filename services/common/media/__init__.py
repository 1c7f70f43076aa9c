"""Encoded files of requests, as people see and hear them: one reader each of images and of sound, for gateway and
stages."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import InvalidMedia

TOO_LARGE = "takes more memory to decode than there is for it: make it smaller"


class MediaError(Exception):
    """A file cannot be used. The text says why, and what would do."""


@contextmanager
def media_errors(field: str) -> Iterator[None]:
    """Raises InvalidMedia, which names `field`, for a MediaError."""
    try:
        yield
    except MediaError as error:
        raise InvalidMedia(field, str(error)) from None
