"""Encoded files: images opened, the length that a WAV file claims, sound as FFmpeg decodes it."""

import io
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from services.common.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@contextmanager
def open_image(data: bytes, field: str) -> "Generator[Image]":
    """The image in `data`, of which only the header has been read.

    Raises:
        InvalidInput: names `field`: `data` is no image, or its use in the block found it broken.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            yield image
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidInput(field, f"cannot be decoded as an image: {error}") from None


def claimed_wav_s(data: bytes) -> float:
    """Seconds that a WAV file's header claims; 0 without a claim, and for other files.

    FFmpeg takes the size of the file instead: a long recording that was cut off is short to it. A data size near 2^32,
    from programs that cannot seek back, is no claim.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0.0
    at, bytes_per_second = 12, 0
    while at + 8 <= len(data):
        name, size_bytes = struct.unpack_from("<4sI", data, at)
        if name == b"fmt " and at + 20 <= len(data):
            (bytes_per_second,) = struct.unpack_from("<I", data, at + 16)
        elif name == b"data":
            return size_bytes / bytes_per_second if bytes_per_second and size_bytes < 0xFFFFFF00 else 0.0
        at += 8 + size_bytes + size_bytes % 2
    return 0.0


def mono_blocks(container: Any) -> "Iterator[tuple[np.ndarray, int]]":
    """The first audio track of an open file, by frame: ((samples,) float32, the mean of its channels; samples a
    second). Raises PyAV's errors."""
    import av
    import numpy as np

    to_float = av.AudioResampler(format="flt")  # not fltp: PyAV crashes on more than 7 planes
    for frame in container.decode(container.streams.audio[0]):
        blocks = [
            converted.to_ndarray().reshape(-1, converted.layout.nb_channels).mean(axis=1, dtype=np.float32)
            for converted in to_float.resample(frame)
        ]
        yield np.concatenate([np.empty(0, np.float32), *blocks]), frame.sample_rate
