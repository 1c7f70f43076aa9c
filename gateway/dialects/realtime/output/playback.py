"""Answers that the server itself plays to the user, in real time."""

from typing import Protocol


class Playback(Protocol):
    @property
    def is_playing(self) -> bool:
        """Whether the user hears an answer, or will."""
        ...

    def cut(self) -> None:
        """The user has begun to speak: what was not played is dropped."""
        ...
