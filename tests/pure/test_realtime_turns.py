"""Where turns begin, pause, go on and end, by probabilities that were made up."""

import pytest

from gateway.dialects.realtime.input.turn_detector import (
    STEP_MS,
    IdleTimeout,
    Pause,
    Resumption,
    SpeechEnd,
    SpeechStart,
    TurnDetector,
)
from gateway.dialects.realtime.settings.session import SemanticVad, ServerVad

SPEECH, BETWEEN, SILENCE = 0.9, 0.4, 0.05  # of a threshold of 0.5: 0.35 is where speech ends


class Clock:
    """Feeds a detector step by step and keeps its events."""

    def __init__(self, turn_detection, begin_ms=0):
        self.turns, self.now_ms = TurnDetector(turn_detection, begin_ms), begin_ms

    def hear(self, *parts):
        """(probability, steps) each; returns the events."""
        events = []
        for probability, steps in parts:
            for _ in range(steps):
                self.now_ms += STEP_MS
                events += self.turns.add(probability, self.now_ms)
        return events


def test_a_turn_of_server_vad():
    clock = Clock(ServerVad())
    events = clock.hear((SILENCE, 100), (SPEECH, 50), (SILENCE, 100))
    speech_ms, quiet_ms = 100 * STEP_MS, 150 * STEP_MS
    assert events == [
        SpeechStart(speech_ms - 300),
        Pause(quiet_ms + 160),
        SpeechEnd(quiet_ms + 512, cut_ms=quiet_ms + 160),  # 500 ms in whole steps
    ]
    assert not clock.turns.speaking


def test_speech_that_goes_on_voids_the_pause_and_its_cut():
    clock = Clock(ServerVad())
    events = clock.hear((SPEECH, 50), (SILENCE, 10), (SPEECH, 20), (SILENCE, 20))
    assert events == [
        SpeechStart(0),
        Pause(55 * STEP_MS),
        Resumption(),
        Pause(85 * STEP_MS),
        SpeechEnd(96 * STEP_MS, cut_ms=85 * STEP_MS),
    ]


def test_a_silence_within_a_word_is_no_pause():
    clock = Clock(ServerVad())
    assert clock.hear((SPEECH, 9), (SILENCE, 4), (SPEECH, 9)) == [SpeechStart(0)]
    assert clock.turns.speaking


def test_clicks_begin_no_turn():
    clock = Clock(ServerVad())
    assert clock.hear(*[(SPEECH, 1), (SILENCE, 3)] * 20) == []
    assert not clock.turns.speaking


def test_what_lies_between_the_thresholds_goes_on_with_what_was():
    clock = Clock(ServerVad())
    assert clock.hear((BETWEEN, 20)) == []
    assert clock.hear((SPEECH, 2), (BETWEEN, 50)) == [SpeechStart(20 * STEP_MS - 300)]
    assert [type(event) for event in clock.hear((SILENCE, 1), (BETWEEN, 20))] == [Pause, SpeechEnd]


@pytest.mark.parametrize(("threshold", "begins"), [(0.3, True), (0.6, False)])
def test_the_threshold_is_the_sessions(threshold, begins):
    assert bool(Clock(ServerVad(threshold=threshold)).hear((0.5, 20))) is begins


@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_a_turn_ends_at_the_lowest_thresholds(threshold):
    events = Clock(ServerVad(threshold=threshold)).hear((SPEECH, 20), (0.0, 30))
    assert [type(event) for event in events] == [SpeechStart, Pause, SpeechEnd]


