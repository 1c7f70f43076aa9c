"""Cuts text where a speaker would pause."""

import re

from gateway.pipeline.typed_text import is_speakable

# From the best places to the worst: ends of paragraphs and sentences, of clauses, of words. A full stop in a number or
# an address has no white space after it; Chinese and Japanese ends of sentences need none.
SENTENCES = re.compile(r"\n\s*\n|(?<=[.!?\u2026])[\"')\]\u201d\u2019]*\s+|(?<=[\u3002\uff01\uff1f])|\n")
CLAUSES = re.compile(r"(?<=[,;:\u2013\u2014])\s+|(?<=[\u3001\uff0c\uff1b\uff1a])")
WORDS = re.compile(r"\s+")
_PAUSES = (SENTENCES, CLAUSES, WORDS)


def cut(text: str, most_bytes: int) -> list[str]:
    """The fewest pieces of at most `most_bytes` of UTF-8: sentences, else clauses, words, characters."""
    pieces = []
    while len(text.encode()) > most_bytes:
        room = len(text.encode()[:most_bytes].decode(errors="ignore"))
        ends = (max((m.end() for m in pause.finditer(text, 0, room)), default=0) for pause in _PAUSES)
        end = next((end for end in ends if end), 0) or max(1, room)
        pieces.append(text[:end])
        text = text[end:]
    return [piece for piece in (*pieces, text) if is_speakable(piece)]
