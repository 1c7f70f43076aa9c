"""Sound of realtime sessions: rates, G.711, speed, bytes that end anywhere."""

from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr

from gateway.dialects.realtime import g711
from gateway.dialects.realtime.audio import MODEL_RATE_HZ, PCM_RATE_HZ, InputAudioStream, OutputAudioStream

QUESTION = Path(__file__).parents[2] / "cli/assets/question.wav"
LAWS = [("mu", "pcm_mulaw", "audio/pcmu"), ("a", "pcm_alaw", "audio/pcma")]


def speech(rate_hz: int) -> np.ndarray:
    samples, own_rate_hz = soundfile.read(QUESTION, dtype="int16")
    return soxr.resample(samples, own_rate_hz, rate_hz)


def tone(hz: float, seconds: float, rate_hz: int) -> np.ndarray:
    return np.rint(8000 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(np.int16)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


def libav_encoded(samples: np.ndarray, codec: str) -> bytes:
    encoder = av.CodecContext.create(codec, "w")
    assert isinstance(encoder, av.AudioCodecContext)
    encoder.sample_rate, encoder.layout, encoder.format = g711.RATE_HZ, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
    frame.sample_rate = g711.RATE_HZ
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def libav_decoded(data: bytes, codec: str) -> np.ndarray:
    decoder = av.CodecContext.create(codec, "r")
    assert isinstance(decoder, av.AudioCodecContext)
    decoder.sample_rate, decoder.layout = g711.RATE_HZ, "mono"
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in decoder.decode(av.Packet(data))])


@pytest.mark.parametrize(("law", "codec"), [(law, codec) for law, codec, _ in LAWS])
def test_every_g711_code_means_what_libav_says(law, codec):
    codes = bytes(range(256))
    np.testing.assert_array_equal(g711.decode(codes, law), libav_decoded(codes, codec))


@pytest.mark.parametrize(("law", "codec"), [(law, codec) for law, codec, _ in LAWS])
def test_every_sample_gets_the_nearest_g711_code(law, codec):
    samples = np.arange(-32768, 32768).astype(np.int16)
    ours, theirs = g711.encode(samples, law), libav_encoded(samples, codec)
    exact = samples.astype(np.int32)
    error = np.abs(g711.decode(ours, law) - exact)
    assert (error <= np.abs(g711.decode(theirs, law) - exact)).all()
    # libav drops samples' lowest bits, and so differs where two codes are about as near.
    different = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
    assert different.mean() < 0.01
    assert np.frombuffer(g711.encode(np.zeros(1, np.int16), law), np.uint8)[0] == (0xFF if law == "mu" else 0xD5)


@pytest.mark.parametrize("size", [1, 7, 4801, 10**6])
def test_24_khz_pcm_becomes_16_khz_however_it_is_cut(size):
    sent = speech(PCM_RATE_HZ)
    audio = InputAudioStream("audio/pcm")
    heard = np.concatenate([*map(audio.add, pieces(sent.tobytes(), size)), audio.flush()])
    expected = soxr.resample(sent, PCM_RATE_HZ, MODEL_RATE_HZ)
    assert len(heard) == len(sent) * MODEL_RATE_HZ // PCM_RATE_HZ
    np.testing.assert_allclose(heard, expected[: len(heard)], atol=2)


@pytest.mark.parametrize(("law", "audio_format"), [(law, audio_format) for law, _, audio_format in LAWS])
def test_g711_is_heard_as_speech(law, audio_format):
    sent = speech(g711.RATE_HZ)
    audio = InputAudioStream(audio_format)
    heard = np.concatenate([*map(audio.add, pieces(g711.encode(sent, law), 160)), audio.flush()])
    expected = soxr.resample(sent, g711.RATE_HZ, MODEL_RATE_HZ)
    assert len(heard) == len(expected)
    noise = heard.astype(float) - expected
    assert 10 * np.log10(np.mean(np.square(expected, dtype=float)) / np.mean(noise**2)) > 30  # dB


def test_times_count_from_the_beginning_of_the_session():
    audio = InputAudioStream("audio/pcm", begin_ms=500.0)
    given = len(audio.add(bytes(2 * 2400 + 1)))
    assert audio.received_ms == 600.0
    assert audio.given_ms == pytest.approx(500 + given / 16)
    assert 0 < 600 - audio.given_ms <= 40  # what the filter holds back
    given += len(audio.flush())
    assert (given, audio.given_ms) == (1600, 600.0)
    audio.add(bytes(1))  # the other half of the last sample
    assert audio.received_ms == pytest.approx(600 + 1 / 24)


def test_flushes_move_no_later_sound():
    audio, sent = InputAudioStream("audio/pcm"), tone(440, 2.0, PCM_RATE_HZ).tobytes()
    heard = [part for piece in pieces(sent, 2 * 601) for part in (audio.add(piece), audio.flush())]
    assert sum(map(len, heard)) == pytest.approx(32_000, abs=1)
    assert audio.received_ms == 2000.0
    assert audio.given_ms == pytest.approx(2000.0, abs=1 / 16)


@pytest.mark.parametrize("rate_hz", [24_000, 16_000, 44_100])
@pytest.mark.parametrize("audio_format", ["audio/pcm", "audio/pcmu", "audio/pcma"])
@pytest.mark.parametrize("speed", [0.25, 1.0, 1.5])
def test_answers_have_the_sessions_rate_and_speed_and_keep_their_pitch(rate_hz, audio_format, speed):
    audio = OutputAudioStream(audio_format, rate_hz, speed)
    sent = pieces(tone(440, 1.0, rate_hz).tobytes(), 3840)
    data = b"".join(map(audio.add, sent)) + audio.close()
    if audio_format == "audio/pcm":
        heard, out_hz = np.frombuffer(data, "<i2"), PCM_RATE_HZ
    else:
        heard, out_hz = g711.decode(data, "mu" if audio_format == "audio/pcmu" else "a"), g711.RATE_HZ
    assert len(heard) / out_hz == pytest.approx(1 / speed, rel=0.05)
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard))))
    assert spectrum.argmax() * out_hz / len(heard) == pytest.approx(440, abs=10)


def test_an_answer_in_the_models_own_rate_passes_unchanged():
    sent = speech(PCM_RATE_HZ).tobytes()
    audio = OutputAudioStream("audio/pcm", PCM_RATE_HZ)
    assert b"".join(map(audio.add, pieces(sent, 3840))) + audio.close() == sent


def test_half_a_sample_of_an_answer_is_refused():
    with pytest.raises(ValueError, match="size"):
        OutputAudioStream("audio/pcm", PCM_RATE_HZ).add(b"\0")
