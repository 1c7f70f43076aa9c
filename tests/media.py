"""Small real media files, made on the spot: a picture, a sound, a film with a sound track."""

import io
import wave
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from PIL import Image

AUDIO_RATE_HZ = 16_000


@dataclass(frozen=True)
class Media:
    """Encoded files: PNG, WAV (16 kHz mono) and MP4 (video and AAC)."""

    image: bytes
    audio: bytes
    video: bytes


def chirp(seconds: float, rate_hz: int = AUDIO_RATE_HZ) -> np.ndarray:
    """A rising tone with an envelope, int16 (samples,)."""
    t = np.arange(int(seconds * rate_hz)) / rate_hz
    return (9000 * np.sin(2 * np.pi * (200 * t + 300 * t**2)) * np.abs(np.sin(5 * t))).astype(np.int16)


def picture(width: int, height: int, phase: float = 0.0) -> np.ndarray:
    """Coloured waves, uint8 (height, width, 3)."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 9 + phase + k) + np.cos(y / (7 + k) - phase) for k in range(3)]
    return (np.stack(waves, -1) * 60 + 128).astype(np.uint8)


def png(width: int = 112, height: int = 84) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(width, height)).save(file, "PNG")
    return file.getvalue()


def wav(seconds: float = 1.3) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(AUDIO_RATE_HZ)
        out.writeframes(chirp(seconds).tobytes())
    return file.getvalue()


def mp4(seconds: float = 2.0, fps: int = 8) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        video = out.add_stream("mpeg4", rate=fps)
        video.width, video.height, video.pix_fmt = 112, 84, "yuv420p"
        audio = out.add_stream("aac", rate=AUDIO_RATE_HZ, layout="mono")
        for i in range(int(seconds * fps)):
            frame = av.VideoFrame.from_ndarray(picture(112, 84, i / 3), format="rgb24")
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
        samples = chirp(seconds)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = AUDIO_RATE_HZ, Fraction(1, AUDIO_RATE_HZ), 0
        out.mux(audio.encode(frame))
        out.mux(audio.encode(None))
    return file.getvalue()


def make() -> Media:
    return Media(image=png(), audio=wav(), video=mp4())
