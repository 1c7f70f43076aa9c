"""A file of tensors, read one at a time."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


class TensorFile:
    """A safetensors file, open within `with`.

    Attributes:
        names: of its tensors.

    Raises:
        ValueError: the file is none, or not whole.
    """

    def __init__(self, file: Path) -> None:
        opened: Any = safe_open
        self._file = file
        try:
            self._reader: Any = opened(file, "pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is corrupt or not all there, fetch it again: {error}") from None
        self.names: frozenset[str] = frozenset()

    def __enter__(self) -> "TensorFile":
        self._reader.__enter__()
        self.names = frozenset(self._reader.keys())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def shape(self, name: str) -> list[int]:
        """Raises ValueError: there is no such tensor."""
        self._check(name)
        return list(self._reader.get_slice(name).get_shape())

    def tensor(self, name: str, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Of a dtype, as `shape`, which may have no axes of length one where the file has some.

        Raises:
            ValueError: there is no such tensor, or it has another shape.
        """
        if (there := [side for side in self.shape(name) if side != 1]) != [side for side in shape if side != 1]:
            raise ValueError(f"{self._file}: {name} is {there}, not {list(shape)}, which the config files say")
        tensor: torch.Tensor = self._reader.get_tensor(name)
        return tensor.to(dtype).reshape(shape)

    def dtype(self, name: str) -> torch.dtype:
        """Raises ValueError: there is no such tensor."""
        self._check(name)
        return self._reader.get_slice(name)[:1].dtype

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"{self._file} has no {name}: the checkpoint is not whole")
