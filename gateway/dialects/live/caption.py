"""How far an answer's text has been spoken: by the times of its words, or an estimate.

Clients end a turn where no text comes for 0.8 s. So text comes evenly: while more of the answer is to come, at the
usual speed of speech, and once all of it is there, what is left of the text is spread over what is left of the
sound."""

from collections.abc import Sequence

from gateway.dialects.realtime.conversation.items import SpokenWord
from gateway.dialects.realtime.conversation.truncation import spoken_end, units_of, whole_words

_UNITS_PER_MS = 0.014  # of usual speech; a letter is a unit
_LONGEST_MS = 500  # without text: of a word that takes longer, a part comes


class Caption:
    """Attributes:
    text: that was made, which is ahead of its sound.
    told: characters of `text` that were returned by `heard`.
    sound_ms: that was made.
    is_complete: all of text and sound is there.
    """

    def __init__(self) -> None:
        self.text, self.told, self.sound_ms, self.is_complete = "", 0, 0.0, False
        self._units = list[float]()
        self._end = 0  # characters whose time has come
        self._left = 0.0  # units of the character at `_end` that were spoken
        self._heard_ms = self._told_ms = 0.0

    def add(self, text: str) -> None:
        self.text += text
        self._units += units_of(text)

    def complete(self, text: str) -> None:
        """`text` is all of it, and all of its sound is there."""
        self.text, self._units, self.is_complete = text, units_of(text), True
        self._end = min(self._end, len(text))

    def heard(self, played_ms: float, words: Sequence[SpokenWord] = ()) -> str:
        """The words that have been spoken since the last call.

        Args:
            played_ms: of the sound, from its beginning.
            words: with their times, where they are known.
        """
        step_ms, left_ms = played_ms - self._heard_ms, self.sound_ms - self._heard_ms
        rate = _UNITS_PER_MS
        if self.is_complete:
            rate = (sum(self._units[self._end :]) - self._left) / left_ms if left_ms > 0 else 0.0
        self._heard_ms = played_ms
        if words:
            self._end = max(self._end, spoken_end(self.text, words, played_ms))
        else:
            self._speak(max(0.0, rate * step_ms))
        end = whole_words(self.text, self._end)
        if end <= self.told and played_ms - self._told_ms >= _LONGEST_MS:
            end = self._end
        if end <= self.told:
            return ""
        delta, self.told, self._told_ms = self.text[self.told : end], end, played_ms
        return delta

    def rest(self) -> str:
        """All that was not told."""
        delta, self.told = self.text[self.told :], len(self.text)
        return delta

    def _speak(self, units: float) -> None:
        self._left += units
        while self._end < len(self.text) and self._left >= self._units[self._end] - 1e-6:
            self._left -= self._units[self._end]
            self._end += 1
        if self._end == len(self.text):  # what is not written yet is not spoken
            self._left = 0.0
