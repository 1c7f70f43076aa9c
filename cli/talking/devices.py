"""Microphone and speakers, by PortAudio."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cli.talking.sound import PIECE_MS, RATE_HZ, PlaybackBuffer
from cli.terminal import CommandError

_FORMAT: dict[str, Any] = {"samplerate": RATE_HZ, "channels": 1, "dtype": "int16"}
_FILES = "--in FILE and --out FILE need neither"


def microphone(name: str | None, take: Callable[[bytes], None]) -> AbstractContextManager[None]:
    """Passes sound to `take` in a thread of its own: mono PCM16, 24 kHz, PIECE_MS at a time. Raises CommandError.

    Args:
        name: or number of the device; None: the system's.
    """

    def on_block(data: Any, _frames: int, _time: object, _status: object) -> None:
        take(bytes(data))

    size = RATE_HZ * PIECE_MS // 1000
    return _stream("microphone", "RawInputStream", name, blocksize=size, callback=on_block)


def speakers(name: str | None, playback: PlaybackBuffer) -> AbstractContextManager[None]:
    """Plays `playback` in the block. Raises CommandError."""

    def play(data: Any, frames: int, _time: object, _status: object) -> None:
        data[:] = playback.pull(frames)

    return _stream("speakers", "RawOutputStream", name, latency="low", callback=play)


@contextmanager
def _stream(what: str, kind: str, name: str | None, **options: Any) -> Iterator[None]:
    try:
        import sounddevice
    except ImportError:
        reason = "need the package sounddevice: pip install 'quartet[talk]'"
        raise CommandError(f"microphone and speakers {reason}; {_FILES}") from None
    except OSError:  # it finds no PortAudio; its wheels for macOS and Windows bring it along
        reason = "need PortAudio: apt install libportaudio2, or the like"
        raise CommandError(f"microphone and speakers {reason}; {_FILES}") from None
    device = int(name) if name is not None and name.isdecimal() else name
    try:
        stream = getattr(sounddevice, kind)(device=device, **_FORMAT, **options)
        stream.start()
    except (sounddevice.PortAudioError, ValueError) as error:
        channels = "max_input_channels" if what == "microphone" else "max_output_channels"
        there = [each["name"] for each in sounddevice.query_devices() if each[channels]]
        choice = f"choose one with --{what}: {', '.join(there)}" if there else "this machine has none"
        raise CommandError(f"no {what}: {str(error).splitlines()[0]}; {choice}; {_FILES}") from None
    with stream:
        yield
