"""Reads what a diffusion model's checkpoint takes, from its config files and the headers of its weights."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cli import hub
from cli.sizes import BudgetError, read_header
from services.common.engine.hub_faults import hub_fault
from services.demo_models import resolve
from services.registry import ConfigSection, families
from services.sizes import DTYPE_BYTES, PipelineSizes

_VARIANT = ".fp16."  # in names of a pipeline's files that some repositories have besides
_COMPONENTS = "model_index.json"
_ELEMENTS = {"F32": 4, "BF16": 2, "F16": 2}
_Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def read_pipeline(model: str, dtype: str = "auto") -> PipelineSizes:
    """Sizes of a dit's checkpoint. `dtype`: of the loaded weights; "auto": as they are stored. Raises BudgetError."""
    for family in families():
        budget: Any = family.part("budget") if family.has("budget") else None
        if (index := getattr(budget, "INDEX", None)) and (config := _config(model, index)) is not None:
            try:
                weights, vae = (_tensors(model, index, file) for file in (budget.WEIGHTS, budget.VAE_WEIGHTS))
                stored = next((_ELEMENTS.get(dtype, 2) for dtype, _ in weights.values()), 2)
                shapes = ({name: shape for name, (_, shape) in each.items()} for each in (weights, vae))
                found: PipelineSizes = budget.pipeline(config, *shapes, DTYPE_BYTES.get(dtype, stored))
                return found
            except (OSError, ValueError, KeyError) as error:
                raise BudgetError(f"{model}: {error}") from None
    weights = pipeline_weights(model)
    encoders = {name for name in weights if "encoder" in name}  # text_encoder_2, vision_language_encoder
    # a checkpoint whose encoder is not apart is read whole
    return PipelineSizes(weights, encoders or {*weights}, {*weights} - encoders)


def _config(model: str, file: str) -> ConfigSection | None:
    """A JSON file of a checkpoint; None: it has none. Raises BudgetError."""
    path = Path(resolve(model)) / file
    if not path.parent.is_dir():
        try:
            path = hub.fetched(model, file)
        except Exception:  # of the hub's client; `pipeline_weights` says what is wrong
            return None
    if not path.is_file():
        return None
    try:
        return ConfigSection(json.loads(path.read_text()), f"{path}: ")
    except (OSError, ValueError, AttributeError) as error:
        raise BudgetError(f"{path} is no object of JSON: {error}") from None


def _tensors(model: str, index: str, file: str) -> _Tensors:
    """(dtype, shape) of each tensor of a file, by name; `index`: of the checkpoint. Raises OSError, ValueError."""
    folder = Path(resolve(model))
    if not folder.is_dir():
        try:
            fetched = hub.fetched(model, index).parent / file  # beside the index, if it has been fetched
            if not fetched.is_file():
                return hub.tensors(model, file)
            folder = fetched.parent
        except Exception as error:  # the hub's client and its HTTP library have no other class in common
            raise ValueError(hub_fault(error)) from None
    return {name: (each["dtype"], tuple(each["shape"])) for name, each in read_header(folder / file).items()}


def pipeline_weights(model: str) -> dict[str, int]:
    """Bytes of each model of a dit's checkpoint, by its folder, or of each file if it has no folders. Raises
    BudgetError."""
    folder = Path(resolve(model))
    try:
        if not folder.is_dir():
            return _of_components(model, _hub_folders(model))
        parts = {path.name: path for path in sorted(folder.iterdir()) if any(path.glob("*.safetensors"))}
        sizes = {name: sum(file.stat().st_size for file in _whole(path)) for name, path in parts.items()}
        return _of_components(model, sizes) or {file.stem: file.stat().st_size for file in _whole(folder)}
    except (OSError, ValueError) as error:
        raise BudgetError(f"{model}: {error}") from None


def _of_components(model: str, sizes: dict[str, int]) -> dict[str, int]:
    """Without folders that the pipeline's index does not name: they are another stage's, such as a vision encoder's."""
    named: Collection[str] = _config(model, _COMPONENTS) or ()
    return {name: size for name, size in sizes.items() if name in named} or sizes


def _whole(folder: Path) -> Iterator[Path]:
    """Files of a model's weights, without those of a variant."""
    return (file for file in folder.glob("*.safetensors") if _VARIANT not in file.name)


def _hub_folders(model: str) -> dict[str, int]:
    """Sizes of the safetensors files in each folder of a repository, or of each if there are no folders. Raises
    ValueError."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or not hub.is_reached():
        raise ValueError("the hub, which knows its size, is out of reach")
    try:
        files = hub.file_sizes(model)
    except Exception as error:
        raise ValueError(hub_fault(error)) from None
    sizes: Counter[str] = Counter()
    alone: dict[str, int] = {}
    for file, size in files.items():
        folder, _, name = file.rpartition("/")
        if name.endswith(".safetensors") and _VARIANT not in name:
            if folder:
                sizes[folder] += size
            else:
                alone[Path(name).stem] = size
    return dict(sizes) or alone
