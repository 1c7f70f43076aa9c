"""Media that clients gave a name (`uuid`), for later requests that send the name alone."""

import hashlib
from collections import Counter, OrderedDict
from typing import NamedTuple

_MOST_OF_ONE = 4  # of the whole
_ENTRY_BYTES = 1024  # that a file takes beside its content


class MediaName(NamedTuple):
    """A client's name for a file. `owner`: its API key's; None without keys."""

    owner: str | None
    uuid: str


class KeptMedia:
    """Files by owner, kind and uuid. Beyond `most_bytes` the longest unused of the owner that has most goes first. A
    file of more than a quarter of that is not kept."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._files = dict[str | None, OrderedDict[bytes, bytes]]()
        self._bytes = Counter[str | None]()

    def get(self, name: MediaName, kind: str) -> bytes | None:
        files, key = self._files.get(name.owner, {}), _key(name, kind)
        if key in files:
            self._files[name.owner].move_to_end(key)
        return files.get(key)

    def put(self, name: MediaName, kind: str, content: bytes) -> None:
        files, key = self._files.setdefault(name.owner, OrderedDict()), _key(name, kind)
        if (old := files.pop(key, None)) is not None:
            self._bytes[name.owner] -= _size(old)
        if len(content) * _MOST_OF_ONE <= self._most_bytes:
            files[key] = content
            self._bytes[name.owner] += _size(content)
        while self._bytes.total() > self._most_bytes:
            self._forget_one()

    def _forget_one(self) -> None:
        owner = max(self._bytes, key=self._bytes.__getitem__)
        _, content = self._files[owner].popitem(last=False)
        self._bytes[owner] -= _size(content)
        if not self._files[owner]:
            del self._files[owner], self._bytes[owner]


def _key(name: MediaName, kind: str) -> bytes:
    return hashlib.sha256(f"{kind} {name.uuid}".encode(errors="surrogatepass")).digest()


def _size(content: bytes) -> int:
    return len(content) + _ENTRY_BYTES
