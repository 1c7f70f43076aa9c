"""`POST /tokenize` and `/detokenize`: the thinker's tokenizer, in vLLM's shapes."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from gateway.answers.completion import ask_tokenizer, detokenize
from gateway.answers.conversation import Message
from gateway.answers.extensions import PromptEnd
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import fill_messages, fill_tools
from gateway.answers.request import TemplateVariables, Tool
from gateway.errors import invalid
from gateway.http.connection import admitted
from gateway.http.forms import JSON, page, read_json
from gateway.validation import Listed, Strict, TokenIds
from quartet.v1 import thinker_pb2

router = APIRouter(tags=["completions"])


class TokenizeRequest(TemplateVariables, PromptEnd):
    """A text, or a chat's messages."""

    model: str | None = Field(default=None, description="default: the one that writes")
    prompt: str | None = None
    messages: Listed[Message] | None = Field(default=None, min_length=1, description="without media")
    tools: Listed[Tool] | None = None
    add_special_tokens: bool | None = Field(default=None, description="before a prompt; default: true")
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = Field(default=None, description="default: the one that writes")
    tokens: TokenIds


def _opened(model: type[Strict]) -> dict[str, Any]:
    return page(model, "as vLLM's", answered=JSON)


@router.post("/tokenize", openapi_extra=_opened(TokenizeRequest))
async def tokenize(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> dict[str, Any]:
    """Token ids of a text, or of messages in the chat template."""
    request = await read_json(http, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "send this or messages")
    request.check_end()
    message = thinker_pb2.TokenizeRequest(
        text=request.prompt or "",
        no_special_tokens=request.add_special_tokens is False,
        wants_tokens=bool(request.return_token_strs),
    )
    if request.messages is not None:
        start = thinker_pb2.GenerateStart()
        if fill_messages(start, gateway, request.messages):
            raise invalid("messages", "media are not counted here; send text")
        fill_tools(start, request.tools, None)
        message.messages.extend(start.messages)
        message.tools.extend(start.tools)
        request.end(message)
        if variables := request.template_variables:
            message.chat_template_kwargs_json = json.dumps(variables)
    answer = await ask_tokenizer(gateway, gateway.catalog.meant(request.model), "Tokenize", message, "prompt")
    info = gateway.pipeline.info("thinker")
    return {
        "count": len(answer.token_ids),
        "max_model_len": info.max_context_tokens if info else None,
        "tokens": list(answer.token_ids),
        "token_strs": list(answer.tokens) if request.return_token_strs else None,
    }


@router.post("/detokenize", openapi_extra=_opened(DetokenizeRequest))
async def detokenize_ids(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> dict[str, Any]:
    """Text of token ids, special tokens included."""
    request = await read_json(http, DetokenizeRequest)
    return {"prompt": await detokenize(gateway, request.tokens, "tokens")}
