"""Pictures of a request, decoded. Apart from request.py, whose libraries a process that decodes need not import."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image


class Pictures(NamedTuple):
    """See DitStart."""

    images: "Sequence[Image]" = ()
    mask: "Image | None" = None
    controls: "Sequence[Image]" = ()
