"""What requests for videos and sound have in common: members, and checks against the model's facts."""

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Request
from pydantic import BeforeValidator, Field

from gateway.gateway import Gateway
from gateway.openai.errors import ApiError, from_failure, invalid
from gateway.pipeline.job import StageFailure
from gateway.pipeline.sampling import MAX_SEED, Strict
from gateway.pipeline.stages import Stage
from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InvalidInput, QueueFull, StageError

MAX_PROMPT_CHARACTERS = 100_000  # beyond what any text encoder reads; the stage knows its own limit in tokens
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]


def _weights(value: Any) -> Any:
    """A name, or a list of names and {name, weight}, as {name: weight}."""
    if isinstance(value, str):
        return {value: 1.0}
    if not isinstance(value, list):
        return value
    weights: dict[str, Any] = {}
    for item in value:
        lora = {"name": item} if isinstance(item, str) else item
        if not isinstance(lora, dict) or not isinstance(lora.get("name"), str) or lora.keys() - {"name", "weight"}:
            raise ValueError("each must be a name, or {name, weight}")
        if lora["name"] in weights:
            raise ValueError(f"{lora['name']!r} is there twice")
        weights[lora["name"]] = lora.get("weight", 1.0)
    return weights


Loras = Annotated[
    dict[str, float],
    BeforeValidator(_weights),
    Field(description="adapters: a name, {name: weight}, or a list of names and {name, weight}"),
]


class DiffusionRequest(Strict):
    """Members of every request to a diffusion transformer."""

    model: str | None = Field(default=None, description="default: the model that makes what the endpoint is for")
    prompt: Prompt
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    lora: Loras | None = None
    user: Any = Field(default=None, description="accepted; without effect")

    def start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, but for what is the endpoint's own.

        Raises:
            ApiError: 400 naming the member that the model cannot follow.
        """
        start = dit_pb2.DitStart(prompt=self.prompt, count=1)
        if self.negative_prompt is not None:
            if not info.negative_prompt:
                raise invalid("negative_prompt", "this model takes none; leave it out")
            start.negative_prompt = self.negative_prompt
        if self.num_inference_steps is not None:
            if self.num_inference_steps > info.max_inference_steps:
                raise invalid("num_inference_steps", f"must be 1 to {info.max_inference_steps}")
            start.num_inference_steps = self.num_inference_steps
        if self.guidance_scale is not None:
            start.guidance_scale = self.guidance_scale
        if self.seed is not None:
            start.seed = self.seed
        for name, weight in (self.lora or {}).items():
            if name not in info.loras:
                known = ", ".join(info.loras) or "none"
                raise invalid("lora", f"no adapter {name!r}; this model has: {known}")
            start.loras.add(name=name, weight=weight)
        return start


def require_info(stage: Stage, tasks: tuple[dit_pb2.DitTask, ...], what: str) -> server_info_pb2.DitInfo:
    """The facts of the stage's model.

    Raises:
        ApiError: 503 while the stage does not serve; 400 naming `model` if the model does none of `tasks`.
    """
    if not stage.serving or stage.info is None:
        message = f"stage {stage.name} is not serving ({stage.state}); retry later"
        raise ApiError(503, message, None, "stage_unavailable", "service_unavailable_error", 1)
    if not any(task in stage.info.dit.tasks for task in tasks):
        raise invalid("model", f"{stage.info.model!r} does not make {what}", "unsupported_model")
    return stage.info.dit


_FIELDS = (
    (r"^(width|height)$", "size"),
    (r"^count$", "n"),
    (r"^audio_s$", "seconds"),
    (r"^loras\b.*", "lora"),
    (r"^images\b.*", "input_reference"),
)


def from_stage(stage: Stage, error: StageError) -> ApiError:
    """What the client hears of an error of the stage, in the names of the request's members."""
    if isinstance(error, InvalidInput):
        field = error.field.removeprefix("start.")
        for pattern, replacement in _FIELDS:
            field = re.sub(pattern, replacement, field)
        error = InvalidInput(field, error.reason)
    return from_failure(StageFailure(stage.kind, error))


async def admitted(http: Request) -> AsyncIterator[Gateway]:
    """Holds one of the gateway's places until the response is sent."""
    gateway: Gateway = http.app.state.gateway
    try:
        with gateway.admission.admit():
            yield gateway
    except QueueFull as error:
        raise from_failure(StageFailure("gateway", error)) from None
