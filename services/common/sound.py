"""Sound of media files, as FFmpeg decodes it."""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np


def mono_blocks(container: Any) -> Iterator[tuple[np.ndarray, int]]:
    """The first audio track of an open file, as it is decoded: for each frame of it ((samples,) float32, the mean of
    its channels; samples a second). Raises what PyAV raises."""
    to_float = av.AudioResampler(format="flt")  # not fltp: PyAV crashes on more than 7 planes
    for frame in container.decode(container.streams.audio[0]):
        blocks = [
            converted.to_ndarray().reshape(-1, converted.layout.nb_channels).mean(axis=1, dtype=np.float32)
            for converted in to_float.resample(frame)
        ]
        yield np.concatenate([np.empty(0, np.float32), *blocks]), frame.sample_rate
