"""What the user heard of an answer that was cut short."""

from gateway.dialects.realtime.conversation.items import Item

# How fast speech is at most, in units a second: letters are one, ideographs three.
_UNITS_PER_S = 18.0
_IDEOGRAPH_UNITS = 3.0


def cut(item: Item, content_index: int, end_ms: int) -> None:
    """Cuts an answer to the first `end_ms` of its sound, and its transcript to the words in them. It stays as it is
    then, whatever is still made of it.

    Args:
        item: the assistant's message.
        content_index: of its sound.
        end_ms: of its sound, at most what was sent.
    """
    part, complete = item.content[content_index], item.members["status"] == "completed"
    part["transcript"] = heard(part.get("transcript") or "", end_ms, item.sent_ms, complete)
    item.sent_ms, item.sampled, item.is_cut = end_ms, None, True


def heard(text: str, end_ms: int, sent_ms: int, complete: bool) -> str:
    """The part of `text` that was spoken in the first `end_ms` of sound, to the word: an estimate, by its length.

    Args:
        text: of the whole answer, or as far as it was written.
        end_ms: heard.
        sent_ms: of sound, for the whole text if it is complete.
        complete: whether all of the text was spoken. If not, the text was ahead of the sound.
    """
    units = [_IDEOGRAPH_UNITS if char >= "\u2e80" else 1.0 for char in text]
    left = sum(units) * end_ms / sent_ms if sent_ms else 0.0
    if not complete:
        left = min(left, _UNITS_PER_S * end_ms / 1000)
    end = 0
    while end < len(text) and left >= units[end]:
        left -= units[end]
        end += 1
    if end == len(text) or text[end].isspace() or text[end] >= "\u2e80" or not end:
        return text[:end].rstrip()
    words = text[:end].rsplit(maxsplit=1)  # not half a word
    if text[end - 1].isspace():
        return text[:end].rstrip()
    return words[0] if len(words) > 1 else ""
