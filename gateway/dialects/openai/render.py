"""`POST /v1/chat/completions/render` and `/v1/completions/render`: the answer as a request for token ids."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.completion import CompletionRun
from gateway.answers.files.parts import with_files
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import to_jobs
from gateway.answers.meter import Meter
from gateway.answers.rendering import features, generate_body
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.turns import read_prompt
from gateway.dialects.openai.completions import CompletionRequest
from gateway.errors import in_own_terms, invalid
from gateway.http.connection import admitted, owner_of
from gateway.http.forms import JSON, page, read_json
from gateway.http.json_writer import in_thread
from quartet.v1 import thinker_pb2

router = APIRouter(tags=["completions"])
_WHY = "is not of a request for token ids; leave it out"


class ChatRenderRequest(ChatCompletionRequest):
    """As a chat's."""

    mm_payload: Literal["tensors", "none"] | None = Field(
        default=None, description="none: features are without the files; default: tensors, with them"
    )

    def check(self) -> None:
        """Raises ApiError: 400 naming a member that token ids and media cannot stand for."""
        super().check()
        if self.speaks:
            raise invalid("modalities", 'must be ["text"]: ask for speech where the token ids are sent')
        for name in ("use_beam_search", "echo", "media_io_kwargs"):
            if getattr(self, name):
                raise invalid(name, _WHY)
        if self.use_audio_in_video:
            place = "mm_processor_kwargs" if self.mm_processor_kwargs.use_audio_in_video else "quartet.thinker"
            raise invalid(f"{place}.use_audio_in_video", f"{_WHY}, and send each video's sound as an audio part")
        if self.tool_choice is not None and self.tool_choice.type not in ("none", "auto"):
            raise invalid("tool_choice", "must be none or auto: nobody reads forced calls out of token ids")
        wanted = self.response_format and self.response_format.type
        if self.tools and (self.structured_outputs or wanted not in (None, "text")):
            raise invalid("tools", "cannot be beside a structure: of token ids the structure alone is kept")


class CompletionRenderRequest(CompletionRequest):
    """As a completion's."""

    def check(self) -> None:
        """Raises ApiError: 400 naming a member that token ids cannot stand for."""
        super().check()
        for name in ("use_beam_search", "echo"):
            if getattr(self, name):
                raise invalid(name, _WHY)


@router.post(
    "/v1/chat/completions/render", openapi_extra=page(ChatRenderRequest, "for /inference/v1/generate", answered=JSON)
)
async def render_chat(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """The token ids and media of a conversation."""
    request = await read_json(http, ChatRenderRequest)
    request.model = gateway.catalog.meant(request.model) or ""
    gateway.catalog.stage_for("text", request.model, takes_loras=True)
    request.messages = await with_files(gateway, request.messages, owner_of(http))
    meter = Meter.of(http.state, gateway.settings.request_timeout_s)
    with in_own_terms(request.own_name):
        (job,) = await to_jobs(gateway, request.model_copy(update={"n": 1}), meter.request_id, owner_of(http))
        job.starts["thinker"].wants_prompt_token_ids = True
        read = await read_prompt(gateway, job, meter)
    media = await features(job, read, request.mm_payload != "none")
    most, logprobs = request.max_completion_tokens or request.max_tokens, request.top_logprobs or 0
    name = f"chatcmpl-{meter.request_id}"
    return await in_thread(generate_body(request, name, read, media, most, logprobs if request.logprobs else None))


@router.post(
    "/v1/completions/render", openapi_extra=page(CompletionRenderRequest, "for /inference/v1/generate", answered=JSON)
)
async def render_completion(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """The token ids of each prompt."""
    request = await read_json(http, CompletionRenderRequest)
    request.check()
    request.model = gateway.catalog.meant(request.model) or ""
    run = CompletionRun(gateway, request, http.state, request.prompts, request.model, 1, "prompt", request.lora)
    run.cut, run.wants_prompt_ids = request.cut, True
    meter = Meter.of(http.state, gateway.settings.request_timeout_s)
    bodies: list[dict[str, Any]] = []
    for i in range(len(run.prompts)):
        job = run.job(i, run.start(i, thinker_pb2.SamplingParameters()))
        with in_own_terms(run.own_name):
            read = await read_prompt(gateway, job, meter)
        name = f"cmpl-{job.request_id}"
        bodies.append(generate_body(request, name, read, None, request.most_tokens, request.logprobs))
    return await in_thread(bodies)
