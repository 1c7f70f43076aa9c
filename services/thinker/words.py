"""What a tokenizer of the library `tokenizers` reads between its added tokens, without that library's own search for
them."""

import json
import pickle
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

BLANK = "\u2581"
"""A space, in vocabularies of words."""
_END = ""
_TAG = re.compile(r"</?(?!think)[a-z]+[0-9]?>")


class Place(Enum):
    """Where words begin: with the text, after an added token, or within a text that was cut before them."""

    BEGIN = "begin"
    AFTER_ADDED = "after added"
    INNER = "inner"


class Words:
    """Shares the vocabulary of `backend`, and knows no added tokens. For any thread, without a lock."""

    def __init__(self, backend: Any) -> None:
        self._at = {place: _reader(backend, place) for place in Place}
        self._is_one = len({str(each.normalizer) + str(each.pre_tokenizer) for each in self._at.values()}) == 1
        self._splitter = backend.pre_tokenizer
        spelled = backend.normalizer.normalize_str("a b") if backend.normalizer is not None else "a b"
        blanks = BLANK in spelled or "Metaspace" in str(self._splitter)
        vocabulary = backend.get_vocab(with_added_tokens=False) if blanks else ()
        self._begin_at_blanks = blanks and not any(BLANK in token.lstrip(BLANK) for token in vocabulary)

    def ids(self, texts: Sequence[str], place: Place) -> list[list[int]]:
        """Of each text. The first is at `place`, an added token is between it and the next, and so on."""
        if self._is_one:
            return _read(self._at[place], texts)
        return _read(self._at[place], texts[:1]) + _read(self._at[Place.AFTER_ADDED], texts[1:])

    def begin(self, before: str, after: str) -> bool:
        """Whether words begin where `after` follows `before`, however the text goes on."""
        if self._begin_at_blanks and after.startswith(" ") and before and not before[-1].isspace():
            return BLANK not in before[-1:] + after[1:2] and not after[1:2].isspace()
        words = self._splitter.pre_tokenize_str(before + after) if self._splitter is not None else []
        return any(begin == len(before) for _, (begin, _) in words)


def is_word(token: Any, written: str) -> bool:
    """Whether an added token is a word: blanks, or a tag that is not in what prompts have `written` in them."""
    if token.special:
        return False
    content = token.content
    return not content.strip(f" \t\r\n{BLANK}") or bool(_TAG.fullmatch(content) and content not in written)


def pattern_of(added: Iterable[Any]) -> str:
    """Of added tokens, each with the blanks that it takes; the longest of several at one place.

    It is a tree, not a list: some tokenizers have thousands.
    """
    taking: dict[bool, dict[str, Any]] = {}  # by whether they take the blanks before them
    for token in added:
        node = taking.setdefault(token.lstrip, {})
        for sign in token.content:
            node = node.setdefault(sign, {})
        node[_END] = r"\s*" if token.rstrip else ""
    return "|".join(rf"(?:(?<!\s)\s+)?{_tree(node)}" if takes else _tree(node) for takes, node in taking.items())


def _tree(node: dict[str, Any]) -> str:
    branches = [re.escape(sign) + _tree(below) for sign, below in sorted(node.items()) if sign != _END]
    branches += [node[_END]] if _END in node else []
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _read(reader: Any, texts: Sequence[str]) -> list[list[int]]:
    # unlike `encode` this lets other threads run
    return [each.ids for each in reader.encode_batch_fast(texts, add_special_tokens=False)]


def _reader(backend: Any, place: Place) -> Any:
    from tokenizers import Tokenizer

    reader = Tokenizer(backend.model)
    reader.normalizer = _changed(backend.normalizer, place)
    reader.pre_tokenizer = _changed(backend.pre_tokenizer, place)
    return reader


def _changed(part: Any, place: Place) -> Any:
    """A normalizer or pre-tokenizer that puts a blank before what is at `place` only if the original does."""
    if part is None or place is Place.BEGIN:
        return part
    state = json.loads(part.__getstate__())
    changed = _at(state, place)
    if changed == state or changed is None:
        return part if changed else None
    twin = pickle.loads(pickle.dumps(part))
    twin.__setstate__(json.dumps(changed).encode())
    return twin


def _at(state: dict[str, Any], place: Place) -> dict[str, Any] | None:
    kind = state.get("type")
    if kind == "Prepend" and place is Place.INNER:
        return None
    if kind == "Metaspace" and (place is Place.INNER or state.get("prepend_scheme") == "first"):
        return state | {"prepend_scheme": "never"}
    for parts in ("normalizers", "pretokenizers"):
        if parts in state:
            return state | {parts: [kept for each in state[parts] if (kept := _at(each, place)) is not None]}
    return state
