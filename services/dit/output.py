"""One output: its pipeline's call, and the engine's events about it."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch.nn import functional

from services.common.errors import InternalError, StageError
from services.diffusion.own import OwnPipeline
from services.diffusion.pipelines import own_view
from services.diffusion.request import OutputSpec
from services.dit.coroutine import ModelCall, PipelineTask


class Started:
    """The engine begins."""


class Encoded:
    """The prompt is read; denoising begins."""


@dataclass(frozen=True)
class Thoughts:
    """What the model has written so far, before it makes anything: it begins with what the event before had."""

    text: str


@dataclass(frozen=True)
class Progress:
    """Denoising steps done, of all. `batch`: outputs that shared the last one."""

    step: int
    steps: int
    batch: int


@dataclass(frozen=True)
class Preview:
    """The clean picture implied after `step` steps: (height, width, 3), uint8, on the CPU."""

    step: int
    pixels: torch.Tensor


@dataclass(frozen=True)
class Done:
    """The result on the CPU, contiguous: (height, width, 3) or (frames, height, width, 3), uint8 or float32 from 0 to
    1; or (samples, channels), float32, which may go beyond -1 to 1. `soundtrack`: of a video, as sound."""

    data: torch.Tensor
    soundtrack: torch.Tensor | None = None


@dataclass(frozen=True)
class Failed:
    """No result."""

    error: StageError


Event = Started | Thoughts | Encoded | Progress | Preview | Done | Failed


PREVIEW_SIDE = 256  # pixels
VIDEO_DIMENSIONS = 4  # frames, height, width and color
_SOUND_DIMENSIONS = 2  # channels and samples


@dataclass(eq=False)
class Output:
    """An output in the engine. All but `cancelled` belongs to the engine's thread.

    Attributes:
        virtual_time_s: its share of engine time; it starts at the least of the others'.
        deferred_s: engine time that is not in virtual_time_s yet.
        batch: outputs that shared its latest denoising call.
        encoded: whether its prompt is read.
    """

    spec: OutputSpec
    emit: Callable[[Event], None]
    cancelled: bool = False
    virtual_time_s: float = 0.0
    deferred_s: float = 0.0
    batch: int = 1
    step: int = 0
    encoded: bool = False
    task: PipelineTask | None = None

    def begin(self, device: torch.device) -> None:
        """Makes the task, whose greenlet belongs to the calling thread; its models are on `device`."""
        self.task = PipelineTask(self._make, self.spec.seed, device)

    def end(self) -> None:
        """Ends the pipeline and frees what it holds."""
        if self.task is not None:
            self.task.stop()
        self.task = None

    @property
    def call(self) -> ModelCall | None:
        """What the pipeline waits for, if it has begun."""
        return self.task.call if self.task is not None else None

    @property
    def reads(self) -> bool:
        """Whether its pipeline has begun, and reads its prompt."""
        return self.call is not None and self.call.point.reads

    @property
    def waits_for(self) -> str | None:
        return self.call.point.name if self.call is not None else None

    def _make(self) -> Done:
        with own_view(self.spec.pipeline, self.spec.conditioning, self._follow) as pipeline:
            if isinstance(pipeline, OwnPipeline):
                vars(pipeline)["wrote"] = lambda text: self.emit(Thoughts(text))
            data, soundtrack = self._call(pipeline)
            return Done(data if self.spec.floats else _to_bytes(data), soundtrack)

    def _call(self, pipeline: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        generator = torch.Generator("cpu").manual_seed(self.spec.seed)
        output_type = "pt" if self.spec.media == "sound" else "np"
        result = pipeline(**self.spec.arguments, generator=generator, output_type=output_type)
        return read(self.spec, result)

    def _follow(self, scheduler: Any) -> None:
        """Makes `scheduler` report its steps and make previews."""
        step = scheduler.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            sigma = _sigma(scheduler, args[1]) if self.spec.preview_steps else None
            result = step(*args, **kwargs)
            self.step = min(self.step + 1, self.spec.steps)  # some schedules have steps of two halves
            self.emit(Progress(self.step, self.spec.steps, self.batch))
            if self.step in self.spec.preview_steps:
                latents = result[0] if sigma is None else args[2] - sigma * args[0]
                self._preview(latents.to(result[0].dtype))
            return result

        scheduler.step = _FollowedStep(scheduler, counted)

    def _preview(self, latents: torch.Tensor) -> None:
        """Decodes `latents` by the pipeline itself: called once more, it finds its prompt encoded, gets the
        transformer's latest result for each call, and from its scheduler always `latents`."""

        def fix(scheduler: Any) -> None:
            scheduler.step = lambda *args, **kwargs: (latents,)

        task = self.task
        assert task is not None
        with own_view(self.spec.pipeline, self.spec.conditioning, fix) as pipeline:
            task.replay = task.last
            try:
                pixels, _ = self._call(pipeline)
            finally:
                task.replay = None
        self.emit(Preview(self.step, _to_bytes(_shrink(pixels))))


class _FollowedStep:
    """A scheduler's `step`, replaced by `call`. A copy of the scheduler, as pipelines make for a video's sound, has the
    step of its class; a copy of its attributes alone, which a pipeline puts back later (panoramas), has this one."""

    def __init__(self, scheduler: Any, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, scheduler.step)  # pipelines look at its signature
        self._scheduler, self._call = scheduler, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._scheduler))
        return self if copied is None else types.MethodType(type(copied).step, copied)


def _sigma(scheduler: Any, timestep: Any) -> Any:
    """Noise level before a step of a flow-matching scheduler, which gives its clean sample; else None."""
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return None
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    sigmas: Any = scheduler.sigmas
    return sigmas[scheduler.step_index]


def read(spec: OutputSpec, result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a pipeline's call returned for `spec`, as in `Done`. Most return a batch of one, some classes of videos that
    one itself."""
    made, sound = result[spec.result], result.get(spec.soundtrack)
    is_batch = spec.media != "video" or isinstance(made[0], list) or np.ndim(made[0]) == VIDEO_DIMENSIONS
    one = made[0] if is_batch else made
    data = _to_tensor(one[0] if spec.still else one, spec.media == "sound")
    if sound is None:
        return data, None
    is_batch = not isinstance(sound, torch.Tensor) or sound.dim() > _SOUND_DIMENSIONS
    return data, _to_tensor(sound[0] if is_batch else sound, is_sound=True)


def _to_tensor(data: Any, is_sound: bool) -> torch.Tensor:
    """As in `Done`, floats."""
    if not isinstance(data, torch.Tensor):  # pictures, of some pipelines a list of frames
        data = np.asarray(data)
        data = data.astype(np.float32) / 255 if data.dtype == np.uint8 else data
    tensor = torch.as_tensor(data).detach().float().cpu()
    if not tensor.isfinite().all():
        raise InternalError("the model's output has values that are no numbers; try more steps or less guidance")
    if is_sound:
        return torch.atleast_2d(tensor).T.contiguous()  # it is (channels, samples), or one channel's samples
    if tensor.shape[-1] != 3 and tensor.dim() > 2 and tensor.shape[-3] == 3:
        tensor = tensor.movedim(-3, -1)
    return tensor.contiguous()


def _shrink(pixels: torch.Tensor) -> torch.Tensor:
    """Scales (height, width, 3) so that no side is over PREVIEW_SIDE."""
    scale = PREVIEW_SIDE / max(pixels.shape[:2])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in pixels.shape[:2]]
        pixels = functional.interpolate(pixels.permute(2, 0, 1)[None], size, mode="area")[0].permute(1, 2, 0)
    return pixels


def _to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8)
