"""A model's thought before its answer."""

from collections.abc import Sequence
from typing import Any

from services.thinker.family import ReasoningMarkers


class ThoughtParser:
    """Separates an answer, as it arrives, into the thought at its beginning and the rest.

    Ids tell which tokens are thought. Their text may come later, as the engine holds back what may begin a stop string.

    Args:
        has_begun: the prompt has opened the thought; else the answer has one if its first token opens it.

    Attributes:
        tokens: of the thought so far, without its markers.
    """

    def __init__(self, markers: ReasoningMarkers, has_begun: bool) -> None:
        self._markers = markers
        self._is_thinking = has_begun
        self._is_first = True  # no token was sampled yet
        self._opening = ""  # of the marker, what of its text is still to come
        self._in_thought = has_begun  # as far as the text has come
        self._pending = ""
        self.tokens = 0

    def feed(self, text: str, token_ids: Sequence[int]) -> tuple[str, str, list[int]]:
        """Takes the next piece of the answer: (text of the thought, text of the rest, tokens of the rest)."""
        rest_ids = [token_id for token_id in token_ids if not self._is_of_thought(token_id)]
        return *self._split(text), rest_ids

    def _split(self, text: str) -> tuple[str, str]:
        if not self._in_thought:
            return "", text
        self._pending += text
        if self._opening and not self._drop_opening():
            return "", ""
        if self._is_thinking:
            thought, self._pending = self._pending, ""
            return thought, ""
        closing = self._markers.closing
        thought, closed, rest = self._pending.partition(closing)
        if closed:
            self._in_thought, self._pending = False, ""
            return thought, rest
        held = next((n for n in range(len(closing) - 1, 0, -1) if thought.endswith(closing[:n])), 0)
        self._pending = thought[len(thought) - held :]
        return thought[: len(thought) - held], ""

    def finish(self) -> str:
        """The answer is complete: what was held back is thought, after all."""
        rest, self._pending = self._pending, ""
        return rest

    def _is_of_thought(self, token_id: int) -> bool:
        """Whether the next token is of the thought or its markers. Counts it."""
        is_first, self._is_first = self._is_first, False
        if is_first and token_id == self._markers.opening_id:
            self._is_thinking = self._in_thought = True
            self._opening = self._markers.opening
            return True
        if not self._is_thinking:
            return False
        if token_id == self._markers.closing_id:
            self._is_thinking = False
        else:
            self.tokens += 1
        return True

    def _drop_opening(self) -> bool:
        """Takes the opening marker off the text; False: it has not come whole."""
        if self._pending.startswith(self._opening):
            self._pending, self._opening = self._pending[len(self._opening) :], ""
        elif not self._opening.startswith(self._pending):
            self._opening = ""
        return not self._opening


def find_markers(name: str, tokenizer: Any) -> ReasoningMarkers:
    """The markers of vLLM's parser `name`. Raises ValueError: there is none, or it is not for this tokenizer."""
    from vllm.reasoning import ReasoningParserManager as Manager

    flag = f"--reasoning-parser {name}"
    try:
        kind = Manager.get_reasoning_parser(name)
    except KeyError:
        known = ", ".join(sorted({*Manager.reasoning_parsers, *Manager.lazy_parsers}))
        raise ValueError(f"{flag}: vLLM has no such parser; it has {known}") from None
    try:
        parser: Any = kind(tokenizer)
    except Exception as error:  # they raise what they like, for want of a token
        raise ValueError(f"{flag}: is not for this model's tokenizer: {error}") from error
    opening, closing = (parser.reasoning_start_str or "").strip(), (parser.reasoning_end_str or "").strip()
    vocabulary = tokenizer.get_vocab()
    if opening not in vocabulary or closing not in vocabulary:
        raise ValueError(f"{flag}: finds thoughts by more than a token before and after them, which is not served")
    return ReasoningMarkers(opening, closing, vocabulary[opening], vocabulary[closing], name)
