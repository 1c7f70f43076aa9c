"""What `quartet talk` makes of a realtime session's events: what is heard, what is cut, and where."""

import base64
import sys
from array import array
from typing import Any

import pytest

from cli.talking import devices
from cli.talking.dialogue import MODEL, NOTE, USER, Dialogue
from cli.talking.sound import PIECE_MS, RATE_HZ, SILENCE_DB, InputMeter, PlaybackBuffer, level_db
from cli.terminal import CommandError

SPEECH = array("h", [8000, -8000] * (RATE_HZ * PIECE_MS // 2000)).tobytes()
SILENCE = bytes(len(SPEECH))
SECOND = SPEECH * (1000 // PIECE_MS)


class Talk:
    """A dialogue whose events the test makes up, and what it has shown and sent."""

    def __init__(self, **options: Any) -> None:
        self.playback, self.sent = PlaybackBuffer(), InputMeter()
        self.said: list[tuple[str, str]] = []
        self.dialogue = Dialogue(self.playback, self.sent, lambda *line: self.said.append(line), **options)
        self.now_s = 0.0

    def take(self, kind: str, **members: Any) -> list[dict[str, Any]]:
        return self.dialogue.take({"type": kind, **members}, self.now_s)

    def speak(self, pieces: int, piece: bytes = SPEECH) -> None:
        for _ in range(pieces):
            self.now_s += PIECE_MS / 1000
            self.sent.add(piece, self.now_s)

    def turn(self) -> None:
        """The user says something, for a second."""
        begin_ms = round(self.sent.ms)
        self.speak(25)
        self.take("input_audio_buffer.speech_started", audio_start_ms=begin_ms, item_id="user")
        self.speak(15, SILENCE)
        self.take("input_audio_buffer.speech_stopped", audio_end_ms=round(self.sent.ms), item_id="user")
        self.take("input_audio_buffer.committed", item_id="user")

    def answer(self, id: str, seconds: int, *, ended: bool) -> None:
        """The model says something, all of which is here."""
        self.take("response.created")
        self.take("response.output_audio_transcript.delta", item_id=id, delta="Two words.")
        sound = base64.b64encode(SECOND * seconds).decode()
        self.take("response.output_audio.delta", item_id=id, delta=sound)
        if ended:
            self.end(id, "completed")

    def end(self, id: str, status: str) -> None:
        self.take("response.output_audio.done", item_id=id)
        usage = {"input_tokens": 7, "input_token_details": {"cached_tokens": 4}, "output_tokens": 9}
        self.take("response.done", response={"status": status, "usage": usage})

    def hear(self, ms: int) -> bytes:
        self.now_s += ms / 1000
        heard = self.playback.pull(RATE_HZ * ms // 1000)
        self.dialogue.tick(self.now_s)
        return heard


def cut(id: str, end_ms: int) -> list[dict[str, Any]]:
    place = {"item_id": id, "content_index": 0, "audio_end_ms": end_ms}
    return [{"type": "conversation.item.truncate", **place}, {"type": "conversation.item.retrieve", "item_id": id}]


@pytest.mark.parametrize("ended", [True, False])
def test_speech_cuts_an_answer_where_it_was_heard(ended):
    talk = Talk(may_interrupt=True)
    talk.turn()
    talk.answer("a", 3, ended=ended)
    assert talk.hear(1230) == (SECOND * 2)[: 1230 * RATE_HZ // 1000 * 2]
    assert talk.take("input_audio_buffer.speech_started", audio_start_ms=1, item_id="b") == cut("a", 1230)
    assert not any(talk.hear(100))
    talk.take("response.output_audio.delta", item_id="a", delta=base64.b64encode(SECOND).decode())  # was on its way
    assert not any(talk.hear(100))
    if not ended:
        talk.end("a", "cancelled")
    item = {"id": "a", "content": [{"type": "output_audio", "transcript": "Two"}]}
    talk.take("conversation.item.retrieved", item=item)
    assert [what for who, what in talk.said if who == MODEL] == ["Two (interrupted)"]
    assert talk.dialogue.interruptions == 1


def test_an_answer_that_was_heard_is_not_cut():
    talk = Talk(may_interrupt=True)
    talk.turn()
    talk.answer("a", 1, ended=True)
    talk.hear(1000)
    assert talk.take("input_audio_buffer.speech_started", audio_start_ms=1, item_id="b") == []
    assert (MODEL, "Two words.") in talk.said
    assert talk.dialogue.interruptions == 0


def test_an_answer_that_comes_too_slowly_is_waited_for_and_can_be_cut():
    talk = Talk(may_interrupt=True)
    talk.turn()
    talk.answer("a", 1, ended=False)
    assert talk.hear(1500) == SECOND + bytes(len(SECOND) // 2)
    assert talk.dialogue.is_answering
    assert talk.dialogue.interrupt() == [{"type": "response.cancel"}, *cut("a", 1000)]


def test_the_microphone_is_off_while_the_speakers_are_heard():
    talk, headphones = Talk(), Talk(may_interrupt=True)
    for each in (talk, headphones):
        each.turn()
        assert not each.dialogue.is_muted(each.now_s)
        each.answer("a", 1, ended=True)
    assert talk.dialogue.is_muted(talk.now_s)
    assert not headphones.dialogue.is_muted(headphones.now_s)
    talk.hear(990)
    talk.hear(10)
    assert talk.dialogue.is_muted(talk.now_s + 0.1)  # it still sounds in the room
    assert not talk.dialogue.is_muted(talk.now_s + 1)


def test_the_latency_is_from_the_last_word_to_the_first_sound():
    talk = Talk()
    talk.turn()
    last_word_s, talk.now_s = 1.0, 2.75
    talk.answer("a", 1, ended=True)
    talk.take("conversation.item.input_audio_transcription.completed", item_id="user", transcript=" Well? ")
    talk.hear(1000)
    (turn,) = talk.dialogue.turns
    assert turn.latency_s == pytest.approx(2.75 - last_word_s)
    assert talk.said == [(NOTE, "turn 1: first audio after 1.75 s"), (USER, "Well?"), (MODEL, "Two words.")]
    assert list(talk.dialogue.summary()) == [
        "1 turn",
        "first audio after 1.75 s (median; 1.75 to 1.75 s)",
        "tokens: 7 in, of them 4 cached; 9 out",
    ]


def test_a_key_ends_the_users_turn_and_the_next_one_the_answer():
    talk = Talk()
    talk.speak(25)
    kinds = [event["type"] for event in talk.dialogue.end_turn()]
    assert kinds == ["input_audio_buffer.commit", "response.create"]
    talk.answer("a", 1, ended=True)
    talk.hear(500)
    assert talk.dialogue.end_turn() == cut("a", 500)
    talk.take("conversation.item.retrieved", item={"id": "a", "content": []})
    talk.dialogue.end_turn()
    talk.take("error", error={"code": "input_audio_buffer_commit_empty", "message": "the buffer is too small"})
    assert not talk.dialogue.is_answering
    assert len(talk.dialogue.turns) == 1


def test_levels():
    assert level_db(SILENCE) == level_db(b"") == SILENCE_DB
    assert level_db(SPEECH) == pytest.approx(-12.2, abs=0.1)


@pytest.mark.parametrize("missing", [ImportError, OSError])  # the package; the library that it is about
def test_without_portaudio_the_remedy_is_said(monkeypatch, missing):
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "sounddevice":
                raise missing("PortAudio library not found")

    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(CommandError, match="install"), devices.speakers(None, PlaybackBuffer()):
        pass
