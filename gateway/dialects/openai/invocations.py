"""`POST /invocations`: SageMaker's one endpoint, for the bodies of chats and completions."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.answers.gateway import Gateway
from gateway.answers.request import ChatCompletionRequest
from gateway.dialects.openai.chat import answer_chat
from gateway.dialects.openai.completions import CompletionRequest, complete
from gateway.http.connection import admitted
from gateway.http.forms import parsed, read_body
from gateway.validation import Lenient

router = APIRouter(tags=["chat"])
_BODY = {"description": "a body of /v1/chat/completions, or of /v1/completions", "type": "object"}
_CONTENT = {"application/json": {"schema": _BODY}}


class _Kind(Lenient):
    messages: Any = None


@router.post(
    "/invocations",
    openapi_extra={"requestBody": {"content": _CONTENT, "required": True}},
)
async def invocations(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers a body that has `messages` as a chat, and any other as a completion."""
    body = await read_body(http)
    if (await parsed(_Kind, body)).messages is not None:
        return await answer_chat(http, gateway, await parsed(ChatCompletionRequest, body, http.state.ignored))
    return await complete(http, gateway, await parsed(CompletionRequest, body, http.state.ignored))
