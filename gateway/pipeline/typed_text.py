"""A text that is spoken while it is written."""

import asyncio
from collections.abc import AsyncIterator


def is_speakable(text: str) -> bool:
    return any(character.isalnum() for character in text)


class TypedText:
    """A text that grows. Each iteration yields all its pieces, and waits for later ones.

    Attributes:
        characters: length so far.
        is_speakable: whether it has a letter or a digit.
    """

    def __init__(self) -> None:
        self.characters, self.is_speakable = 0, False
        self._pieces: list[str] = []
        self._finished = False
        self._changed = asyncio.Event()

    def add(self, text: str) -> None:
        self.characters += len(text)
        self.is_speakable = self.is_speakable or is_speakable(text)
        self._pieces.append(text)
        self._changed.set()

    def finish(self) -> None:
        self._finished = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[str]:
        read = 0
        while True:
            self._changed.clear()
            while read < len(self._pieces):
                read += 1
                yield self._pieces[read - 1]
            if self._finished and read == len(self._pieces):
                return
            if not self._changed.is_set():
                await self._changed.wait()
