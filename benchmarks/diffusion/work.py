"""Requests and outputs of the dit's benchmark, in the words of each side."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import diffusers
import numpy as np
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image

from quartet.v1 import dit_pb2, media_pb2, server_info_pb2
from services.diffusion.families import OWN, family_of

# Of different lengths, so that what is shared is not shared because prompts happen to be alike.
PROMPTS = (
    "a red fox in the snow",
    "a lighthouse on a cliff at dusk, long exposure, waves below",
    "rain",
    "an old wooden table with bread, a jug of milk and two apples, painted in oil",
    "a street in the old town after a storm, with puddles, lanterns and nobody about",
    "two cats asleep",
    "the sound of a slow train over a bridge, heard from the river",
    "a blue house by the sea, at night, in the rain, seen from a boat far away",
)


@dataclass(frozen=True)
class Size:
    """What all requests of a load have in common.

    Attributes:
        steps: denoising steps.
        width, height: in pixels; 0 for sound.
        frames: of a video; 0 for all else.
        audio_s: seconds of sound; 0 for all else.
        guidance: how strictly the prompt is followed.
        sounds: whether the frames come with sound.
    """

    steps: int
    width: int
    height: int
    frames: int
    audio_s: float
    guidance: float
    sounds: bool = False

    def __str__(self) -> str:
        size = f"{self.audio_s:g} s of sound" if self.audio_s else f"{self.width}x{self.height}"
        frames = f", {self.frames} frames" if self.frames else ""
        return f"{size}{frames}, {self.steps} steps, guidance {self.guidance:g}"


@dataclass(frozen=True)
class Wish:
    """One output. `picture`: to be edited, a file that PIL reads."""

    prompt: str
    seed: int
    size: Size
    picture: bytes | None = None

    def start(self, request_id: str) -> dit_pb2.DitStart:
        """As a request."""
        size = self.size
        return dit_pb2.DitStart(
            request_id=request_id,
            prompt=self.prompt,
            seed=self.seed,
            width=size.width,
            height=size.height,
            num_inference_steps=size.steps,
            guidance_scale=size.guidance,
            num_frames=size.frames,
            audio_s=size.audio_s,
            images=[media_pb2.Media(kind=media_pb2.MEDIA_KIND_IMAGE, data=self.picture)] if self.picture else [],
        )

    def arguments(self, pipeline: str) -> dict[str, Any]:
        """As arguments of the call of the class `pipeline`; prompt, negative prompt and generator left out."""
        family, size = family_of(class_of(pipeline)), self.size
        arguments: dict[str, Any] = {"num_inference_steps": size.steps, family.guidance: size.guidance}
        if size.width:
            arguments |= {"width": size.width, "height": size.height}
        if size.frames:
            arguments["num_frames"] = size.frames
        if size.audio_s:
            arguments["audio_end_in_s"] = size.audio_s
        if size.sounds:
            arguments["enable_sound"] = True
        if self.picture is not None:
            arguments["image"] = Image.open(io.BytesIO(self.picture)).convert("RGB")
        return arguments


@dataclass(frozen=True)
class Job:
    """Work of diffusers.

    Attributes:
        prompts, seeds: of each output.
        arguments: of every call.
        negative: each negative prompt; None: the argument is left out.
        result: the field of the pipeline's result.
        together: one call for all of them, otherwise a call each.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    arguments: Mapping[str, Any]
    negative: str | None
    result: str
    together: bool


@dataclass
class Turn:
    """One side's turn at a load.

    Attributes:
        seconds: from the first request sent to the last output complete.
        first_s: to the first output complete.
        step_ms: of a denoising step: (last step's end - first step's end) / (steps - 1), median of outputs; 0 where
            there is one step.
        cpu_s: of the side's process, for an output.
        mean_batch: outputs that shared a step.
        outputs: in the order of the wishes: 8 bit pixels, or sound as PCM16.
    """

    seconds: float
    first_s: float
    step_ms: float
    cpu_s: float = 0.0
    mean_batch: float = 1.0
    outputs: list[np.ndarray] = field(default_factory=list, repr=False)


def wishes(count: int, size: Size, seed: int) -> list[Wish]:
    """`count` outputs that differ in prompt and seed."""
    return [Wish(PROMPTS[i % len(PROMPTS)], seed + i, size) for i in range(count)]


def job(asked: Sequence[Wish], pipeline: str, together: bool) -> Job:
    """Translates requests, all of one size, for diffusers. They are of one picture, if of any."""
    family = family_of(class_of(pipeline))
    return Job(
        [wish.prompt for wish in asked],
        [wish.seed for wish in asked],
        asked[0].arguments(pipeline),
        family.default_negative,
        family.result,
        together,
    )


def repeated(asked: Sequence[Wish], picture: bytes | None) -> list[Wish]:
    """The outputs with the prompt of the first of them, and with `picture`; they differ in seed."""
    return [replace(wish, prompt=asked[0].prompt, picture=picture) for wish in asked]


def class_of(pipeline: str) -> type[DiffusionPipeline]:
    """The pipeline class of that name: diffusers', or one of ours."""
    own = next((module for module, name in OWN.values() if name == pipeline), None)
    found: type[DiffusionPipeline] = getattr(import_module(own) if own else diffusers, pipeline)
    return found


def size_for(info: server_info_pb2.DitInfo, **asked: Any) -> Size:
    """Size of a request: `asked` where it is not None, else the stage's own defaults.

    Args:
        asked: steps, width_height (pixels), frames, audio_s, guidance.
    """
    default = (info.default_width, info.default_height)
    width, height = (0, 0) if info.sample_rate_hz else asked.get("width_height") or default
    guidance = asked.get("guidance")
    return Size(
        asked.get("steps") or info.default_inference_steps,
        width,
        height,
        (asked.get("frames") or info.default_frames) if info.frames_multiple else 0,
        (asked.get("audio_s") or info.default_audio_s) if info.sample_rate_hz else 0.0,
        info.default_guidance_scale if guidance is None else guidance,
        bool(info.soundtrack_rate_hz),
    )


def as_integers(data: np.ndarray) -> np.ndarray:
    """Converts an output for comparison: floats of images (0 to 1) to 8 bit, of sound (samples, channels) to PCM16."""
    if data.dtype == np.uint8:
        return data
    if data.ndim == 2:
        return (data.clip(-1, 1) * 32767).round().astype(np.int16)
    return (data.clip(0, 1) * 255).round().astype(np.uint8)


def apart(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> int:
    """Most steps of 8 bit pixels, or of PCM16, between two values at the same place.

    Raises:
        ValueError: the shapes differ.
    """
    most = 0
    for our, their in zip(ours, theirs, strict=True):
        if our.shape != their.shape:
            raise ValueError(f"the two sides' outputs have other shapes: {our.shape} and {their.shape}")
        most = max(most, int(np.abs(our.astype(int) - their).max(initial=0)))
    return most