@pytest.mark.parametrize("silence_ms", [0, 100, 160])
def test_a_silence_as_short_as_a_pause_ends_the_turn_at_once(silence_ms):
    clock = Clock(ServerVad(silence_duration_ms=silence_ms))
    steps = max(1, -(-silence_ms // STEP_MS))
    end_ms = (20 + steps) * STEP_MS
    assert clock.hear((SPEECH, 20), (SILENCE, 20)) == [SpeechStart(0), SpeechEnd(end_ms, end_ms)]


def test_the_padding_takes_no_sound_of_the_turn_before_it():
    clock = Clock(ServerVad(prefix_padding_ms=2000))
    stopped = clock.hear((SILENCE, 100), (SPEECH, 20), (SILENCE, 16))[-1]
    assert isinstance(stopped, SpeechEnd)
    assert clock.hear((SPEECH, 2)) == [SpeechStart(stopped.cut_ms)]


def test_the_padding_ends_where_the_sound_begins():
    assert Clock(ServerVad(), begin_ms=5000).hear((SILENCE, 2), (SPEECH, 2)) == [SpeechStart(5000)]


def test_a_cleared_turn_ends_without_an_event_and_what_follows_is_a_new_one():
    clock = Clock(ServerVad())
    clock.hear((SPEECH, 20), (SILENCE, 6))
    clock.turns.clear(clock.now_ms)
    assert not clock.turns.speaking
    assert clock.hear((SILENCE, 30)) == []
    clock.turns.clear(clock.now_ms)
    assert clock.hear((SPEECH, 2)) == [SpeechStart(clock.now_ms - 2 * STEP_MS)]


def test_other_rules_hold_for_the_turn_that_goes_on():
    clock = Clock(ServerVad(silence_duration_ms=5000))
    clock.hear((SPEECH, 20), (SILENCE, 20))
    clock.turns.rules = ServerVad(silence_duration_ms=200)
    assert clock.hear((SILENCE, 1)) == [SpeechEnd(41 * STEP_MS, cut_ms=25 * STEP_MS)]


@pytest.mark.parametrize(("eagerness", "silence_ms"), [("low", 1200), ("medium", 800), ("auto", 800), ("high", 400)])
def test_semantic_vad_waits_by_its_eagerness(eagerness, silence_ms):
    clock = Clock(SemanticVad(type="semantic_vad", eagerness=eagerness))
    started, paused, stopped = clock.hear((SILENCE, 50), (SPEECH, 50), (SILENCE, 100))
    assert started == SpeechStart(50 * STEP_MS - 300)
    assert paused == Pause(105 * STEP_MS)
    assert isinstance(stopped, SpeechEnd)
    assert silence_ms <= stopped.audio_end_ms - 100 * STEP_MS < silence_ms + STEP_MS
    assert stopped.cut_ms == 105 * STEP_MS


@pytest.mark.parametrize(("eagerness", "most_ms"), [("low", 8000), ("medium", 4000), ("auto", 4000), ("high", 2000)])
def test_semantic_vad_waits_longer_for_who_pauses_but_not_for_ever(eagerness, most_ms):
    clock, steps = Clock(SemanticVad(type="semantic_vad", eagerness=eagerness)), 0
    clock.hear((SPEECH, 10))
    while clock.turns.speaking and steps < 500:
        steps += 4  # each pause longer than the last
        clock.hear((SILENCE, steps))
        if clock.turns.speaking:
            clock.hear((SPEECH, 10))
    waited_ms = steps * STEP_MS
    assert most_ms <= waited_ms < most_ms + 4 * STEP_MS


def test_semantic_vad_forgets_pauses_with_their_turn():
    clock = Clock(SemanticVad(type="semantic_vad", eagerness="high"))
    assert clock.hear((SPEECH, 10), (SILENCE, 12), (SPEECH, 10), (SILENCE, 17))[-1] == Pause(37 * STEP_MS)
    assert isinstance(clock.hear((SILENCE, 1))[-1], SpeechEnd)  # 1.5 times 384 ms
    assert isinstance(clock.hear((SPEECH, 10), (SILENCE, 13))[-1], SpeechEnd)  # 400 ms


def test_who_says_nothing_after_an_answer_is_asked_once():
    clock = Clock(ServerVad(idle_timeout_ms=6000))
    assert clock.hear((SILENCE, 500)) == []  # there was no answer yet
    played_ms = clock.now_ms + 1000
    clock.turns.idle_from_ms = played_ms
    (timeout,) = clock.hear((SILENCE, 1000))
    assert isinstance(timeout, IdleTimeout)
    assert timeout.audio_start_ms == played_ms
    assert played_ms + 6000 <= timeout.audio_end_ms < played_ms + 6000 + STEP_MS


@pytest.mark.parametrize("rules", [ServerVad(), SemanticVad(type="semantic_vad")])
def test_without_an_idle_timeout_nobody_is_asked(rules):
    clock = Clock(rules)
    clock.turns.idle_from_ms = 0
    assert clock.hear((SILENCE, 2000)) == []


def test_who_speaks_is_not_idle():
    clock = Clock(ServerVad(idle_timeout_ms=5000))
    clock.turns.idle_from_ms = 0
    events = clock.hear((SILENCE, 100), (SPEECH, 200), (SILENCE, 500))
    assert [type(event) for event in events] == [SpeechStart, Pause, SpeechEnd]
    clock.turns.idle_from_ms = clock.now_ms
    clock.turns.idle_from_ms = None  # another answer has begun
    assert clock.hear((SILENCE, 500)) == []


def test_a_turn_that_does_not_end_is_ended():
    turns, heard = TurnDetector(ServerVad()), []
    for step in range(1, 19_000):
        heard += turns.add(0.9, step * STEP_MS)
    assert [type(event).__name__ for event in heard] == ["SpeechStart", "SpeechEnd", "SpeechStart"]
    assert heard[1].audio_end_ms == heard[1].cut_ms == pytest.approx(600_064, abs=2 * STEP_MS)
