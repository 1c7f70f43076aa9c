"""The transcript of an answer that was cut short: by the times of its words, or an estimate."""

from collections.abc import Sequence

from gateway.dialects.realtime.conversation.items import Item, SpokenWord

# The fastest speech, in units a second: a letter is one, an ideograph three.
_UNITS_PER_S = 18.0
_IDEOGRAPH_UNITS = 3.0
_FIRST_IDEOGRAPH = "\u2e80"


def truncate(item: Item, content_index: int, end_ms: int) -> None:
    """Cuts an assistant's message to the first `end_ms` of its sound."""
    part, complete = item.content[content_index], item.members["status"] == "completed"
    part["transcript"] = heard_text(item, part.get("transcript") or "", end_ms, item.sent_ms, complete)
    item.sent_ms, item.sampled, item.is_cut = end_ms, None, True


def heard_text(item: Item, text: str, end_ms: int, sent_ms: int, complete: bool) -> str:
    """The words of `text`, the item's, in the first `end_ms` of `sent_ms` of sound."""
    if not item.words or (complete and end_ms >= sent_ms):
        return spoken_text(text, end_ms, sent_ms, complete)
    return text[: spoken_end(text, item.words, end_ms)]


def spoken_end(text: str, words: Sequence[SpokenWord], end_ms: float) -> int:
    """The end of the last of `words` that is heard in the first `end_ms`, with what is written behind it."""
    end = max((word.text_end for word in words if word.middle_ms <= end_ms), default=0)
    while 0 < end < len(text) and not (text[end].isspace() or text[end].isalnum()):
        end += 1
    return end


def spoken_text(text: str, end_ms: int, sent_ms: int, complete: bool) -> str:
    """Estimates the words of `text` in the first `end_ms` of `sent_ms` of sound. Unless the answer is `complete`, its
    text is ahead of the sound."""
    units = units_of(text)
    left = sum(units) * end_ms / sent_ms if sent_ms else 0.0
    if not complete:
        left = min(left, _UNITS_PER_S * end_ms / 1000)
    end = 0
    while end < len(text) and left >= units[end]:
        left -= units[end]
        end += 1
    return text[: whole_words(text, end)]


def units_of(text: str) -> list[float]:
    """How long each character is spoken for: a letter one unit."""
    return [_IDEOGRAPH_UNITS if char >= _FIRST_IDEOGRAPH else 1.0 for char in text]


def whole_words(text: str, end: int) -> int:
    """The end of the last word that `text[:end]` has whole."""
    if end in (0, len(text)) or text[end] >= _FIRST_IDEOGRAPH or text[end - 1].isspace() or text[end].isspace():
        return len(text[:end].rstrip())
    *words, _ = text[:end].rsplit(maxsplit=1)
    return len(words[0]) if words else 0
