"""What a loaded pipeline says of itself, by its models' configs, its tokenizers and its check of sizes."""

import inspect
import math
import re
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from services.diffusion.found import default_of, is_required, takes_labels

_TIMES = re.compile(r"^t$|(^|_)timesteps?(_ratio)?$")
_CLASSES = ("num_embeds_ada_norm", "num_class_embeds")  # of a config: how many there are
_LEAST_TOKENS_OF_NO_LIMIT = 1 << 20  # tokenizers without a limit state a huge one
_MULTIPLES = (1, 2, 4, 8, 16)


def is_denoiser(cls: type) -> bool:
    """Whether models of the class are called at each step: with its time."""
    return issubclass(cls, torch.nn.Module) and any(map(_TIMES.search, inspect.signature(cls.forward).parameters))


def denoisers(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Models that are called at each step, by their components' names."""
    return {name: part for name, part in pipeline.components.items() if part is not None and is_denoiser(type(part))}


def configs_of(pipeline: Any) -> list[Any]:
    """Configs of the denoisers; several ControlNets as one have none."""
    return [each.config for each in denoisers(pipeline).values() if hasattr(each, "config")]


def _number_of(pipeline: Any, *names: str) -> int | None:
    """The first attribute that is a number."""
    return next((value for name in names if isinstance(value := getattr(pipeline, name, None), int)), None)


def spatial_scale(pipeline: Any) -> int:
    """Pixels a latent, along a side."""
    own = _number_of(pipeline, "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    return own or _number_of(getattr(pipeline, "vae", None), "spatial_compression_ratio") or 8


def frames_multiple(pipeline: Any) -> int:
    """The number that frames - 1 is a multiple of."""
    own = _number_of(pipeline, "vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    return own or _number_of(getattr(pipeline, "vae", None), "temporal_compression_ratio") or 1


def size_multiple(pipeline: Any) -> int:
    """The least that the class's own check of sizes and the denoisers' patches take."""
    scale = spatial_scale(pipeline) * getattr(pipeline, "packs", 1)
    patches = [_side(getattr(config, "patch_size", None)) or 1 for config in configs_of(pipeline)]
    return math.lcm(*(scale * patch for patch in patches), next(s for s in _sides(scale) if _is_taken(pipeline, s)))


def _sides(scale: int) -> list[int]:
    """Sides to try; the last is believed."""
    return [scale * times for times in _MULTIPLES]


def _side(value: Any) -> int | None:
    """The last of several: width is after frames and height."""
    value = value[-1] if isinstance(value, (tuple, list)) and value else value
    return value if isinstance(value, int) else None


def _is_taken(pipeline: Any, side: int) -> bool:
    """Whether `check_inputs` has nothing against a square of `side` pixels."""
    check = getattr(pipeline, "check_inputs", None)
    if check is None or side == _sides(spatial_scale(pipeline))[-1]:
        return True
    given: dict[str, Any] = {}
    for name, each in inspect.signature(check).parameters.items():
        if name in ("height", "width"):
            given[name] = side
        elif name == "prompt":
            given[name] = "a"
        elif is_required(each):
            given[name] = default_of(type(pipeline), name)
    try:
        check(**given)
    except Exception as error:  # of what it lacks, it may say anything
        return "divisible" not in str(error)
    return True


def own_size(pipeline: Any) -> tuple[int, int]:
    """(width, height) that calls without a size have; (0, 0): it is not known."""
    cls, scale = type(pipeline), spatial_scale(pipeline)
    width, height = (default_of(cls, name) or _set_in_code(cls, name) for name in ("width", "height"))
    if isinstance(width, int) and isinstance(height, int):
        return width, height
    for source in (pipeline, *configs_of(pipeline)):
        own = getattr(source, "default_width", None), getattr(source, "default_height", None)
        if isinstance(own[0], int) and isinstance(own[1], int):
            return own[0], own[1]
        for width, height in (("default_sample_size",) * 2, ("sample_width", "sample_height"), ("sample_size",) * 2):
            sides = getattr(source, width, None), getattr(source, height, None)
            sides = (sides[0][1], sides[0][0]) if isinstance(sides[0], (tuple, list)) and len(sides[0]) == 2 else sides
            if isinstance(sides[0], int) and isinstance(sides[1], int):
                return sides[0] * scale, sides[1] * scale
    return 0, 0


def _set_in_code(cls: type, argument: str) -> int | None:
    """What the call's code sets an argument to that is None; None: it sets no number."""
    if not inspect.isfunction(cls.__call__):
        return None
    code = inspect.getsource(cls.__call__)
    found = re.search(rf"\bif {argument} is None:\n\s+{argument} = (\d+)\n", code)
    return int(found[1]) if found else None


def own_frames(pipeline: Any, argument: str) -> int:
    """Frames of a call that gives none; 0: it is not known."""
    configs = configs_of(pipeline)
    known = [default_of(type(pipeline), argument), _set_in_code(type(pipeline), argument)]
    known += [getattr(pipeline, "default_num_frames", None)]
    known += [getattr(config, name, None) for name in ("sample_frames", "num_frames") for config in configs]
    return next((value for value in known if isinstance(value, int)), getattr(pipeline, "usual_frames", 0))


def classes(pipeline: Any) -> int:
    """How many classes the models know; 0: prompts are texts, or the models know none."""
    if not takes_labels(type(pipeline)):
        return 0
    return next((number for config in configs_of(pipeline) if (number := _number_of(config, *_CLASSES))), 0)


def tokenizer_of(pipeline: Any) -> PreTrainedTokenizerBase | None:
    """The one that reads most of a prompt, alone or in a processor; None: there is none."""
    parts = [getattr(part, "tokenizer", part) for part in pipeline.components.values()]
    tokenizers = [part for part in parts if isinstance(part, PreTrainedTokenizerBase)]
    return max(tokenizers, key=lambda each: min(each.model_max_length, _LEAST_TOKENS_OF_NO_LIMIT), default=None)


def max_prompt_tokens(pipeline: Any) -> int:
    """0: it is not known."""
    own = default_of(type(pipeline), "max_sequence_length")
    if isinstance(own, int):
        return own
    tokenizer = tokenizer_of(pipeline)
    most = tokenizer.model_max_length if tokenizer is not None else 0
    return most if most < _LEAST_TOKENS_OF_NO_LIMIT else 0


def sample_rate_hz(pipeline: Any) -> int:
    """Of the sound that it makes. Raises ValueError: no config says it."""
    for name in ("vocoder", "audio_vae", "sound_tokenizer", "vae", "autoencoder"):
        config = getattr(getattr(pipeline, name, None), "config", None)
        if rate := _number_of(config, "sampling_rate", "sample_rate", "output_sampling_rate"):
            return rate
    if rate := _number_of(pipeline, "sample_rate", "sampling_rate", "audio_sampling_rate", "sound_sampling_rate"):
        return rate
    raise ValueError(f"{type(pipeline).__name__} is not served: no model of it says its sample rate")
