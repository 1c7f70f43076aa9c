"""Decoding with limits: what is wrong with a file is said in the words of its field."""

import base64
import io
import socket
import struct
import wave
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from gateway.media.check import check
from gateway.media.fetch import MediaError, decode_data_url
from gateway.settings import GatewaySettings
from services.common.errors import InvalidInput
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile
from services.thinker.family import load_checkpoint
from services.thinker.media import decode_audio, decode_image, decode_video
from services.thinker.preprocess import Preprocessor
from tests.support.samples.media import mp4, png, wav

LIMITS = ThinkerSettings(model="unused", max_image_pixels=10_000, max_audio_s=2.0, max_video_s=2.0)
RATE_HZ = 16000


def file(data: bytes, kind: str = "image") -> MediaFile:
    return MediaFile(kind, data, "messages[0].content[1]")  # pyright: ignore[reportArgumentType]


def every_other(total: int, rate: float) -> np.ndarray:
    return np.arange(0, total, 2)


def test_an_image_is_decoded() -> None:
    assert decode_image(file(png(40, 30)), LIMITS).shape == (30, 40, 3)


def test_an_image_is_turned_upright() -> None:
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by 90 degrees
    Image.new("RGB", (40, 30)).save(out, "JPEG", exif=exif)
    assert decode_image(file(out.getvalue()), LIMITS).shape == (40, 30, 3)


@pytest.mark.parametrize("data", [b"", b"no image", png()[:-40], png(200, 200), png(1, 1)])
def test_a_bad_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_image(file(data), LIMITS)
    assert caught.value.field == "messages[0].content[1]"


@pytest.mark.parametrize("rate_hz", [8000, 16000, 44100])
def test_audio_is_resampled(rate_hz: int) -> None:
    samples = decode_audio(file(wav(1.5, rate_hz), "audio"), RATE_HZ, LIMITS)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 1.5 * RATE_HZ) <= 2
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(spectrum.argmax() / 1.5 - 330) < 1  # the tone kept its pitch


@pytest.mark.parametrize("channels", [2, 8, 64])
def test_channels_are_mixed(channels: int) -> None:
    mono = decode_audio(file(wav(1.0), "audio"), RATE_HZ, LIMITS)
    with wave.open(io.BytesIO(wav(1.0))) as one:
        samples, rate_hz = np.frombuffer(one.readframes(one.getnframes()), "<i2"), one.getframerate()
    out = io.BytesIO()
    with wave.open(out, "wb") as many:
        many.setparams((channels, 2, rate_hz, 0, "NONE", ""))
        many.writeframes(np.repeat(samples, channels).tobytes())
    mixed = decode_audio(file(out.getvalue(), "audio"), RATE_HZ, LIMITS)
    np.testing.assert_allclose(mixed, mono, atol=1e-5)


def three_hours() -> bytes:
    """A WAV file whose header promises three hours, with hardly any data."""
    size_bytes = 3 * 3600 * RATE_HZ * 2
    head = b"RIFF" + struct.pack("<I", size_bytes + 36) + b"WAVEfmt "
    return (
        head
        + struct.pack("<IHHIIHH", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16)
        + b"data"
        + struct.pack("<I", size_bytes)
        + bytes(3200)
    )


@pytest.mark.parametrize("data", [b"", b"no audio", wav(0.0), wav(2.5), three_hours(), mp4(1.0, sound=False)])
def test_bad_audio_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_audio(file(data, "audio"), RATE_HZ, LIMITS)
    assert caught.value.field == "messages[0].content[1]"


def test_a_video_gives_the_frames_asked_for_and_its_sound() -> None:
    video = decode_video(file(mp4(2.0, fps=8), "video"), RATE_HZ, every_other, LIMITS)
    assert video.frames.shape == (8, 64, 64, 3)
    assert video.sound is not None
    assert abs(len(video.sound) - 2.0 * RATE_HZ) < 0.1 * RATE_HZ
    assert decode_video(file(mp4(1.0, sound=False), "video"), RATE_HZ, every_other, LIMITS).sound is None


