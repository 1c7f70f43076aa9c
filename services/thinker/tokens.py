"""From texts to token ids: in pieces, so that a long text stops nobody, and with control tokens from templates only."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from services.common.errors import ContextTooLong, InvalidInput, RequestCancelled
from services.thinker.words import Place, Words, is_word, pattern_of

Stop = Callable[[], bool]
"""Says whether nobody waits for the result any more."""

_PIECE = 16_384  # characters
_MOST_UNCUT = 262_144  # characters
_WINDOW = 64  # characters before and after a cut
_MOST_CUTS = 1000  # that are looked at
# Before a word, on a new line, before a sign behind a letter.
_CUT = r"(?<=\S)(?= [^\W\d_])|(?<=[\r\n])(?=\S)|(?<=[^\W\d_])(?=[!-&(-/:-@\[-`{-~\u3001\u3002\uff0c\uff01\uff1f])"
_FIRST_SUBSTITUTE = 0xD800  # halves of surrogate pairs: no text of a request has them
_SAMPLE = "It's 12,345  words:\n\n  def f(x):\n\treturn '\u4f60\u597d' + caf\u00e9 + \U0001f600\n"
_MOST_SAMPLES = 16


def never() -> bool:
    return False


def refuse_longer(tokens: int, most: int, field: str, is_whole: bool = True) -> None:
    """Raises ContextTooLong, which names `field`, unless a prompt of `tokens` leaves room for an answer.

    Args:
        is_whole: whether there are no more than these.
    """
    if tokens >= most:
        count = tokens if is_whole else f"at least {tokens}"
        raise ContextTooLong(field, f"the prompt has {count} tokens; the limit is {most} with the answer included")


class PromptTokenizer:
    """Gives the ids that a checkpoint's tokenizer gives. For any thread, without a lock.

    Control tokens are those that a tokenizer finds in a text before it reads words: of turns, calls, thoughts, media.
    Added tokens that are blanks, or tags which are not `written` (by a chat template, or for media), are words.

    Raises ValueError: the tokenizer is none of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any, written: str = "") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"its tokenizer is a {type(tokenizer).__name__}, which has no tokenizer.json")
        self._words = Words(backend)
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self._ids = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._control = re.compile(pattern_of(added.values()) or r"(?!)")
        self._longest_control = max(map(len, added), default=0)
        control = [content for content, token in added.items() if not is_word(token, written)]
        signs = sorted({sign for content in control for sign in (content[0], content[-1])})
        self._substitutes = [(sign, chr(_FIRST_SUBSTITUTE + i)) for i, sign in enumerate(signs)]
        first, last = ("".join({re.escape(content[i]) for content in added}) or r"\0" for i in (0, -1))
        self._cut = re.compile(f"{_CUT}|(?<=[{last}])(?=[{first}])")  # between control tokens, too
        self._kept: list[tuple[str, str]] = []  # (concealed, as it is) of added tokens that are words
        words = added.keys() - control
        self._kept = [(self.conceal(content), content) for content in words]
        self._plain = [(self.conceal(content), content) for content in control if not added[content].special]
        self._longest = max(map(len, backend.get_vocab(with_added_tokens=False)))
        sample = "a"
        alone, whole = (tokenizer(sample, add_special_tokens=special)["input_ids"] for special in (False, True))
        begin = next(i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
        self._begin, self._end = whole[:begin], whole[begin + len(alone) :]
        self._backend = None  # reads whole texts where reading in pieces gives other ids
        if any(self.encode(each, "", True) != tokenizer(each)["input_ids"] for each in _samples(added)):
            self._backend = backend

    def least(self, characters: int) -> int:
        """Fewest tokens that a text of so many characters can be."""
        return characters // (2 * self._longest)  # normalizers may make one of two

    def conceal(self, text: str, keep_plain: bool = False) -> str:
        """`text` with signs that `encode` takes back, so that there are no control tokens in it.

        Args:
            keep_plain: those stay that the detokenizer treats as text: of calls and thoughts.
        """
        for sign, substitute in self._substitutes:
            text = text.replace(sign, substitute)
        for concealed, content in self._kept + self._plain if keep_plain else self._kept:
            text = text.replace(concealed, content)
        return text

    def reveal(self, text: str) -> str:
        """What was concealed."""
        for sign, substitute in self._substitutes:
            text = text.replace(substitute, sign)
        return text

    def encode(
        self, text: str, field: str, special: bool, most: int | None = None, stop: Stop = never, before: int = 0
    ) -> list[int]:
        """Ids of `text`; what is concealed becomes no control token.

        Args:
            field: of the request; errors name it.
            special: whether the tokens come, too, that the tokenizer puts around a text.
            most: the longest context, if the text is of a prompt.
            before: ids that the prompt has before the text.

        Raises:
            InvalidInput: one word of the text is too long.
            ContextTooLong: there are `most` ids, and the text goes on.
            RequestCancelled: `stop` says so.
        """
        ids = list(self._begin) if special else []
        for place, piece in self._pieces(text, field, Place.INNER if before else Place.BEGIN):
            if stop():
                raise RequestCancelled("nobody waits for the tokens any more")
            if most is not None:
                refuse_longer(before + len(ids), most, field.partition(".")[0], is_whole=False)
            ids += self._encode_piece(piece, place)
        return ids + self._end if special else ids

    def _encode_piece(self, piece: str, place: Place) -> list[int]:
        controls, whole = self._control.findall(piece), self.reveal(piece)
        if self._backend is not None and self._control.findall(whole) == controls:  # nothing has to stay concealed
            return self._backend.encode_batch_fast([whole], add_special_tokens=False)[0].ids
        ids: list[int] = []
        between = [self.reveal(words) for words in self._control.split(piece)]
        found = [self._id(control) for control in controls]
        for i, of_words in enumerate(self._words.ids(between, place)):
            ids += of_words
            ids += found[i : i + 1]
        return ids

    def _id(self, control: str) -> int:
        """Of a token with the blanks around it that it takes."""
        found = self._ids.get(control)
        return self._ids[control.strip()] if found is None else found

    def _pieces(self, text: str, field: str, place: Place) -> Iterator[tuple[Place, str]]:
        """`text`, which is at `place`, in pieces that are tokenized as they are within it."""
        begin = 0
        while len(text) - begin > _PIECE:
            end = self._next_cut(text, begin + _PIECE)
            if end - begin > _MOST_UNCUT:
                reason = f"has a word of {end - begin} characters; at most {_MOST_UNCUT} are read without a space"
                raise InvalidInput(field, reason)
            yield place, text[begin:end]
            begin, place = end, Place.AFTER_ADDED if self._follows_control(text, end) else Place.INNER
        yield place, text[begin:]

    def _follows_control(self, text: str, at: int) -> bool:
        first = max(0, at - self._longest_control - _WINDOW)
        return any(found.end() == at for found in self._control.finditer(text, first, at))

    def _next_cut(self, text: str, begin: int) -> int:
        """The first place from `begin` on where words begin and no control token goes across, or the text's end."""
        if self._backend is not None:
            return len(text)
        found = self._cut.finditer(text, begin, begin + _MOST_UNCUT)
        return next((cut.start() for cut in islice(found, _MOST_CUTS) if self._may_cut(text, cut.start())), len(text))

    def _may_cut(self, text: str, at: int) -> bool:
        first = max(0, at - self._longest_control)
        for found in self._control.finditer(text, first, at + self._longest_control):
            if found.start() < at < found.end():
                return False
            if at in found.span():
                return True
        first = max(0, at - _WINDOW)
        return self._words.begin(self.reveal(text[first:at]), self.reveal(text[at : at + _WINDOW]))


def _samples(added: Iterable[str]) -> list[str]:
    around = islice(added, _MOST_SAMPLES)
    return [_SAMPLE, " a", *(f"{_SAMPLE}{token}\n {_SAMPLE} {token}{_SAMPLE}" for token in around)]
