"""The reader of sound."""

from collections.abc import Iterator
from itertools import groupby

import av
import numpy as np
import soxr
from av.container import InputContainer
from av.error import InvalidDataError

from services.common.media import MediaError

_MOST_DAMAGED = 0.1  # of the packets


def read_sound(container: InputContainer, track: av.AudioStream, rate_hz: int) -> Iterator[np.ndarray]:
    """The sound of `track`, in pieces of (samples,) float32: mean of the channels, at `rate_hz`.

    Rate, channels and sample format may change part-way, as in recordings that were joined.

    Raises:
        MediaError: much of it is damaged.
        FFmpegError: reading the file failed.
    """
    for (_, _, own_rate_hz), frames in groupby(_frames(container, track), _format):
        to_float = av.AudioResampler(format="flt")  # not fltp: PyAV crashes on more than 7 planes
        resampler = None if own_rate_hz == rate_hz else soxr.ResampleStream(own_rate_hz, rate_hz, 1)
        for frame in frames:
            for converted in to_float.resample(frame):
                channels = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
                mono = channels.mean(axis=1, dtype=np.float32)
                yield mono if resampler is None else resampler.resample_chunk(mono)
        if resampler is not None:
            yield resampler.resample_chunk(np.empty(0, np.float32), last=True)


def _format(frame: av.AudioFrame) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _frames(container: InputContainer, track: av.AudioStream) -> Iterator[av.AudioFrame]:
    """The frames, without what cannot be decoded, such as tags in the middle of joined files: players skip it, too."""
    packets = damaged = 0
    for packet in container.demux(track):
        packets += 1
        try:
            decoded = packet.decode()
        except InvalidDataError:
            damaged += 1
            continue
        yield from decoded
    if damaged > _MOST_DAMAGED * packets:
        raise MediaError("the sound is damaged: send a file that plays without gaps")
