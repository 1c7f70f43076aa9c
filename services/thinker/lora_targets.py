"""The layers that adapters may change: vLLM takes memory for all of them at its start. Imports no torch."""

import re
from pathlib import Path

from services.thinker.config import ThinkerSettings

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # peft's
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LAYER = re.compile(r"(thinker\.)?model\.layers\.\d+\.(?P<part>.+)")
_EXPERTS = re.compile(r"mlp\.(gate|experts(\..+)?)")
_LINEAR = {
    **{f"self_attn.{name}_proj": "qkv_proj" for name in "qkv"},
    "self_attn.o_proj": "o_proj",
    **{f"mlp.{name}_proj": "gate_up_proj" for name in ("gate", "up")},
    "mlp.down_proj": "down_proj",
}
LINEAR = tuple(dict.fromkeys(_LINEAR.values()))
"""vLLM's names of the layers of attention and of dense blocks."""
EXPERTS = ("experts", "gate")
"""Those of experts and their router. vLLM's layer of adapted experts is made for GPUs only."""


def adapted_layers(settings: ThinkerSettings, *, on_cpu: bool) -> list[str]:
    """vLLM's names of the layers that have a place for adapters.

    These are the layers of the adapters that are named at the start. If others can be loaded at run time, they are
    LINEAR too, and EXPERTS if that is set. On a CPU they are always LINEAR.

    Raises:
        ValueError: an adapter cannot be read, or changes no layer.
    """
    found = {layer for name, path in settings.lora.items() if not on_cpu for layer in _layers_of(name, Path(path))}
    if on_cpu or settings.lora_root is not None:
        found.update(LINEAR)
    if settings.lora_experts and not on_cpu:
        found.update(EXPERTS)
    return sorted(found)


def _layers_of(name: str, folder: Path) -> set[str]:
    """Of the adapter `name` in `folder`."""
    from safetensors import SafetensorError, safe_open  # not there where only a gateway is installed

    try:
        with safe_open(folder / WEIGHTS, framework="np") as file:
            parts = {part_of(module_of(tensor)) for tensor in file.keys()}  # noqa: SIM118, not a dict
    except (OSError, SafetensorError) as error:
        raise ValueError(f"lora {name}: {folder / WEIGHTS}: {error}") from None
    found = {layer for part in parts if part for layer in layers_of(part)}
    if not found:
        raise ValueError(f"lora {name}: {folder / WEIGHTS} adapts no layer of the thinker's language model")
    return found


def module_of(tensor: str) -> str | None:
    """The layer that a tensor adapts, in the adapter's spelling; None: it is no half of an adapter."""
    match = _TENSOR.fullmatch(tensor)
    return match["module"].removeprefix(_PREFIX) if match else None


def part_of(module: str | None) -> str | None:
    """The layer's place in its block of the language model, "mlp.gate"; None: it is none of these."""
    match = _LAYER.fullmatch(module or "")
    return match["part"] if match else None


def layers_of(part: str) -> tuple[str, ...]:
    """vLLM's names for a place in a block; none: no adapter can change it."""
    if _EXPERTS.fullmatch(part):
        return EXPERTS
    return (_LINEAR[part],) if part in _LINEAR else ()
