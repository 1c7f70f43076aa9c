"""The voices of a checkpoint, from its file spk_dict.pt."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

FILE = "spk_dict.pt"
DEFAULT = "Chelsie"


@dataclass(frozen=True)
class VoicePreset:
    """A voice.

    Attributes:
        bos_token_id: its text id in the talker's prompt.
        conditioning: (width,) float32.
        reference_mel: mel frames of a sample, (frames, bins) float32.
    """

    bos_token_id: int
    conditioning: torch.Tensor
    reference_mel: torch.Tensor


def read_voices(folder: Path) -> dict[str, VoicePreset]:
    """The voices of a checkpoint by name, the default first. Only tensors, numbers and names are unpickled.

    Raises:
        ValueError: there is no such file, it holds anything else, or a voice lacks a part.
    """
    path = folder / FILE
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: it has the checkpoint's voices") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not read, as it holds more than voices or is not whole: {reason}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} must be a dictionary of voices by name")
    voices = cast("dict[Any, Any]", content)
    names: list[Any] = sorted(voices, key=lambda name: (name != DEFAULT, str(name)))
    return {str(name): _voice(voices[name], f"{path}: {name}") for name in names}


def _voice(content: Any, name: str) -> VoicePreset:
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be a dictionary with bos_token, cond and ref_mel")
    parts = cast("dict[Any, Any]", content)
    bos = parts.get("bos_token")
    if isinstance(bos, torch.Tensor) and bos.numel() == 1:
        bos = int(bos)
    if not isinstance(bos, int) or bos < 0:
        raise ValueError(f"{name}.bos_token must be a token id, not {bos!r}")
    return VoicePreset(bos, _tensor(parts, "cond", 2, name)[0], _tensor(parts, "ref_mel", 3, name)[0])


def _tensor(content: dict[Any, Any], key: str, dimensions: int, name: str) -> torch.Tensor:
    tensor = content.get(key)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}.{key} is {'no tensor' if key in content else 'missing'}")
    if tensor.dim() != dimensions or tensor.shape[0] != 1 or not tensor.numel():
        raise ValueError(f"{name}.{key} must have {dimensions} dimensions, the first 1, not {tuple(tensor.shape)}")
    if not tensor.isfinite().all():
        raise ValueError(f"{name}.{key} has a number that is not finite")
    return tensor.float()
