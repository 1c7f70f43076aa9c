"""Small real media files, made on the spot: a picture, a sound, a film with a sound track."""

import io
import wave
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from PIL import Image

AUDIO_RATE_HZ = 16_000
FILM_AUDIO_RATE_HZ = 24_000


@dataclass(frozen=True)
class Media:
    """Encoded files: PNG, WAV (16 kHz mono) and MP4 (MPEG-4 video, AAC sound at 24 kHz)."""

    image: bytes
    audio: bytes
    video: bytes


def make() -> Media:
    return Media(image=png(112, 84), audio=wav(1.3), video=mp4(2.0, size=(112, 84)))


def png(width: int = 96, height: int = 64, seed: int = 0) -> bytes:
    """A PNG file of coloured noise blocks."""
    blocks = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def tone(seconds: float, rate_hz: int, frequency_hz: float = 330.0) -> np.ndarray:
    """(samples) int16: a tone that grows louder."""
    t = np.arange(int(seconds * rate_hz)) / rate_hz
    return (np.sin(2 * np.pi * frequency_hz * t) * np.linspace(0.1, 0.9, len(t)) * 32767).astype(np.int16)


def wav(seconds: float = 1.0, rate_hz: int = AUDIO_RATE_HZ, frequency_hz: float = 330.0) -> bytes:
    """A mono WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(tone(seconds, rate_hz, frequency_hz).tobytes())
    return file.getvalue()


def mp4(seconds: float = 2.0, sound: bool = True, fps: int = 8, size: tuple[int, int] = (64, 64)) -> bytes:
    """An MP4 file (MPEG-4 video, AAC sound): a block that moves, and a tone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.width, video.height = size
        video.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=FILM_AUDIO_RATE_HZ, layout="mono") if sound else None
        for i in range(int(seconds * fps)):
            picture = np.full((size[1], size[0], 3), 40, dtype=np.uint8)
            at = i * 4 % (size[0] - 16)
            picture[8:24, at : at + 16] = (230, 60, 60 + i * 8 % 190)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode())
        if audio:
            samples = tone(seconds, FILM_AUDIO_RATE_HZ)
            frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.rate, frame.time_base, frame.pts = FILM_AUDIO_RATE_HZ, Fraction(1, FILM_AUDIO_RATE_HZ), 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return file.getvalue()
