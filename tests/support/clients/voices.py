"""Talkers that imitate voices, samples for them, and requests about both."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soundfile

from gateway.access.api_keys import digest
from quartet.v1 import server_info_pb2, talker_pb2, tensor_pb2
from tests.support.systems.gateway import SPEECH as OMNI
from tests.support.systems.gateway import Running

VOICES, SPEECH = "/v1/audio/voices", "/v1/audio/speech"
ASK = {"model": "scripted", "input": "Good morning.", "response_format": "pcm"}
FIELDS = {"name": "anna", "consent": "cons_1"}
PIPELINE = OMNI.with_name("speech.yaml")  # a talker and a code2wav
RATE_HZ = 24_000  # of what the talker imitates
TONE_HZ = 440
IMITATOR = server_info_pb2.TalkerInfo(
    max_context_positions=4096, reads_text=True, voice_sample_rate_hz=RATE_HZ, languages=["chinese", "english"]
)


def told(**facts: Any) -> server_info_pb2.TalkerInfo:
    """That talker, with other facts."""
    info = server_info_pb2.TalkerInfo(**facts)
    changed = server_info_pb2.TalkerInfo()
    changed.CopyFrom(IMITATOR)
    changed.MergeFrom(info)
    return changed


def tone(seconds: float = 1.5, rate_hz: int = 16_000, loudness: float = 0.3, channels: int = 1) -> np.ndarray:
    """(samples, channels) float32. Of two channels the second is silent."""
    sound = loudness * np.sin(2 * np.pi * TONE_HZ * np.arange(round(seconds * rate_hz)) / rate_hz)
    return np.pad(sound[:, None], ((0, 0), (0, channels - 1))).astype(np.float32)


def wav(samples: np.ndarray, rate_hz: int = 16_000, subtype: str = "PCM_16") -> bytes:
    """A WAV file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV", subtype=subtype)
    return file.getvalue()


def heard(start: talker_pb2.SpeakStart) -> np.ndarray:
    """The samples (samples,) float32 that a talker was sent."""
    samples = start.text.voice_sample.samples
    assert samples.dtype == tensor_pb2.DATA_TYPE_FLOAT32
    found = np.frombuffer(samples.inline, "<f4")
    assert list(samples.shape) == [len(found)]
    return found


def pitch_hz(samples: np.ndarray, rate_hz: int = RATE_HZ) -> float:
    """Of the loudest tone in it."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate_hz / len(samples))


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


SAMPLE = wav(tone())


async def upload(gateway: Running, sample: bytes | None = SAMPLE, key: str = "", **fields: Any) -> httpx.Response:
    files = {} if sample is None else {"audio_sample": ("sample", sample)}
    # a form that has no file is still one
    plain = {name: (None, value) for name, value in (FIELDS | fields).items() if value is not None}
    return await gateway.http.post(VOICES, files={**files, **plain}, headers=bearer(key))


async def speak(gateway: Running, key: str = "", **members: Any) -> httpx.Response:
    return await gateway.http.post(SPEECH, json=ASK | members, headers=bearer(key))


async def listed(gateway: Running, key: str = "") -> list[str]:
    return [voice["name"] for voice in (await gateway.http.get(VOICES, headers=bearer(key))).json()["voices"]]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def keys(folder: Path) -> Path:
    """A file with the keys of alice and bob, which are their names."""
    file = folder / "keys.yaml"
    entries = [f"  - name: {name}\n    sha256: {digest(name)}\n" for name in ("alice", "bob")]
    file.write_text("keys:\n" + "".join(entries))
    return file
