"""Ids of a text that comes in pieces."""

from pathlib import Path
from typing import Any

from services.talker.inputs import Text

_MOST_HELD = 500  # characters of a word whose end is still to come; each piece of text reads them again


class TextTokenizer:
    """The tokenizer of the checkpoint in `folder`. Raises ValueError: it has none."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedConfig

        tokenizers: Any = AutoTokenizer
        any_model = PreTrainedConfig()  # tokenizer_config.json says the class; transformers need not know the model
        try:
            self._backend: Any = tokenizers.from_pretrained(folder, config=any_model).backend_tokenizer
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no tokenizer: {error}") from None
        # What a text says is no control token, nor one that is added without being called special, as `<think>` is.
        self._backend.add_special_tokens(list(self._backend.get_added_tokens_decoder().values()))
        self._backend.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which an added token is text as any other."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def normalized(self, text: str) -> str:
        """`text` as it is encoded: an accent that follows its letter becomes one character with it."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def settled(self, text: str) -> int:
        """Characters of the normalized `text` whose ids do not depend on what follows: all but its last word, and white
        space at its end, which can be several words.

        Byte-pair encoding never joins two words of the pre-tokenizer, and only the last may grow.
        """
        words: list[tuple[str, tuple[int, int]]] = self._backend.pre_tokenizer.pre_tokenize_str(text)
        last, said = words[-1][1][0] if words else 0, len(text.rstrip())
        return next((begin for _, (begin, end) in words if end > said), last)


class GrowingText:
    """Base of a `services.talker.inputs.TextInput`: ids of a text that comes in pieces, cut anywhere, without the white
    space around it.

    Attributes:
        tokens: ids so far.
        finished: whether the text is complete.
        ids: those that were not taken yet.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokens, self.finished = 0, False
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._held = ""
        self._began = False

    def add(self, text: str) -> None:
        """Takes the next piece; the text's last word is held back.

        A word longer than _MOST_HELD is cut before its last character, which may change its ids.
        """
        self._held = self._tokenizer.normalized(self._held + text)
        if not self._began:
            self._held = self._held.lstrip()
            self._began = bool(self._held)
        settled = self._tokenizer.settled(self._held)
        self._settle(settled if len(self._held) - settled <= _MOST_HELD else len(self._held) - 1)

    def finish(self) -> None:
        """Ends the text."""
        self.finished = True
        self._held = self._held.rstrip()
        self._settle(len(self._held))

    def _settle(self, characters: int) -> None:
        ids = self._tokenizer.encode(self._held[:characters])
        self._held = self._held[characters:]
        self.ids += ids
        self.tokens += len(ids)

    @property
    def is_empty(self) -> bool:
        return self.finished and not self._began

    def take_text(self) -> Text:
        text, self.ids = Text(self.ids), []
        return text
