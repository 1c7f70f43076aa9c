"""Odd but valid files of sound, and what players play of each: the samples are made here, so they are known."""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import av
import numpy as np
import soundfile
import soxr
from av.stream import Disposition

LOSSY = 0.15
"""Share of the sound's power that a lossy codec may be off."""


@dataclass(frozen=True)
class OddSound:
    """`played` is (samples,) float32, mono, at 16 kHz. Lossy codecs add up to `slack_s` at the ends of each part."""

    name: str
    data: bytes
    played: np.ndarray
    tolerance: float = 0.0
    slack_s: float = 0.0


def samples(rate_hz: int, channels: int, base_hz: float = 200.0) -> np.ndarray:
    """Half a second, (n, channels) float64: each channel another tone, which grows louder. Their mean is no silence."""
    t = np.arange(rate_hz // 2)[:, None] / rate_hz
    tones = np.sin(2 * np.pi * base_hz * (1 + np.arange(channels)) * t) * np.linspace(0.1, 0.8, len(t))[:, None]
    return np.rint(tones * 32767) / 32768


def mono(sound: np.ndarray, rate_hz: int) -> np.ndarray:
    mixed = sound.mean(axis=1).astype(np.float32)
    return soxr.resample(mixed, rate_hz, 16_000) if rate_hz != 16_000 else mixed


def written(sound: np.ndarray, rate_hz: int, file_format: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate_hz, subtype, format=file_format)
    return file.getvalue()


def encoded(sound: np.ndarray, rate_hz: int, codec: str, file_format: str, **options: str) -> bytes:
    """A file that FFmpeg writes of (n, channels)."""
    file, layout = io.BytesIO(), "mono" if sound.shape[1] == 1 else "stereo"
    with av.open(file, "w", format=file_format, options=options) as container:
        track = cast("av.AudioStream", container.add_stream(codec, rate=rate_hz, layout=layout))
        container.mux(_packets(track, sound, rate_hz, layout))
    return file.getvalue()


def _packets(track: av.AudioStream, sound: np.ndarray, rate_hz: int, layout: str) -> list[av.Packet]:
    whole = np.rint(sound * 32768).clip(-32768, 32767).astype(np.int16).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(whole, format="s16", layout=layout)
    frame.rate, frame.time_base, frame.pts = rate_hz, Fraction(1, rate_hz), 0
    return [*track.encode(frame), *track.encode()]


def of_containers() -> Iterator[OddSound]:
    """Without loss: the same samples whatever the file."""
    for file_format, subtype, rate_hz, channels in (
        ("WAV", "PCM_16", 8000, 1),
        ("WAV", "PCM_16", 11_025, 1),
        ("WAV", "PCM_16", 44_100, 2),
        ("WAV", "PCM_16", 192_000, 1),
        ("WAV", "PCM_24", 16_000, 2),
        ("WAV", "PCM_32", 16_000, 1),
        ("WAV", "FLOAT", 48_000, 2),
        ("WAV", "DOUBLE", 16_000, 1),
        ("WAVEX", "PCM_16", 16_000, 6),
        ("WAVEX", "PCM_16", 16_000, 8),
        ("WAV", "PCM_16", 16_000, 17),
        ("RF64", "PCM_16", 16_000, 1),
        ("W64", "PCM_24", 16_000, 1),
        ("AIFF", "PCM_16", 44_100, 2),
        ("AIFF", "PCM_24", 16_000, 1),
        ("AIFF", "FLOAT", 16_000, 1),
        ("AU", "PCM_16", 16_000, 1),
        ("CAF", "PCM_16", 16_000, 2),
        ("FLAC", "PCM_16", 16_000, 8),
        ("FLAC", "PCM_24", 96_000, 1),
    ):
        sound = samples(rate_hz, channels)
        data = written(sound, rate_hz, file_format, subtype)
        yield OddSound(f"{file_format} {subtype}, {channels} at {rate_hz} Hz", data, mono(sound, rate_hz))
    for codec, file_format in (("alac", "ipod"), ("flac", "ogg"), ("flac", "matroska"), ("pcm_s16le", "matroska")):
        sound = samples(16_000, 2)
        yield OddSound(f"{codec} in {file_format}", encoded(sound, 16_000, codec, file_format), mono(sound, 16_000))
    yield OddSound(
        "WAV of 8 bits", written(samples(16_000, 1), 16_000, "WAV", "PCM_U8"), mono(samples(16_000, 1), 16_000), 1e-3
    )
    for subtype in ("ULAW", "ALAW"):
        data = written(samples(16_000, 1), 16_000, "WAV", subtype)
        yield OddSound(f"WAV {subtype}", data, mono(samples(16_000, 1), 16_000), 1e-3)


def riff(sound: np.ndarray, claimed_bytes: int, *chunks: bytes) -> bytes:
    """A WAV of (n, 1) at 16 kHz, with a length that need not be true."""
    data = (sound * 32768).astype("<i2").tobytes()
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16)
    body = b"".join([b"WAVE", head, *chunks, struct.pack("<4sI", b"data", claimed_bytes), data])
    return struct.pack("<4sI", b"RIFF", min(claimed_bytes + len(body) - len(data), 0xFFFFFFFF)) + body


