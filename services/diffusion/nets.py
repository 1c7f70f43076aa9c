"""ControlNets and T2I adapters, which read control images: of a pipeline, or of checkpoints of their own."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.auto_model import AutoModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from services.common.revisions import parted
from services.diffusion.families import checkpoint_class
from services.diffusion.found import NETS, control_of, parameters_of

_OWN_KINDS = {
    "ControlNetUnionModel": "ControlNetUnion",
    "ControlNetXSAdapter": "ControlNetXS",
    "SparseControlNetModel": "SparseControlNet",
    "T2IAdapter": "Adapter",
}
"""Class of a net -> what diffusers adds to the name of a pipeline that calls one. Of others it is "ControlNet"."""


def pipeline_class(folder: Path, nets: Sequence[str]) -> type[DiffusionPipeline]:
    """The checkpoint's, or the one of diffusers that has its models and calls `nets`; reads no weights.

    Raises:
        ValueError: there is none, or a net is no checkpoint of diffusers.
    """
    cls = checkpoint_class(folder)
    if not nets:
        return cls
    kinds = {_OWN_KINDS.get(name, "ControlNet"): name for name in map(_class_of, nets)}
    if len(kinds) > 1:
        raise ValueError(f"controlnet: {' and '.join(kinds.values())} cannot be in one pipeline; give one kind")
    ((kind, net),) = kinds.items()
    name = re.sub(r"Pipeline$", f"{kind}Pipeline", cls.__name__)
    if name not in dir(diffusers):
        raise ValueError(f"controlnet: diffusers has no {name}, which would call a {net}; leave it out")
    return getattr(diffusers, name)


def load_nets(cls: type[DiffusionPipeline], nets: Sequence[str], dtype: torch.dtype) -> Mapping[str, Any]:
    """Components of `cls` that are read from `nets`, by name. Raises ValueError."""
    component = "adapter" if cls.__name__.endswith("AdapterPipeline") else "controlnet"
    loaded: list[Any] = []
    for net in nets:
        name, revision = parted(net)
        try:
            loaded.append(AutoModel.from_pretrained(name, revision=revision, dtype=dtype))
        except OSError as error:
            raise ValueError(f"controlnet: {net}: {error}") from None
    return {component: loaded if len(loaded) > 1 else loaded[0]}


def _class_of(net: str) -> str:
    name, revision = parted(net)
    try:
        config: Any = AutoModel.load_config(name, revision=revision)
    except (OSError, ValueError) as error:
        reason = f"{net} is neither a directory nor a model of diffusers on the hub: {error}"
        raise ValueError(f"controlnet: {reason}") from None
    return str(config.get("_class_name"))


# What follows reads a loaded pipeline.


def control_images(pipeline: Any) -> int:
    """Control images that a call reads, each with a net of its own."""
    if not control_of(type(pipeline)):
        return 0
    nets = _loaded_nets(pipeline)
    return len(nets) if nets else 1


def _loaded(pipeline: Any) -> list[torch.nn.Module]:
    """Its components that read control images; empty: a denoiser does."""
    return [part for name in NETS if (part := getattr(pipeline, name, None)) is not None]


def _members(part: torch.nn.Module) -> Any:
    """The nets of several that are one component; None: it is one net."""
    return getattr(part, "nets", None) or getattr(part, "adapters", None)


def _loaded_nets(pipeline: Any) -> list[Any]:
    return [net for part in _loaded(pipeline) for net in _members(part) or [part]]


def needs_control_modes(pipeline: Any) -> bool:
    """Whether its net reads several kinds of control images, so that a call must name theirs: `control_mode`."""
    kinds = (getattr(net, "union", False) or hasattr(net.config, "num_control_type") for net in _loaded_nets(pipeline))
    return "control_mode" in parameters_of(type(pipeline)) and any(kinds)


def takes_several(pipeline: Any) -> bool:
    """Whether the argument for control images is a list."""
    return any(map(_members, _loaded(pipeline)))
