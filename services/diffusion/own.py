"""Pipeline classes that are not diffusers', for checkpoints without an index of its."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn


class OwnPipeline(DiffusionPipeline):
    """A pipeline class of a family's folder, written in the form of diffusers'. `families.OWN` lists the classes.

    Attributes:
        files: of a checkpoint, as patterns of names.
        readers: components that `encode_prompt` calls, perhaps for long: others' steps go on between their calls.
        denoisers: components that are called at each step.
        settings: of the dit's, those that only some values of work with the class.
    """

    files: ClassVar[tuple[str, ...]]
    readers: ClassVar[tuple[str, ...]]
    denoisers: ClassVar[tuple[str, ...]]
    settings: ClassVar[Mapping[str, tuple[Any, ...]]]

    def kept(self, name: str, key: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, or gave before for an equal `key`, which has all that it depends on. Views for one call
        replace it, where encodings are kept.

        Args:
            name: of what is computed, for metrics.
        """
        return compute()

    def wrote(self, text: str) -> None:
        """Is called with all that has been written so far, before anything is made. Views for one call replace it."""

    @classmethod
    @abstractmethod
    def stored_dtype(cls, folder: Path) -> torch.dtype:
        """What the first denoiser's weights are stored in. Raises ValueError: the checkpoint is not whole."""

    @classmethod
    @abstractmethod
    def empty_models(cls, folder: Path, names: Collection[str], dtype: torch.dtype) -> dict[str, nn.Module]:
        """The components in `names`, if they are models, without weights. Raises ValueError: as `stored_dtype`."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, dtype: torch.dtype, given: dict[str, nn.Module]) -> "OwnPipeline":
        """The pipeline, on the CPU. Raises ValueError: as `stored_dtype`.

        Args:
            given: components that are not read from the checkpoint.
        """

    @classmethod
    def from_pretrained(cls, folder: Any, dtype: torch.dtype, **given: nn.Module) -> "OwnPipeline":  # type: ignore[override]
        """As diffusers' own classes are loaded. Raises ValueError: as `load`."""
        return cls.load(Path(folder), dtype, given)
