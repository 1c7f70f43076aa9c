"""Pictures of a request, decoded. Apart from request.py, whose libraries a process that decodes need not import."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image


class Pictures(NamedTuple):
    """See DitStart. Frames of videos have the size of the output."""

    images: "Sequence[Image]" = ()
    mask: "Image | None" = None
    controls: "Sequence[Image]" = ()
    video: "Sequence[Image]" = ()
    control_video: "Sequence[Image]" = ()


def fitted(width: int, height: int, most_pixels: int, multiple: int) -> tuple[int, int]:
    """(width, height) of about that shape, multiples of `multiple`, at most as large and of at most `most_pixels`."""
    scale = min(1.0, math.sqrt(most_pixels / (width * height)))
    width, height = (max(multiple, int(side * scale) // multiple * multiple) for side in (width, height))
    return width, height
