"""From texts and pairs of texts to token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import ContextTooLong, InvalidInput, RequestCancelled, require

Stop = Callable[[], bool]
"""Says whether nobody waits for the result any more."""


@dataclass(frozen=True)
class InputCut:
    """How an input is shortened.

    Attributes:
        most: tokens that are kept, special ones included; -1: as many as the model takes; None: no input may be longer.
        side: that is cut off, "left" or "right"; None: the tokenizer's own.
        most_of_document: tokens of a pair's second text; None: all.
    """

    most: int | None = None
    side: str | None = None
    most_of_document: int | None = None


@dataclass(frozen=True)
class Prompt:
    """What the engine reads.

    Attributes:
        token_ids: with special tokens.
        second_at: where the second text of a pair begins, for a model that distinguishes them; None: there is none.
    """

    token_ids: Sequence[int]
    second_at: int | None = None


class Tokenizer:
    """Gives the ids that the checkpoint's tokenizer gives, without its padding and truncation. For any thread.

    Control tokens that are spelled in a text are words, so that no text can pretend to be two. A vocabulary that has
    them among its words, too, knows none for them: they are unknown ones.

    Args:
        tokenizer: transformers'; used by nobody else.
        most: longest prompt, in tokens.
        vocab_size: of the model.
        lowercase: whether texts are made lower case first.
    """

    def __init__(self, tokenizer: Any, most: int, vocab_size: int, lowercase: bool = False) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._side = tokenizer.truncation_side
        self._most, self._vocab_size, self._lowercase = most, vocab_size, lowercase
        self._unknown: int | None = tokenizer.unk_token_id
        self._control = frozenset(tokenizer.all_special_ids) - {self._unknown}
        first, second = self._encode("a"), self._encode("b")
        whole = self._backend.encode("a").ids
        at = _find(first, whole, 0)
        self._begin, self._end = whole[:at], whole[at + len(first) :]
        pair = self._backend.encode("a", "b")
        at = _find(first, pair.ids, 0)
        after = at + len(first)
        second_at = _find(second, pair.ids, after)
        self._pair_parts = pair.ids[:at], pair.ids[after:second_at], pair.ids[second_at + len(second) :]
        # where segment 1 begins, from the second text on; None: the model has no segments
        self._segment: int | None = None
        if "token_type_ids" in tokenizer.model_input_names and 1 in pair.type_ids:
            self._segment = pair.type_ids.index(1) - second_at

    def text(self, text: str, field: str, cut: InputCut, special: bool = True) -> Prompt:
        """A text's prompt. Raises InvalidInput, which names `field`: it is too long, or has no tokens."""
        begin, end = (self._begin, self._end) if special else ([], [])
        ids = self._encode(text)
        if (most := self._kept(cut)) is not None:
            ids = self._shortened(ids, most - len(begin) - len(end), cut)
        return Prompt(self._checked([*begin, *ids, *end], field))

    def ids(self, token_ids: Sequence[int], field: str, cut: InputCut) -> Prompt:
        """The prompt of token ids. Raises InvalidInput, which names `field`."""
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                reason = f"{token_id} is not in the vocabulary, which has the ids 0 to {self._vocab_size - 1}"
                raise InvalidInput(f"{field}[{i}]", reason)
        if (most := self._kept(cut)) is not None:
            token_ids = self._shortened(token_ids, most, cut)
        return Prompt(self._checked(list(token_ids), field))

    def pair(self, query: str, document: str, field: str, cut: InputCut) -> Prompt:
        """The prompt of a pair. Raises InvalidInput, which names `field`: it is too long."""
        begin, between, end = self._pair_parts
        first, second = self._encode(query), self._encode(document)
        if cut.most_of_document is not None:
            second = self._shortened(second, cut.most_of_document, cut)
        if (most := self._kept(cut)) is not None:
            kept = longest_first(len(first), len(second), max(0, most - len(begin) - len(between) - len(end)))
            first, second = (self._shortened(ids, count, cut) for ids, count in zip((first, second), kept, strict=True))
        head = [*begin, *first, *between]
        ids = self._checked([*head, *second, *end], field)
        return Prompt(ids, None if self._segment is None else len(head) + self._segment)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text.lower() if self._lowercase else text, add_special_tokens=False).ids
        if self._control.isdisjoint(ids):
            return ids
        known = [self._unknown if each in self._control else each for each in ids]
        return [each for each in known if each is not None]

    def _kept(self, cut: InputCut) -> int | None:
        return self._most if cut.most == -1 else cut.most

    def _shortened(self, ids: Sequence[int], most: int, cut: InputCut) -> list[int]:
        if len(ids) <= most:
            return list(ids)
        side = cut.side or self._side
        return list(ids[len(ids) - max(0, most) :] if side == "left" else ids[: max(0, most)])

    def _checked(self, token_ids: list[int], field: str) -> list[int]:
        require(token_ids, field, "has no tokens; send a text that is not empty")
        if len(token_ids) > self._most:
            reason = f"has {len(token_ids)} tokens; this model takes {self._most}: shorten it, or have it cut"
            raise ContextTooLong(field, f"{reason} (truncate_prompt_tokens: -1)")
        return token_ids


def _find(part: Sequence[int], whole: Sequence[int], begin: int) -> int:
    return next(i for i in range(begin, len(whole)) if whole[i : i + len(part)] == part)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens two texts of so many keep in `room`, as transformers' "longest_first" has it."""
    if first + second <= room:
        return first, second
    short = min(first, second)
    short, long = (short, room - short) if 2 * short <= room else (room // 2, room - room // 2)
    return (short, long) if first <= second else (long, short)


def read_all(reads: Sequence[Callable[[], Prompt]], most_tokens: int, field: str, stop: Stop) -> list[Prompt]:
    """The prompts of a request, one after another.

    Raises:
        InvalidInput: one of them is at fault, or they have more than `most_tokens` together; that names `field`.
        RequestCancelled: `stop` says so.
    """
    prompts, tokens = list[Prompt](), 0
    for read in reads:
        if stop():
            raise RequestCancelled("nobody waits for the tokens any more")
        prompts.append(prompt := read())
        tokens += len(prompt.token_ids)
        if tokens > most_tokens:
            raise ContextTooLong(field, f"have more than {most_tokens} tokens together; send them in several requests")
    return prompts
