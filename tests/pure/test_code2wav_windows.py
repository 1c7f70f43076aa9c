"""Cuts of utterances into windows, and the chunk policy with them: steps of given sizes, ends that are windows."""

import pytest

from services.code2wav.config import Code2WavSettings
from services.code2wav.family import DecoderSpec
from services.code2wav.policy import ChunkPolicy, StepPlan
from services.code2wav.windows import Windows, WindowSettings
from tests.pure.test_code2wav_policy import FakeStream, playing

WINDOWS = Windows(sizes=(24, 12, 24, 48, 96), past=24, future=12)
LAG = 17  # frames whose samples a decoder holds back beside those of the context
FRAME_S = 0.02
SPEC = DecoderSpec(24_000, 480, (9,), lookahead_frames=12 + LAG, windows=WINDOWS)


def policy(max_batch_frames: int = 96) -> ChunkPolicy:
    return ChunkPolicy(96, max_batch_frames, 0.1, decodable=SPEC.decodable, in_windows=True)


def test_windows_follow_on_each_other_and_each_step_brings_what_the_next_one_lacks():
    taken, start, steps = 0, 0, []
    for size in (24, 12, 24, 48, 96, 96):
        assert WINDOWS.size_at(start) == WINDOWS.size_at(start + size - 1) == size
        steps.append(WINDOWS.step_frames(taken))
        taken, start = taken + steps[-1], start + size
        assert taken == start + WINDOWS.future
    assert steps == [36, 12, 24, 48, 96, 96]
    assert (WINDOWS.largest_step, WINDOWS.most_decoded) == (96, 24 + 96 + 12)


@pytest.mark.parametrize(
    ("frames", "complete", "taken", "step"),
    [
        (35, False, 0, 0),
        (36, False, 0, 36),
        (90, True, 0, 36),
        (35, True, 0, 35),
        (11, False, 36, 0),
        (12, False, 36, 12),
    ],
)
def test_a_step_takes_exactly_its_frames_or_the_rest_of_a_complete_stream(frames, complete, taken, step):
    assert SPEC.decodable(frames, complete, taken) == step


def test_an_utterance_in_one_piece_is_handed_over_in_large_steps():
    whole = DecoderSpec(24_000, 480, (9,), lookahead_frames=1000, windows=Windows(()))
    assert whole.decodes_whole
    assert not SPEC.decodes_whole
    assert whole.decodable(63, False, 64) == 0
    assert whole.decodable(63, True, 64) == 63
    assert whole.decodable(500, False, 128) == 64


def test_a_window_is_due_as_soon_as_its_frames_are_there_whatever_the_lead():
    stream = playing(11, lead_s=5.0, now=0.0)
    stream.frames_decoded = 36
    assert policy().choose([stream], 0.0) is None
    stream.put(1, 0.0)
    assert policy().choose([stream], 0.0) == StepPlan(12, [0])


def test_only_steps_of_one_size_are_shared_and_the_nearest_to_running_dry_goes_first():
    late, early, new = playing(30, 0.3, 0.0), playing(12, 0.2, 0.0), FakeStream()
    late.frames_decoded, early.frames_decoded = 48, 36  # 24 and 12 frames are next
    new.put(40, 0.1)
    chunks = policy()
    assert chunks.choose([late, early], 0.0) == StepPlan(12, [1])
    early.frames_decoded, early.frames_ready = 48, 24
    assert chunks.choose([late, early], 0.0) == StepPlan(24, [1, 0])
    assert chunks.choose([late, early, new], 0.1) == StepPlan(36, [2])


def longest_silence(speed: float, step_s: float, frame_s: float, frames: int = 1000) -> float:
    """Seconds of silence for a listener, of a talker `speed` times as fast as speech, the last frame left out.

    Args:
        step_s, frame_s: what a step takes: for itself and for each frame that it decodes.
    """
    chunks, stream, now, silence = policy(), FakeStream(), 0.0, 0.0
    arrivals = [i * FRAME_S / speed for i in range(frames)]
    heard = 0
    while arrivals or stream.frames_ready:
        while arrivals and arrivals[0] <= now:
            stream.put(1, arrivals.pop(0))
        plan = chunks.choose([stream], now)
        if not isinstance(plan, StepPlan):
            if not arrivals:
                break
            now = arrivals[0]
            continue
        now += step_s + frame_s * (plan.frames + WINDOWS.past + WINDOWS.future)
        stream.frames_ready -= plan.frames
        stream.frames_decoded += plan.frames
        end = max(0, stream.frames_decoded - WINDOWS.future - LAG)
        lead_s = stream.playback.sent((end - heard) * FRAME_S, stream.frames_ready, now)
        heard = end
        silence = max(silence, -(lead_s or 0.0))
    return silence


def test_a_talker_a_little_over_twice_as_fast_as_speech_never_leaves_the_listener_dry():
    assert longest_silence(2.2, step_s=0.02, frame_s=0.0002) == 0.0
    assert longest_silence(1.5, step_s=0.02, frame_s=0.0002) > 0.0


def test_settings_go_before_the_decoders_own_and_faults_name_the_setting():
    assert WindowSettings().over(WINDOWS) == WINDOWS
    assert WindowSettings("windowed", (12, 24)).over(WINDOWS) == Windows((12, 24), 24, 12)
    assert WindowSettings("whole").over(WINDOWS) == Windows(())
    with pytest.raises(ValueError, match="--decoding whole has no windows"):
        WindowSettings("whole", (12,)).over(WINDOWS)
    with pytest.raises(ValueError, match=r"--window-frames: 24, 13 must be multiples of 12"):
        Windows((24, 13), 12, 12).check(12)
    with pytest.raises(ValueError, match="--window-frames: 0 must be at least 12"):
        Windows((0,)).check(12)


def test_flags_become_settings():
    arguments = ["--model", "m", "--window-frames", "24,12,48"]
    assert Code2WavSettings.load(arguments).windows == WindowSettings(None, (24, 12, 48))
    assert Code2WavSettings.load(["--model", "m", "--decoding", "whole"]).windows == WindowSettings("whole")
    with pytest.raises(SystemExit, match="window_frames"):
        Code2WavSettings.load(["--model", "m", "--window-frames", "many"])
