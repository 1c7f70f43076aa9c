"""Loads some of a pipeline's models and leaves the others without weights, so that two processes can share a pipeline.

A model without weights (torch's device "meta") still answers what its config says, which is all that the other part of
the pipeline asks of it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.pipelines.pipeline_utils import DiffusionPipeline


def load_meta_modules(folder: Path, dtype: torch.dtype, wanted: Callable[[str], bool]) -> dict[str, torch.nn.Module]:
    """Models of the checkpoint whose names are `wanted`, without weights.

    Args:
        folder: of the checkpoint.
        dtype: that they say they have.
    """
    index = json.loads((folder / "model_index.json").read_text())
    made = {}
    for name, entry in index.items():
        if wanted(name) and isinstance(entry, list) and entry[1] is not None:
            cls = _class(*entry)
            with init_empty_weights(include_buffers=True):
                if hasattr(cls, "load_config"):  # diffusers
                    model = cls.from_config(cls.load_config(folder / name))
                else:
                    model = cls._from_config(cls.config_class.from_pretrained(folder / name))
            made[name] = model.to(dtype=dtype)
    return made


def _class(library: str, name: str) -> Any:
    module = import_module(library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}")
    return getattr(module, name, None) or getattr(import_module("transformers"), name)


@contextmanager
def without(pipeline: Any, models: dict[str, torch.nn.Module]) -> Iterator[None]:
    """`pipeline` without `models` inside, for what moves a pipeline's weights; afterwards it runs where those are."""
    for name in models:
        setattr(pipeline, name, None)
    yield
    device = pipeline._execution_device
    if models:
        run_on(pipeline, device)
    for name, model in models.items():
        setattr(pipeline, name, model)


def run_on(pipeline: DiffusionPipeline, device: torch.device) -> None:
    """The pipeline looks for its device at its first model, which may have no weights."""
    cls = type(pipeline)
    overridden = {"_execution_device": property(lambda self: device), "device": property(lambda self: device)}
    pipeline.__class__ = type(cls.__name__, (cls,), {**overridden, "__module__": cls.__module__})
