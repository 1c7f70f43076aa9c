"""An adapter's files, in the format of the peft library: whether the thinker can apply all that is in them.

vLLM silently leaves out what it has no place for.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from services.common.engine.weights import stored_tensors, tensors_in
from services.thinker.lora_targets import EXPERTS, WEIGHTS, layers_of, module_of, part_of

CONFIG = "adapter_config.json"


def adapter_digest(folder: Path, base: Path, layers: Collection[str]) -> str:
    """Checks the adapter in `folder` for the checkpoint in `base`; returns a hexadecimal digest of its files. `layers`
    have a place for it, by vLLM's names.

    Raises:
        ValueError: it cannot be applied as it is, and why.
    """
    config, weights = folder / CONFIG, folder / WEIGHTS
    for file in (config, weights):
        if not file.is_file():
            raise ValueError(f"{folder} has no {file.name}: adapters are those of peft, as safetensors")
    ranks = _ranks(config)
    try:
        shapes = {tensor.name: tensor.shape for tensor in tensors_in(weights)}
    except SafetensorError as error:
        raise ValueError(f"{weights} is corrupt or not all there: {error}") from None
    _check_tensors(shapes, base, layers)
    _check_ranks(shapes, ranks)
    digest = hashlib.sha256()
    for file in (config, weights):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _ranks(file: Path) -> set[Any]:
    """The ranks that an adapter_config.json states."""
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{file} must be an object whose peft_type is LORA")
    stated = cast("dict[str, Any]", config)
    patterns: dict[str, Any] = stated.get("rank_pattern") or {}
    return {stated.get("r"), *patterns.values()}


def _check_ranks(shapes: Mapping[str, tuple[int, ...]], ranks: set[Any]) -> None:
    """vLLM takes room, and scales, by the stated ranks, and does not look for the other half."""
    for name, shape in shapes.items():
        is_a = name.endswith(".lora_A.weight")
        other = name.replace(".lora_A.", ".lora_B.") if is_a else name.replace(".lora_B.", ".lora_A.")
        if other not in shapes:
            raise ValueError(f"{name} has no other half, {other}")
        if shape[not is_a] not in ranks:
            stated = ", ".join(map(str, ranks))
            raise ValueError(f"{name} is of rank {shape[not is_a]}, which {CONFIG} does not state: r is {stated}")


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], base: Path, layers: Collection[str]) -> None:
    if not shapes:
        raise ValueError(f"{WEIGHTS} has no tensors")
    weights = _weights(base, [name for name in map(module_of, shapes) if name])
    for name, shape in shapes.items():
        module = module_of(name)
        part = part_of(module)
        if part is None:
            raise ValueError(f"{name} adapts no layer of the thinker's language model: only those can be adapted")
        if len(shape) != 2:
            raise ValueError(f"{name} has {len(shape)} dimensions, not 2")
        wanted = layers_of(part)
        if not set(wanted) <= {*layers}:
            raise ValueError(
                f"{name} adapts experts or their router: that is possible on a GPU only, and for an adapter that is "
                "loaded at run time only with --lora-experts"
            )
        if wanted == EXPERTS:
            continue
        if not wanted or module not in weights:
            raise ValueError(f"{name} adapts a layer that this model does not have: it is of another model")
        _check_shape(name, shape, weights[module])


def _check_shape(name: str, shape: tuple[int, ...], weight: tuple[int, ...]) -> None:
    """vLLM would copy a smaller half into a corner of its place. `weight` is () if it is packed: its shape says nothing
    then."""
    is_a = name.endswith(".lora_A.weight")
    if weight and shape[is_a] != weight[is_a]:
        size = "inputs" if is_a else "outputs"
        raise ValueError(f"{name} has {shape[is_a]} {size}, the layer {weight[is_a]}: it is of another model")


def _weights(base: Path, modules: list[str]) -> dict[str, tuple[int, ...]]:
    """Shape of the weight of those `modules` that the checkpoint in `base` has, () where it is packed."""
    wanted = {f"thinker.{module.removeprefix('thinker.')}": module for module in modules}
    found: dict[str, tuple[int, ...]] = {}
    for tensor in stored_tensors(base):
        layer, _, kind = tensor.name.rpartition(".")
        if layer in wanted and kind in ("weight", "qweight", "weight_packed"):
            found[wanted[layer]] = tensor.shape if kind == "weight" else ()
    return found
