"""What a pipeline class that makes videos makes beside them, as it says itself: sound, and single images; and whether
it brings a picture to the size of its video."""

import inspect
import re
from functools import cache
from typing import Any

from services.diffusion.found import FRAMES, RESULTS, first_of, picture_of, result_of, soundtrack_of
from services.diffusion.loaded import configs_of, sample_rate_hz

_SWITCHES = ("enable_sound",)  # arguments that turn the sound of a video on
_TRAINED = "sound_gen"  # of a denoiser's config: whether it has learned sounds


def sound_switch(cls: type) -> str:
    """The argument that says whether a video gets sound; empty: its class has none, or always makes sound."""
    return first_of(cls, _SWITCHES) if soundtrack_of(cls) else ""


def soundtrack_rate_hz(pipeline: Any) -> int:
    """Of the sound that a loaded pipeline makes with a video; 0: it makes none, as a class with a `sound_switch` may
    whose checkpoint lacks the models for it.

    Raises:
        ValueError: no config says the rate.
    """
    cls = type(pipeline)
    if not soundtrack_of(cls) or any(getattr(each, _TRAINED, True) is False for each in configs_of(pipeline)):
        return 0
    try:
        return sample_rate_hz(pipeline)
    except ValueError:
        if sound_switch(cls):
            return 0
        raise


def _code_of(cls: type) -> str:
    """The source of a class that makes videos; empty: it makes something else, or is of blocks, which have no call."""
    result = result_of(cls)
    makes_videos = result is not None and RESULTS[result] == "video"
    return inspect.getsource(cls) if makes_videos and getattr(cls, "fields", None) is None else ""


@cache
def scales_pictures(cls: type) -> bool:
    """Whether a class that makes videos brings a picture of any size to the size of its video, in its own way."""
    argument = picture_of(cls)
    scaled = rf"preprocess\w*\(\s*{argument},\s*height=height,\s*width=width\b"
    return bool(argument) and re.search(scaled, _code_of(cls)) is not None


@cache
def makes_stills(cls: type) -> bool:
    """Whether a class that makes videos makes an image if it is asked for one frame: its code tells the two apart."""
    frames = first_of(cls, FRAMES)
    return bool(frames) and re.search(rf"\bis_image\b\s*=\s*{frames} == 1\b", _code_of(cls)) is not None
