"""One output on its way: a pipeline's call as a strand, its own scheduler, its progress and previews."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch.nn import functional

from services.common.rpc.errors import InternalError, StageError
from services.dit.conditioning import Conditioning
from services.dit.weave import Call, Strand

PREVIEW_SIDE = 256  # pixels


@dataclass(frozen=True)
class Order:
    """What to make.

    Attributes:
        pipeline: to be called; shared by all orders of its kind.
        arguments: of its call, less generator, output type and callbacks.
        seed: of the noise.
        loras: (adapter, weight), sorted; the others are off.
        result: the field of the pipeline's result: "images", "frames" or "audios".
        conditioning: what is known of the prompt, and where what is not will be kept.
        preview_steps: after which steps (from 1) a preview is made.
        steps: denoising steps it takes.
        floats: whether the result stays float32; sound always does.
    """

    pipeline: DiffusionPipeline
    arguments: Mapping[str, Any]
    seed: int
    result: str
    conditioning: Conditioning = field(default_factory=Conditioning)
    loras: tuple[tuple[str, float], ...] = ()
    preview_steps: frozenset[int] = frozenset()
    steps: int = 0
    floats: bool = True


@dataclass(frozen=True)
class Started:
    """The engine begins."""


@dataclass(frozen=True)
class Encoded:
    """The prompt, and what came with it, is read; denoising begins."""


@dataclass(frozen=True)
class Progress:
    """Denoising steps done, of all, and how many outputs shared the last of them."""

    step: int
    steps: int
    batch: int


@dataclass(frozen=True)
class Preview:
    """The picture as the model sees it after `step` steps: (height, width, 3), uint8, on the CPU."""

    step: int
    pixels: torch.Tensor


@dataclass(frozen=True)
class Done:
    """The result on the CPU, contiguous: (height, width, 3) or (frames, height, width, 3), uint8 or float32 from 0 to
    1; or (samples, channels), float32, which may go beyond -1 to 1."""

    data: torch.Tensor


@dataclass(frozen=True)
class Failed:
    """No result."""

    error: StageError


Event = Started | Encoded | Progress | Preview | Done | Failed


@dataclass(eq=False)
class Output:
    """An order in the engine. Made by `DitEngine.submit`; all but `cancelled` belongs to the engine's thread.

    Attributes:
        served_s: engine time spent on it, its share of shared steps; from the level of the others at its start.
        owed_s: engine time that is not in served_s yet.
        batch: outputs that shared its latest denoising call.
    """

    order: Order
    emit: Callable[[Event], None]
    cancelled: bool = False
    served_s: float = 0.0
    owed_s: float = 0.0
    batch: int = 1
    step: int = 0
    strand: Strand | None = None

    def begin(self) -> None:
        """Makes the strand. A greenlet belongs to the thread that made it: only the engine's may do this."""
        self.strand = Strand(self._make)

    def end(self) -> None:
        """Ends the pipeline where it is, and frees what it holds."""
        if self.strand is not None:
            self.strand.stop()
        self.strand = None

    @property
    def call(self) -> Call | None:
        """What the pipeline waits for; None before its start and after its end."""
        return self.strand.call if self.strand is not None else None

    @property
    def waits_for(self) -> str | None:
        """The name of that call's function; None before the start, which reads the prompt."""
        return self.call.point.name if self.call is not None else None

    def _make(self) -> Done:
        """The strand's body."""
        with view(self.order.pipeline, self._follow) as pipeline:
            self.order.conditioning.attach(pipeline)
            data = self._call(pipeline)
            return Done(data if self.order.floats else _to_bytes(data))

    def _call(self, pipeline: Any) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(self.order.seed)
        result = pipeline(**self.order.arguments, generator=generator, output_type=_output_type(self.order))
        return _to_tensor(result[self.order.result][0])

    def _follow(self, scheduler: Any) -> None:
        """Counts the steps of `scheduler`, reports them and makes previews."""
        step = scheduler.step

        @functools.wraps(step)  # pipelines look at its signature
        def counted(model_output: Any, timestep: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sigma = _sigma(scheduler, timestep)
            result = step(model_output, timestep, sample, *args, **kwargs)
            self.step += 1
            self.emit(Progress(self.step, self.order.steps, self.batch))
            if self.step in self.order.preview_steps:
                latents = result[0] if sigma is None else sample - sigma * model_output
                self._preview(latents.to(result[0].dtype))
            return result

        scheduler.step = counted

    def _preview(self, latents: torch.Tensor) -> None:
        """Decodes `latents` by the pipeline itself: called once more, it finds its prompt encoded, gets the
        transformer's latest answer for each of its questions, and from its scheduler always `latents`."""

        def fix(scheduler: Any) -> None:
            scheduler.step = lambda *args, **kwargs: (latents,)

        strand = self.strand
        assert strand is not None
        with view(self.order.pipeline, fix) as pipeline:
            self.order.conditioning.attach(pipeline)
            strand.replay = strand.last
            try:
                pixels = self._call(pipeline)
            finally:
                strand.replay = None
        self.emit(Preview(self.step, _to_bytes(_shrink(pixels))))


@contextlib.contextmanager
def view(pipeline: DiffusionPipeline, prepare: Callable[[Any], None]) -> Iterator[Any]:
    """`pipeline` for one call: the same models, a scheduler and flags of its own. It is emptied afterwards: its
    functions refer to it, and only the garbage collector would find that out, some time later."""
    copied: Any = copy.copy(pipeline)
    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)  # type: ignore[attr-defined]
    prepare(scheduler)
    vars(copied).update(
        scheduler=scheduler,
        _progress_bar_config={"disable": True},
        maybe_free_model_hooks=lambda: None,  # it resets what other calls are using
    )
    try:
        yield copied
    finally:
        vars(copied).clear()
        vars(scheduler).clear()


def _sigma(scheduler: Any, timestep: Any) -> Any:
    """The noise level before a step of a flow-matching scheduler, by which its clean sample can be told; else None."""
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return None
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    sigmas: Any = scheduler.sigmas
    return sigmas[scheduler.step_index]


def _output_type(order: Order) -> str:
    return "np" if order.result != "audios" else "pt"


def _to_tensor(data: Any) -> torch.Tensor:
    tensor = torch.as_tensor(data).detach().float().cpu()
    if not tensor.isfinite().all():
        raise InternalError("the model's output has values that are no numbers; try more steps or less guidance")
    return (tensor.T if tensor.dim() == 2 else tensor).contiguous()  # sound is (channels, samples)


def _shrink(pixels: torch.Tensor) -> torch.Tensor:
    """(height, width, 3), no side over PREVIEW_SIDE."""
    scale = PREVIEW_SIDE / max(pixels.shape[:2])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in pixels.shape[:2]]
        pixels = functional.interpolate(pixels.permute(2, 0, 1)[None], size, mode="area")[0].permute(1, 2, 0)
    return pixels


def _to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """0 to 1 as 8 bit."""
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8)
