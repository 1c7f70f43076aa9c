"""The text of an answer, on its way from a thinker to a talker that reads text."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from typing import Any

from gateway.pipeline.events import Event, TextDelta, TextEnd
from gateway.pipeline.sentences import CLAUSES, SENTENCES, WORDS
from gateway.pipeline.speakable_text import SpeakableText
from gateway.pipeline.typed_text import TypedText, is_speakable
from quartet.v1.talker_pb2 import SPEECH_END_LENGTH

# Where an utterance may end, by the share of its bytes that it must have: the longer it is, the worse the place may be.
_ENDS = ((0.7, SENTENCES), (0.8, CLAUSES), (0.9, WORDS))
# Fields of summaries that add up over the utterances, by stage; and, of all stages, those of the timings.
_SUMS = {
    "talker": ("frames", "text_tokens", "waited_for_text_ms"),
    "code2wav": ("frames", "samples", "waited_for_frames_ms"),
}
_TIMES = ("decode_ms", "total_ms")


class Utterances:
    """What of an answer is for the ear, while it is written: utterances, which follow one another. Iterating yields
    (number, text) of each as soon as there is something to say; of the first at once, for the talker to be ready.

    Args:
        most_bytes: UTF-8 of an utterance, so that the talker has room for it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._speakable = SpeakableText()
        self._utterances = [TypedText()]
        self._bytes = 0  # of the last utterance
        self._unsaid = ""  # what it begins with, as long as there is nothing to say in that
        self._finished = False
        self._changed = asyncio.Event()

    def read(self, event: Event) -> None:
        """Takes what the thinker writes."""
        if isinstance(event, TextDelta):
            self._add(self._speakable.add(event.delta.text))
        elif isinstance(event, TextEnd):
            self._add(self._speakable.close())
            self._utterances[-1].finish()
            self._finished = True
            self._changed.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, TypedText]]:
        number = 0
        while True:
            self._changed.clear()
            if number < len(self._utterances) and (not number or self._utterances[number].is_speakable):
                yield number, self._utterances[number]
                number += 1
            elif self._finished:
                return
            else:
                await self._changed.wait()

    def _add(self, text: str) -> None:
        while (end := self._end(text)) is not None:
            self._say(text[:end])
            self._utterances[-1].finish()
            self._utterances.append(TypedText())
            self._bytes, text = 0, text[end:]
        self._say(text)

    def _say(self, text: str) -> None:
        self._bytes += len(text.encode())
        self._unsaid += text
        if self._utterances[-1].is_speakable or is_speakable(text):
            if self._unsaid:
                self._utterances[-1].add(self._unsaid)
            self._unsaid = ""
            self._changed.set()

    def _end(self, text: str) -> int | None:
        """Where in `text` the last utterance ends; None: not in it."""
        if self._bytes + len(text.encode()) <= self._most_bytes * _ENDS[0][0]:
            return None
        found = (pause.search(text, self._room(text, share)) for share, pause in _ENDS)
        ends = [each.end() for each in found if each is not None]
        if self._bytes + len(text.encode()) > self._most_bytes:
            ends.append(self._room(text, 1.0) or int(not self._bytes))  # a character, if none has room
        return min(ends, default=None)

    def _room(self, text: str, share: float) -> int:
        """Characters of `text` that the share of the last utterance's bytes still has room for."""
        left = max(0, int(self._most_bytes * share) - self._bytes)
        return len(text.encode()[:left].decode(errors="ignore"))


def following_starts(starts: Mapping[str, Any], total: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Start messages of the next utterance: the frames before it count for `max_frames`. None: no frame is left."""
    speak = starts["talker"]
    if not total or not speak.sampling.HasField("max_frames"):
        return starts
    left = speak.sampling.max_frames - total["talker"].frames
    if left < 1:
        return None
    rest = deepcopy(speak)
    rest.sampling.max_frames = left
    return {**starts, "talker": rest}


def add_summaries(total: dict[str, Any], ended: Mapping[str, Any]) -> None:
    """Adds summaries of the stages that spoke an utterance to those of the utterances before."""
    for kind, summary in ended.items():
        before, sums = total.get(kind), _SUMS.get(kind, ())
        if before is None:
            total[kind] = summary
            continue
        for name in sums:
            setattr(before, name, getattr(before, name) + getattr(summary, name))
        for name in _TIMES:
            setattr(before.timings, name, getattr(before.timings, name) + getattr(summary.timings, name))
        if kind == "talker" and before.end != SPEECH_END_LENGTH:  # one that was cut counts
            before.end = summary.end
