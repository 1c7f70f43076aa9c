"""From texts to token ids: in pieces, so that a long text stops nobody, and with control tokens from templates only."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from services.common.errors import ContextTooLong, InvalidInput, RequestCancelled

Stop = Callable[[], bool]
"""Says whether nobody waits for the result any more."""

_PIECE = 16_384  # characters
_MOST_UNCUT = 262_144  # characters
_WINDOW = 64  # characters before and after a cut
_MOST_CUTS = 1000  # that are looked at
# Before a word, on a new line, before a sign behind a letter.
_CUT = r"(?<=\S)(?= [^\W\d_])|(?<=[\r\n])(?=\S)|(?<=[^\W\d_])(?=[!-&(-/:-@\[-`{-~\u3001\u3002\uff0c\uff01\uff1f])"
_FIRST_SUBSTITUTE = 0xD800  # halves of surrogate pairs: no text of a request has them


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
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        backend = tokenizer.backend_tokenizer
        self._words = Tokenizer(backend.model)  # shares the vocabulary, and knows no control tokens
        self._words.normalizer, self._words.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        added = {token.content: (token_id, token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._ids = {content: token_id for content, (token_id, _) in added.items()}
        self._control = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        self._longest_control = max(map(len, added), default=0)
        signs = sorted({sign for content in added for sign in (content[0], content[-1])})
        self._substitutes = [(sign, chr(_FIRST_SUBSTITUTE + i)) for i, sign in enumerate(signs)]
        first, last = ("".join({re.escape(content[i]) for content in added}) or r"\0" for i in (0, -1))
        self._cut = re.compile(f"{_CUT}|(?<=[{last}])(?=[{first}])")  # between control tokens, too
        plain = [content for content, (_, token) in added.items() if not token.special]
        self._plain = [(self.conceal(content), content) for content in plain]
        self._longest = max(map(len, backend.get_vocab(with_added_tokens=False)))
        sample = "a"
        alone, whole = self._of_words([sample])[0], tokenizer(sample)["input_ids"]
        begin = next(i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
        self._begin, self._end = whole[:begin], whole[begin + len(alone) :]

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
        if keep_plain:
            for concealed, content in self._plain:
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
        for piece in self._pieces(text, field):
            if stop():
                raise RequestCancelled("nobody waits for the tokens any more")
            if most is not None:
                refuse_longer(before + len(ids), most, field.partition(".")[0], is_whole=False)
            ids += self._encode_piece(piece)
        return ids + self._end if special else ids

    def _encode_piece(self, piece: str) -> list[int]:
        ids: list[int] = []
        between = [self.reveal(words) for words in self._control.split(piece)]
        found = [self._ids[control] for control in self._control.findall(piece)]
        for i, of_words in enumerate(self._of_words(between)):
            ids += of_words
            ids += found[i : i + 1]
        return ids

    def _of_words(self, texts: list[str]) -> list[list[int]]:
        # unlike `encode` this lets other threads run
        return [each.ids for each in self._words.encode_batch_fast(texts, add_special_tokens=False)]

    def _pieces(self, text: str, field: str) -> Iterator[str]:
        """`text` in pieces that are tokenized as they are within it."""
        begin = 0
        while len(text) - begin > _PIECE:
            end = self._next_cut(text, begin + _PIECE)
            if end - begin > _MOST_UNCUT:
                reason = f"has a word of {end - begin} characters; at most {_MOST_UNCUT} are read without a space"
                raise InvalidInput(field, reason)
            yield text[begin:end]
            begin = end
        yield text[begin:]

    def _next_cut(self, text: str, begin: int) -> int:
        """The first place from `begin` on where words begin and no control token goes across, or the text's end."""
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
        before, after = self.reveal(text[first:at]), self.reveal(text[at : at + _WINDOW])
        splitter = self._words.pre_tokenizer
        words = splitter.pre_tokenize_str(before + after) if splitter is not None else []
        return any(begin == len(before) for _, (begin, _) in words)
