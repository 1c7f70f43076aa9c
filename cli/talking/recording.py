"""Reads the user's sound from a file and writes the model's to one."""

import asyncio
import contextlib
import time
import wave
from collections.abc import Callable, Coroutine, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from cli.http import written
from cli.talking.sound import BYTES_PER_SAMPLE, PIECE_BYTES, RATE_HZ, PlaybackBuffer
from cli.terminal import CommandError

_STEP_S = 0.02


def pieces(file: Path) -> Iterator[bytes]:
    """Yields mono PCM16 of 24 kHz, PIECE_BYTES at a time. Raises CommandError."""
    read = _read(file)
    first = next(read, None)
    if first is None:
        raise CommandError(f"--in: {file} has no sound")
    return chain([first], read)


def _read(file: Path) -> Iterator[bytes]:
    try:
        import av
        import av.error
    except ImportError:
        raise CommandError("--in needs PyAV, which reads media files: pip install 'quartet[talk]'") from None
    try:
        with av.open(str(file)) as opened:
            if not opened.streams.audio:
                return
            resampler = av.AudioResampler("s16", "mono", RATE_HZ, PIECE_BYTES // BYTES_PER_SAMPLE)
            for frame in chain(opened.decode(audio=0), [None]):  # None: the resampler's rest
                for piece in resampler.resample(frame):
                    yield bytes(piece.planes[0])[: piece.samples * BYTES_PER_SAMPLE].ljust(PIECE_BYTES, b"\0")
    except (av.error.FFmpegError, OSError) as error:
        raise CommandError(f"--in: {file} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def recorder(playback: PlaybackBuffer, out: Path) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Yields what records `playback` in real time. A block that fails leaves no file. Raises CommandError."""
    try:
        with written(out) as file, wave.open(file, "wb") as opened:
            opened.setparams((1, BYTES_PER_SAMPLE, RATE_HZ, 0, "NONE", ""))
            yield lambda: _record(playback, opened)
    except OSError as error:
        raise CommandError(f"--out: {error}") from None


async def _record(playback: PlaybackBuffer, file: wave.Wave_write) -> None:
    begun_s, written_samples = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - begun_s) * RATE_HZ)
        file.writeframes(playback.pull(due - written_samples))
        written_samples = due
        await asyncio.sleep(_STEP_S)