def of_pipes() -> Iterator[OddSound]:
    """Programs that write to a pipe cannot know the length, and claim another."""
    sound = samples(16_000, 1)
    played = mono(sound, 16_000)
    for size in (0, 0x7FFFF000, 0x7FFFFFFF, 0x7FFFFFDB, 0x7FFFFFFE, 0x80000000, 0xFFFFFFFF, 0xFFFFFFDB, 0xFFFFF000):
        yield OddSound(f"WAV that claims {size:#x} bytes", riff(sound, size), played)
    comment = struct.pack("<4sI4s4sI6s", b"LIST", 18, b"INFO", b"INAM", 6, b"caf\xe9\0\0")
    yield OddSound("WAV with a title in Latin-1", riff(sound, 16_000, comment), played)
    odd = struct.pack("<4sI4s", b"junk", 3, b"abc\0")
    yield OddSound("WAV with a chunk of odd length", riff(sound, 16_000, odd), played)
    aiff = bytearray(written(sound, 16_000, "AIFF", "PCM_16"))
    at = aiff.index(b"COMM") + 10
    aiff[at : at + 4] = struct.pack(">I", 0x7F000000 // 2)
    at = aiff.index(b"SSND") + 4
    aiff[at : at + 4] = struct.pack(">I", 0x7F000008)
    yield OddSound("AIFF that claims 0x7f000000 bytes", bytes(aiff), played)
    au = bytearray(written(sound, 16_000, "AU", "PCM_16"))
    au[8:12] = b"\xff" * 4
    yield OddSound("AU of unknown length", bytes(au), played)


def of_lossy() -> Iterator[OddSound]:
    for codec, file_format, rate_hz, channels in (
        ("libmp3lame", "mp3", 44_100, 2),
        ("libmp3lame", "mp3", 16_000, 1),
        ("mp2", "mp2", 48_000, 2),
        ("aac", "adts", 24_000, 1),
        ("aac", "ipod", 44_100, 2),
        ("aac", "mpegts", 48_000, 2),
        ("aac", "matroska", 48_000, 1),
        ("libopus", "ogg", 48_000, 1),
        ("libopus", "webm", 48_000, 2),
        ("ac3", "ac3", 48_000, 2),
    ):
        sound = samples(rate_hz, channels)
        data = encoded(sound, rate_hz, codec, file_format)
        yield OddSound(f"{codec} in {file_format}, {channels} at {rate_hz} Hz", data, mono(sound, rate_hz), LOSSY, 0.15)
    sound = samples(44_100, 1)
    fragments = encoded(sound, 44_100, "aac", "mp4", movflags="frag_keyframe+empty_moov")
    yield OddSound("MP4 in fragments", fragments, mono(sound, 44_100), LOSSY, 0.15)
    vorbis = written(samples(44_100, 2), 44_100, "OGG", "VORBIS")
    yield OddSound("Vorbis", vorbis, mono(samples(44_100, 2), 44_100), LOSSY, 0.15)


def of_joined() -> Iterator[OddSound]:
    """Files put behind each other: rate, channels or both change part-way."""
    for name, codec, file_format, parts in (
        ("MP3s of two rates", "libmp3lame", "mp3", [(44_100, 1), (48_000, 1)]),
        ("MP3s, one of two channels", "libmp3lame", "mp3", [(44_100, 1), (44_100, 2)]),
        ("MP3s, the second of half the rate", "libmp3lame", "mp3", [(44_100, 2), (22_050, 1)]),
        ("AAC of two rates and channels", "aac", "adts", [(44_100, 2), (24_000, 1)]),
        ("AC-3 of two channels", "ac3", "ac3", [(48_000, 1), (48_000, 2)]),
        ("three MP3s", "libmp3lame", "mp3", [(44_100, 1), (48_000, 2), (32_000, 1)]),
        ("Opus in Ogg", "libopus", "ogg", [(48_000, 1), (48_000, 1)]),
        ("Opus in Ogg, one of two channels", "libopus", "ogg", [(48_000, 1), (48_000, 2)]),
        ("FLAC in Ogg of two rates", "flac", "ogg", [(44_100, 1), (48_000, 1)]),
    ):
        sounds = [(samples(rate, channels, base_hz=200.0 * (i + 1)), rate) for i, (rate, channels) in enumerate(parts)]
        data = b"".join(encoded(sound, rate, codec, file_format) for sound, rate in sounds)
        played = np.concatenate([mono(sound, rate) for sound, rate in sounds])
        yield OddSound(f"joined {name}", data, played, LOSSY, 0.15 * len(parts))


def of_tracks() -> Iterator[OddSound]:
    """More tracks than one: the one that players play."""
    sound, other = samples(16_000, 1), samples(16_000, 1, base_hz=900.0)
    for name, unknown in (("an unknown track before", True), ("a default track after", False)):
        file = io.BytesIO()
        with av.open(file, "w", format="mov" if unknown else "matroska") as container:
            added = [container.add_stream(codec, rate=16_000, layout="mono") for codec in ("pcm_s16be", "pcm_s16le")]
            tracks = [cast("av.AudioStream", track) for track in added]
            if not unknown:
                tracks[0].disposition = Disposition(0)
                tracks[1].disposition = Disposition.default
            for track, of_track in zip(tracks, (other, sound), strict=True):
                container.mux(_packets(track, of_track, 16_000, "mono"))
        data = file.getvalue()
        yield OddSound(f"sound with {name}", data.replace(b"twos", b"zzzz") if unknown else data, mono(sound, 16_000))


SOUNDS = (of_containers, of_pipes, of_lossy, of_joined, of_tracks)
