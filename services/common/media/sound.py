"""The reader of sound."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import av
import numpy as np
import soxr
from av.container import InputContainer
from av.error import InvalidDataError

from services.common.media import MediaError
from services.common.media.containers import opened, sound_track

_MOST_DAMAGED = 0.1  # of the packets
_MOST_LINKS = 1000  # each is a file to be opened


def read_sound(data: bytes, rate_hz: int) -> Iterator[np.ndarray]:
    """The sound of the file `data`, in pieces of (samples,) float32: mean of the channels, at `rate_hz`.

    Rate, channels and sample format may change part-way, as in recordings that were joined.

    Raises:
        MediaError: as of `opened` and `sound_track`, or much of the sound is damaged.
    """
    for link in _links(data):
        with opened(link, "audio") as container:
            yield from _resampled(_frames(container, sound_track(container)), rate_hz)


def _links(data: bytes) -> Sequence[bytes]:
    """The files that an Ogg file was joined of (RFC 3533: chained streams). FFmpeg refuses them if formats differ."""
    begins: list[int] = []
    at, was_first = 0, False
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        is_first = bool(data[at + 5] & 2)  # a page that begins a stream; those of one file stand together
        if is_first and not was_first:
            begins.append(at)
        was_first, body = is_first, at + 27 + data[at + 26]
        at = body + sum(data[at + 27 : body])
    if len(begins) > _MOST_LINKS:
        raise MediaError(f"the file was joined of {len(begins)} files; at most {_MOST_LINKS} are allowed")
    return [data[begin:end] for begin, end in pairwise([*begins, len(data)])] or [data]


def _resampled(frames: Iterator[av.AudioFrame], rate_hz: int) -> Iterator[np.ndarray]:
    for (_, _, own_rate_hz), alike in groupby(frames, _format):
        to_float = av.AudioResampler(format="flt")  # not fltp: PyAV crashes on more than 7 planes
        resampler = None if own_rate_hz == rate_hz else soxr.ResampleStream(own_rate_hz, rate_hz, 1)
        for frame in alike:
            for converted in to_float.resample(frame):
                channels = converted.layout.nb_channels
                weights = np.full(channels, 1 / channels, np.float32)
                mono = converted.to_ndarray().reshape(-1, channels) @ weights  # faster than `mean`
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
