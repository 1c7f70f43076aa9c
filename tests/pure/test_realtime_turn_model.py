"""The spectrogram that a turn model reads, and what its word on a pause does."""

import os
from pathlib import Path

import numpy as np
import pytest
import soxr
from transformers import WhisperFeatureExtractor

from gateway.dialects.realtime.input.turn_detector import (
    STEP_MS,
    Pause,
    Resumption,
    SpeechEnd,
    SpeechStart,
    TurnDetector,
)
from gateway.dialects.realtime.settings.session import SemanticVad
from gateway.listening.onnx import ModelFileError
from gateway.listening.turn_model import TurnModel, features
from tests.support.samples.espeak import recording

FILE = os.environ.get("QUARTET_TEST_TURN_MODEL")


@pytest.mark.parametrize("seconds", [1, 8, 20])
def test_what_the_model_reads_is_what_transformers_make_of_the_last_8_s(seconds: int) -> None:
    draw, count = np.random.default_rng(0), seconds * 16_000
    extract = WhisperFeatureExtractor(chunk_length=8)
    for sound in (draw.normal(size=count) * 0.1, np.sin(np.arange(count) / 7) * np.linspace(0, 1, count) ** 4):
        samples = (sound * 32767).astype(np.int16)
        last = np.pad(samples[-128_000:] / 32768, (max(0, 128_000 - count), 0))
        told = extract(last, sampling_rate=16_000, do_normalize=True, return_tensors="np")["input_features"][0]
        assert told.shape == (80, 800)
        assert np.abs(features(samples) - told).max() < 1e-4


@pytest.mark.parametrize(("completeness", "silence_ms"), [(0.99, 250), (0.6, 800), (0.2, 4000), (None, 800)])
def test_how_long_a_pause_ends_a_turn(completeness: float | None, silence_ms: int) -> None:
    turns, time_ms = TurnDetector(SemanticVad(type="semantic_vad", eagerness="medium")), 0

    def hear(probability: float, steps: int) -> list:
        nonlocal time_ms
        happened = []
        for _ in range(steps):
            time_ms += STEP_MS
            for event in turns.add(probability, time_ms):
                happened.append(type(event))
                if isinstance(event, Pause) and completeness is not None:
                    turns.completeness = completeness
        return happened

    assert hear(0.9, 10) == [SpeechStart]
    begin_ms, heard = time_ms, []
    while SpeechEnd not in heard:
        heard += hear(0.0, 1)
    assert time_ms - begin_ms == pytest.approx(silence_ms, abs=STEP_MS)


def test_a_word_on_one_pause_is_none_on_the_next() -> None:
    turns, heard = TurnDetector(SemanticVad(type="semantic_vad", eagerness="high")), []
    probabilities = [0.9] * 10 + [0.0] * 8 + [0.9] * 5 + [0.0] * 13
    for index, probability in enumerate(probabilities):
        for event in turns.add(probability, (index + 1) * STEP_MS):
            heard.append(type(event))
            if heard.count(Pause) == 1 and isinstance(event, Pause):
                turns.completeness = 0.1
    assert heard == [SpeechStart, Pause, Resumption, Pause, SpeechEnd]


def test_a_file_that_is_no_turn_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "turn.onnx"
    file.write_bytes(b"no model")
    with pytest.raises(ModelFileError, match=r"turn\.onnx (needs onnxruntime|is no model)"):
        TurnModel(file)


@pytest.mark.skipif(FILE is None, reason="$QUARTET_TEST_TURN_MODEL names a Smart Turn model's ONNX file")
async def test_a_turn_model_hears_a_turn() -> None:
    model, spoken = TurnModel(Path(FILE or "")), recording(3.0, [0.1])
    samples = soxr.resample(np.frombuffer(spoken.pcm16, "<i2"), spoken.rate_hz, 16_000)
    assert 0.0 < await model.is_complete(samples) < 1.0
    model.close()
