"""`/v1/messages`: Anthropic's Messages API."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.answers.gateway import Gateway
from gateway.answers.jobs import to_jobs
from gateway.answers.meter import Meter
from gateway.answers.turns import read_prompt
from gateway.dialects.anthropic.conversation import Conversation, chat_request
from gateway.dialects.anthropic.output import PING, BlockOutput
from gateway.dialects.anthropic.refusals import body, headers_of
from gateway.dialects.anthropic.schema import AnthropicsTool, CountRequest, MessagesRequest
from gateway.errors import ApiError, in_own_terms
from gateway.http.connection import EventStream, admitted, drain, named_sse, owner_of, while_connected
from gateway.http.forms import JSON, page, read_json
from gateway.http.json_writer import Json
from gateway.pipeline.run import Job, run

router = APIRouter(tags=["messages"])
PATH = "/v1/messages"

_ERROR = {"description": "Anthropic's error body: {type: error, error: {type, message}, request_id}"}
_ERRORS: dict[str, Any] = dict.fromkeys(("400", "401", "404", "413", "429", "500", "504", "529"), _ERROR)
_OPENAPI = page(MessagesRequest, "the message, or with stream: true its events", errors=_ERRORS)
_COUNT_OPENAPI = page(CountRequest, "the number of tokens", answered=JSON, errors=_ERRORS)


@router.post(PATH, openapi_extra=_OPENAPI)
async def create_message(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers a conversation in Anthropic's form: text, thoughts, calls of tools."""
    request = await read_json(http, MessagesRequest)
    answer = MessageRun(gateway, request, http)
    http.state.log["stream"] = bool(request.stream)
    if request.stream:
        left_s = max(0.0, http.state.deadline - time.monotonic())
        return MessageStream(answer.stream(), left_s, answer.headers, http.state.request_id)
    return await while_connected(http.receive, answer.whole())


@router.post(f"{PATH}/count_tokens", openapi_extra=_COUNT_OPENAPI)
async def count_message_tokens(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Counts the tokens of a message's prompt, media and tools included."""
    request = await read_json(http, CountRequest)
    return await while_connected(http.receive, MessageRun(gateway, request, http).count())


class MessageStream(EventStream):
    """A message's events, and pings in a silence. A late failure is an event of type error."""

    filler = named_sse(PING)

    def __init__(
        self, events: AsyncGenerator[bytes, None], limit_s: float, headers: dict[str, str], request_id: str
    ) -> None:
        super().__init__(events, limit_s, headers)
        self._request_id = request_id

    def last_word(self, error: ApiError) -> bytes:
        return named_sse(body(error, self._request_id))


class MessageRun:
    """The work on a request. Raises ApiError: there is no such model.

    Attributes:
        headers: of its answer.
    """

    def __init__(self, gateway: Gateway, request: MessagesRequest, http: Request) -> None:
        request.model = gateway.catalog.meant(request.model, "messages") or ""
        gateway.catalog.stage_for("text", request.model, takes_loras=True)
        self._gateway, self._request, self._owner = gateway, request, owner_of(http)
        self._meter = Meter.of(http.state, gateway.settings.request_timeout_s)
        self._output = BlockOutput(request, f"msg_{http.state.request_id}")
        self._conversation = Conversation()
        if any(isinstance(tool, AnthropicsTool) for tool in request.tools or ()):
            http.state.ignored.add("tools")
        self.headers = headers_of(http.state.request_id)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events()) as events:
            async for event in events:
                yield named_sse(event)

    async def whole(self) -> Response:
        await drain(self._events())
        return Json(self._output.message(), headers=self.headers)

    async def count(self) -> Response:
        with in_own_terms(self._conversation.own_name):
            read = await read_prompt(self._gateway, await self._job(), self._meter)
        return Json({"input_tokens": read.prompt_tokens}, headers=self.headers)

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Raises ApiError."""
        with in_own_terms(self._conversation.own_name):
            async with aclosing(run(self._gateway.pipeline, [await self._job()], self._meter.left_s)) as events:
                async for _, event in events:
                    self._meter.observe(event)
                    for sent in self._output.take(event):
                        yield sent
        self._meter.count_answers([self._output.answer])

    async def _job(self) -> Job:
        self._conversation.read(self._request)
        request = chat_request(self._request, self._conversation)
        (job,) = await to_jobs(self._gateway, request, self._meter.request_id, self._owner)
        return job
