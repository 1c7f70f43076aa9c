"""Files of sound that are read in rounds, for minutes, by fewer processes than there are files."""

import threading
from collections.abc import Generator, Iterator

import numpy as np

from services.common.media.decoders import Decoders

_MOST_KEPT = 16  # processes between rounds; each thread that reads has one, too


class SoundFiles:
    """Keeps the processes of some files for their next round. For any thread."""

    def __init__(self, decoders: Decoders) -> None:
        self.decoders = decoders
        self._kept: dict[SoundFile, Iterator[np.ndarray]] = {}
        self._lock = threading.Lock()

    def take(self, file: "SoundFile") -> Iterator[np.ndarray] | None:
        with self._lock:
            return self._kept.pop(file, None)

    def keep(self, file: "SoundFile", left: Iterator[np.ndarray]) -> None:
        """Of too many, the one that is soonest read again up to its place is let go."""
        with self._lock:
            if not file.closed:
                self._kept[file] = left
            if len(self._kept) > _MOST_KEPT:
                del self._kept[min(self._kept, key=lambda each: each.position)]


class SoundFile:
    """The mono sound of `data`. For one thread at a time, but for `close`.

    Args:
        max_s: of the sound, by the file's headers; it may be longer.

    Attributes:
        position: samples that were read.
        closed: nobody waits for the rest.
    """

    def __init__(self, files: SoundFiles, data: bytes, rate_hz: int, max_s: float) -> None:
        self.position, self.closed = 0, False
        self._files, self._data, self._rate_hz, self._max_s = files, data, rate_hz, max_s

    def pieces(self) -> Generator[np.ndarray, None, None]:
        """Yields what follows, (samples,) float32. To go on later, close it and call this again.

        Raises MediaError, InternalError and RequestCancelled, as of `Decoders`."""
        left = self._files.take(self) or self._from_position()
        try:
            for piece in left:
                self.position += len(piece)
                yield piece
        except GeneratorExit:
            self._files.keep(self, left)
            raise

    def _from_position(self) -> Iterator[np.ndarray]:
        begins = 0
        for piece in self._read():
            if begins >= self.position:
                yield piece
            begins += len(piece)

    def _read(self) -> Iterator[np.ndarray]:
        with self._files.decoders.lend(lambda: self.closed) as read:
            yield from read("sound", self._data, self._rate_hz, self._max_s)

    def close(self) -> None:
        """Ends its process. From any thread: one that reads has RequestCancelled."""
        self.closed = True
        self._files.take(self)
