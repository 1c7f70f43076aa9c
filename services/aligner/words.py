"""The words of a text, and their places in it."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple


class WordPlace(NamedTuple):
    """Of a word: its first character, and the first one behind it."""

    begin: int
    end: int


def split_words(text: str) -> list[str]:
    """Words without punctuation. A Chinese character is a word; else words have spaces between them."""
    words, word = list[str](), ""
    for letter in text:
        if is_ideograph(letter):
            words += [word, letter]
            word = ""
        elif letter.isspace():
            words.append(word)
            word = ""
        elif is_spoken(letter):
            word += letter
    return [each for each in (*words, word) if each]


def is_ideograph(letter: str) -> bool:
    return unicodedata.name(letter, "").startswith("CJK") and unicodedata.category(letter) == "Lo"


def is_spoken(letter: str) -> bool:
    """Whether a character is part of a word: letters, digits, and the apostrophe."""
    return letter == "'" or unicodedata.category(letter)[0] in "LN"


def places(text: str, words: Sequence[str]) -> list[WordPlace]:
    """Where `words`, of which `text` consists, are in it. Characters between their letters belong to them."""
    found, at = list[WordPlace](), 0
    for word in words:
        begin = None
        for letter in word:
            where = text.find(letter, at)
            if where >= 0:
                begin = where if begin is None else begin
                at = where + 1
        found.append(WordPlace(at if begin is None else begin, at))
    return found
