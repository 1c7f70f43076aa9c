"""Files of sound and video: opened, their tracks, the lengths that they claim. FFmpeg (in PyAV) reads nothing but the
bytes given."""

import io
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Disposition

from services.common.media import TOO_LARGE, MediaError

# Containers of one file each. Playlists (HLS, DASH, concat) are not among them: reading one opens what it names.
_FORMATS = (
    "wav,w64,aiff,au,caf,mp3,flac,ogg,aac,ac3,amr,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,asf,gif"
)
_COMMON = {"audio": "WAV, MP3, FLAC, Ogg or MP4", "video": "MP4, WebM or Matroska"}
# Sizes of sound that programs claim which write to a pipe and cannot know it, and as many bytes around them: headers
# and parts of samples that are left out. The last is sox's for AIFF.
_PLACEHOLDERS = (1 << 31, 1 << 32, 0x7F000000)
_PLACEHOLDER_SLACK_BYTES = 1 << 16

_Track = TypeVar("_Track", av.AudioStream, av.VideoStream)


@contextmanager
def opened(data: bytes, kind: Literal["audio", "video"]) -> Generator[InputContainer]:
    """The file `data`. Raises MediaError: it is broken, which may show only while it is read in the block."""
    try:
        file = io.BytesIO(data)
        with av.open(file, "r", options={"format_whitelist": _FORMATS}, metadata_errors="ignore") as container:
            yield container
    except MemoryError:
        raise MediaError(TOO_LARGE) from None
    except (FFmpegError, ValueError, OverflowError):
        raise MediaError(f"the file is corrupt, or is no {kind} that FFmpeg reads: send {_COMMON[kind]}") from None


def sound_track(container: InputContainer) -> av.AudioStream:
    """The track that players play. Raises MediaError: there is none, or none that can be decoded."""
    return _played(container.streams.audio, "audio")


def video_track(container: InputContainer) -> av.VideoStream:
    """The track that players play, which is no cover. Raises MediaError: there is none, or none that can be decoded."""
    tracks = [track for track in container.streams.video if not track.disposition & Disposition.attached_pic]
    return _played(tracks, "video")


def _played(tracks: Sequence[_Track], kind: Literal["audio", "video"]) -> _Track:
    if not tracks:
        raise MediaError(f"the file has no {kind} track")
    known = [track for track in tracks if track.codec_context]
    if not known:
        raise MediaError(f"the file's {kind} track has an unknown codec: send {_COMMON[kind]}")
    return max(known, key=lambda track: bool(track.disposition & Disposition.default))  # the first of these


def claimed_s(container: InputContainer, track: av.AudioStream | av.VideoStream, data: bytes) -> float:
    """Seconds that the headers of the file `data` claim for `track`; 0 if they claim none."""
    of_track, of_file = (track.duration or 0) * (track.time_base or 0), (container.duration or 0) / av.time_base
    claimed = float(of_track or of_file)
    if track.codec_context.name.startswith("pcm_") and _is_placeholder(claimed * (track.bit_rate or 0) / 8):
        claimed = 0.0
    return max(claimed, _claimed_wav_s(data), 0.0)


def _claimed_wav_s(data: bytes) -> float:
    """Seconds that a WAV file's header claims; 0 without a claim, and for other files.

    FFmpeg takes the size of the file instead: a long recording that was cut off is short to it.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0.0
    at, bytes_per_second = 12, 0
    while at + 8 <= len(data):
        name, size_bytes = struct.unpack_from("<4sI", data, at)
        if name == b"fmt " and at + 20 <= len(data):
            (bytes_per_second,) = struct.unpack_from("<I", data, at + 16)
        elif name == b"data":
            return size_bytes / bytes_per_second if bytes_per_second and not _is_placeholder(size_bytes) else 0.0
        at += 8 + size_bytes + size_bytes % 2
    return 0.0


def _is_placeholder(size_bytes: float) -> bool:
    return any(abs(size_bytes - value) <= _PLACEHOLDER_SLACK_BYTES for value in _PLACEHOLDERS)
