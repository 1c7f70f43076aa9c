"""The published files of a checkpoint, and what no file says. Imports neither torch nor vLLM."""

import json
from pathlib import Path
from typing import Any, cast

from services.registry import ConfigSection

LLM, VISION, WEIGHTS, VAE_WEIGHTS = "llm_config.json", "vit_config.json", "ema.safetensors", "ae.safetensors"
START, END = "<|im_start|>", "<|im_end|>"
MARKS = ("<|vision_start|>", "<|vision_end|>")
"""Around a picture."""
VISION_EPS = 1e-6  # of the norms, where vit_config.json says none


def read(folder: Path, name: str) -> ConfigSection:
    """The object in the file `name`. Raises ValueError: it is missing, or no object."""
    file = folder / name
    try:
        stated: Any = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {name}: the checkpoint is not whole") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(stated, dict):
        raise ValueError(f"{file} is not an object")
    return ConfigSection(cast("dict[str, Any]", stated), f"{file}: ")
