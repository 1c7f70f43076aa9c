"""`POST /tokenize` and `/detokenize`: the thinker's tokenizer, in vLLM's shapes."""

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.completion import ask_tokenizer, detokenize
from gateway.answers.conversation import Message
from gateway.answers.extensions import PromptEnd
from gateway.answers.files.parts import with_files
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.prompt_messages import Pending, attach_media, fill_messages, fill_tools, refuse_long
from gateway.answers.request import TemplateVariables, Tool
from gateway.answers.turns import read_prompt
from gateway.answers.video_frames import VideoFrameMembers
from gateway.errors import in_own_terms, invalid
from gateway.http.connection import admitted, owner_of
from gateway.http.forms import JSON, page, read_json
from gateway.http.json_writer import Json
from gateway.pipeline.run import Job
from gateway.validation import Listed, Strict, TokenIds
from quartet.v1 import thinker_pb2

router = APIRouter(tags=["completions"])
_OF_CHATS = ("messages", "tools", "continue_final_message", "no_generation_prompt", "chat_template_kwargs_json")


class TokenizeRequest(TemplateVariables, PromptEnd, VideoFrameMembers):
    """A text, or a chat's messages."""

    model: str | None = Field(default=None, description="default: the one that writes")
    prompt: str | None = None
    messages: Listed[Message] | None = Field(default=None, min_length=1)
    tools: Listed[Tool] | None = None
    add_special_tokens: bool | None = Field(default=None, description="before a prompt; default: true")
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = Field(default=None, description="default: the one that writes")
    tokens: TokenIds


def _opened(model: type[Strict]) -> dict[str, Any]:
    return page(model, "as vLLM's", answered=JSON)


@router.post("/tokenize", openapi_extra=_opened(TokenizeRequest))
async def tokenize(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """Token ids of a text, or of messages in the chat template."""
    request = await read_json(http, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "send this or messages")
    request.check_end()
    refuse_long((request.prompt or "",), "prompt")
    start = thinker_pb2.GenerateStart(wants_prompt_token_ids=True)
    await gateway.transcripts.load(request.messages or ())
    messages = await with_files(gateway, request.messages or (), owner_of(http))
    pending = fill_messages(start, gateway, messages, owner_of(http), request.model)
    fill_tools(start, request.tools, None)
    request.end(start)
    request.choose_frames(start)
    if variables := request.template_variables:
        start.chat_template_kwargs_json = json.dumps(variables)
    strings = None
    if pending:
        answer = await _with_media(http, gateway, request, start, pending)
    else:
        message = thinker_pb2.TokenizeRequest(
            text=request.prompt or "",
            no_special_tokens=request.add_special_tokens is False,
            wants_tokens=bool(request.return_token_strs),
            **{name: getattr(start, name) for name in _OF_CHATS if request.messages},
        )
        answer = await ask_tokenizer(gateway, gateway.catalog.meant(request.model), "Tokenize", message, "prompt")
        strings = answer.tokens if request.return_token_strs else None
    info = gateway.pipeline.info("thinker")

    def body() -> Json:  # 4 MiB may be millions of tokens
        members = {"count": len(answer.token_ids), "max_model_len": info.max_context_tokens if info else None}
        return Json(
            members | {"tokens": list(answer.token_ids), "token_strs": None if strings is None else list(strings)}
        )

    return await asyncio.to_thread(body)


async def _with_media(
    http: Request, gateway: Gateway, request: TokenizeRequest, start: thinker_pb2.GenerateStart, pending: list[Pending]
) -> thinker_pb2.PromptInfo:
    """The prompt as the thinker reads it, in which a medium has many tokens. Raises ApiError."""
    if request.return_token_strs:
        raise invalid("return_token_strs", "is not beside media; leave it out")
    gateway.catalog.stage_for("text", gateway.catalog.meant(request.model), takes_loras=True)
    request_id = http.state.request_id
    job = Job(request_id, {"thinker": start}, await attach_media(gateway, pending, request_id, owner_of(http)))
    with in_own_terms():
        return await read_prompt(gateway, job, Meter.of(http.state, gateway.settings.request_timeout_s))


@router.get("/tokenizer_info")
async def tokenizer_info(gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """What the configuration of the thinker's tokenizer says, its chat template included."""
    answer = await ask_tokenizer(gateway, None, "DescribeTokenizer", thinker_pb2.DescribeTokenizerRequest(), "model")
    return Response(answer.config_json, media_type=JSON[0])


@router.post("/detokenize", openapi_extra=_opened(DetokenizeRequest))
async def detokenize_ids(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> dict[str, Any]:
    """Text of token ids, special tokens included."""
    request = await read_json(http, DetokenizeRequest)
    return {"prompt": await detokenize(gateway, request.tokens, "tokens")}