@pytest.mark.parametrize("data", [b"", b"no video", wav(1.0), mp4(3.0), mp4(1.0)[:600]])
def test_a_bad_video_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_video(file(data, "video"), RATE_HZ, every_other, LIMITS)
    assert caught.value.field == "messages[0].content[1]"


def test_a_file_opens_no_other(tmp_path, monkeypatch) -> None:
    """Playlists and descriptions of streams: what they name is neither read nor asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.wav").write_bytes(wav(1.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        url = f"http://127.0.0.1:{port}/a.wav"
        playlists = [
            "ffconcat version 1.0\nfile secret.wav\n",
            f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n",
            f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio {port} RTP/AVP 0\n",
            f'<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><BaseURL>{url}</BaseURL></Period></MPD>',
        ]
        for text in playlists:
            with pytest.raises(InvalidInput):
                decode_audio(file(text.encode(), "audio"), RATE_HZ, LIMITS)
            with pytest.raises(InvalidInput):
                decode_video(file(text.encode(), "video"), RATE_HZ, every_other, LIMITS)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "TGA", "ICNS", "PCX", "JPEG2000"])
def test_an_image_of_another_format_is_not_opened(kind: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, kind)
    with pytest.raises(InvalidInput, match="PNG, JPEG"):
        decode_image(file(out.getvalue()), LIMITS)


def jpeg(color: tuple[int, int, int], size: tuple[int, int] = (64, 48), file_format: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, file_format)
    return file.getvalue()


def frames_url(*frames: bytes) -> str:
    """As vLLM's `encode_video_url` has them."""
    return f"data:video/jpeg;base64,{','.join(base64.b64encode(frame).decode() for frame in frames)}"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 40])
def test_a_list_of_frames_is_a_video_with_each_of_them(tiny_checkpoint: Path, count: int) -> None:
    limits, checkpoint = ThinkerSettings(model="m"), load_checkpoint(str(tiny_checkpoint))
    preprocessor: Any = SimpleNamespace(_settings=limits, _checkpoint=checkpoint)
    frames = [jpeg((10 + 6 * i, 200 - 5 * i, 40 * (i % 6))) for i in range(count)]
    expected = [decode_image(file(frame), limits) for frame in (*frames, *frames[-1:] * (count % 2))]
    for url in (frames_url(*frames), quote(frames_url(*frames), safe=":;,/")):
        data = decode_data_url(url, "video", 10**6)
        check("video", data, GatewaySettings(pipeline=Path("unused.yaml")))
        sampler = partial(Preprocessor.sample_frames, preprocessor)
        video = decode_video(file(data, "video"), 16000, sampler, limits)
        assert video.frames.shape == (len(expected), 48, 64, 3)
        assert video.sound is None
        for got, frame in zip(video.frames, expected, strict=True):
            assert np.abs(got.astype(int) - np.asarray(frame).astype(int)).max() <= 3  # decoders of JPEG round


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (frames_url(jpeg((9, 9, 9)), jpeg((9, 9, 9), (32, 48))), "frame 1 has 32 x 48 pixels, but frame 0 has 64 x 48"),
        (frames_url(jpeg((9, 9, 9)), jpeg((9, 9, 9), file_format="PNG")), "frame 1 is a PNG file; send JPEG files"),
        (frames_url(jpeg((9, 9, 9)), b""), "corrupt or cut off"),
        (frames_url(b"no picture"), "corrupt or cut off"),
        ("data:video/jpeg;base64,", "corrupt or cut off"),
        (f"{frames_url(jpeg((9, 9, 9)))},a$", "not valid base64"),
    ],
)
def test_a_list_of_other_things_is_refused(url: str, says: str) -> None:
    with pytest.raises(MediaError, match=says):
        decode_data_url(url, "video", 10**6)
