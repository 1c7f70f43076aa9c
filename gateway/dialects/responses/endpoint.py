"""`/v1/responses`: OpenAI's Responses API."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.requests import HTTPConnection
from starlette.responses import Response

from gateway.answers.gateway import Gateway
from gateway.dialects.responses.listing import Page, page_of, read_query
from gateway.dialects.responses.output import ResponseEvent
from gateway.dialects.responses.responses import Responses
from gateway.dialects.responses.run import ResponseRun
from gateway.dialects.responses.schema import InputTokensRequest, ResponseRequest
from gateway.errors import in_own_terms, invalid
from gateway.http.connection import EventStream, admitted, drain, key_of, named_sse, owner_of, while_connected
from gateway.http.forms import JSON, page, read_json
from gateway.http.json_writer import Json, in_thread
from gateway.validation import NotNegative, Strict

router = APIRouter(tags=["responses"])

_OPENAPI = page(ResponseRequest, "the Response object, or with stream: true its events")
_COUNT_OPENAPI = page(InputTokensRequest, "the number of tokens", answered=JSON)


class GetQuery(Strict):
    stream: bool = False
    starting_after: NotNegative | None = None
    include: Any = Field(default=None, description="accepted; a response is told whole")
    include_obfuscation: Any = Field(default=None, description="accepted; nothing is padded")


@router.post("/v1/responses", openapi_extra=_OPENAPI)
async def create_response(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers items with items: text, reasoning, function calls, images."""
    request = await read_json(http, ResponseRequest)
    responses = responses_of(http)
    name = None if request.background else http.state.request_id
    run = await responses.ask(request, name, key_of(http), http.state.log, http.state.hold)
    if request.background:
        return await _in_background(http, gateway, responses, run)
    if request.stream:
        return _stream(gateway, run.events())
    return await while_connected(http.receive, _whole(run))


async def _in_background(http: Request, gateway: Gateway, responses: Responses, run: ResponseRun) -> Response:
    run.spec.log = dict(run.spec.log)  # a log line of its own, at its end
    with ExitStack() as place:  # held while it runs; this request's own place is released before
        with in_own_terms():
            place.enter_context(gateway.admission.admit())
        running = await responses.begin(run, place.pop_all())
        running.task.add_done_callback(lambda _, held=http.state.place.pop_all(): held.close())
    if run.spec.request.stream:
        return _stream(gateway, running.events(-1))
    return Json(run.public())


async def _whole(run: ResponseRun) -> Response:
    await drain(run.events())
    if run.error is not None:
        raise run.error
    return await in_thread(run.public())


def _stream(gateway: Gateway, events: AsyncGenerator[ResponseEvent, None]) -> EventStream:
    async def texts() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for event in events:
                yield named_sse(event)

    return EventStream(texts(), gateway.settings.request_timeout_s)


@router.post("/v1/responses/input_tokens", openapi_extra=_COUNT_OPENAPI)
async def count_input_tokens(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Counts the tokens of a response's prompt, media included."""
    request = await read_json(http, InputTokensRequest)
    request.background = request.stream = request.stream_options = None
    return await while_connected(http.receive, _count(http, request))


async def _count(http: Request, request: ResponseRequest) -> Response:
    run = await responses_of(http).ask(request, http.state.request_id, key_of(http), http.state.log, http.state.hold)
    return Json({"object": "response.input_tokens", "input_tokens": await run.count()})


@router.get("/v1/responses/{response_id}")
async def get_response(http: Request, response_id: str) -> Response:
    """Returns a stored response, or streams a background response's events after `starting_after`."""
    responses, owner = responses_of(http), owner_of(http)
    query = read_query(http, GetQuery)
    if not query.stream:
        if query.starting_after is not None:
            raise invalid("starting_after", "only with stream=true")
        return await in_thread(await responses.get(response_id, owner, hold=http.state.hold))
    after = -1 if query.starting_after is None else query.starting_after
    return _stream(responses.gateway, await responses.events(response_id, owner, after))


@router.delete("/v1/responses/{response_id}")
async def delete_response(http: Request, response_id: str) -> dict[str, Any]:
    """Removes a response. Responses that build on it can no longer be continued."""
    await responses_of(http).delete(response_id, owner_of(http))
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(http: Request, response_id: str) -> Json:
    """Cancels a background response."""
    return await in_thread(await responses_of(http).cancel(response_id, owner_of(http), http.state.hold))


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(http: Request, response_id: str) -> Json:
    """Lists the items of a response's own input."""
    responses, shown = responses_of(http), read_query(http, Page)
    await responses.get(response_id, owner_of(http), hold=http.state.hold)
    return await in_thread(await page_of(responses.store, response_id, shown))


def responses_of(http: HTTPConnection) -> Responses:
    return http.app.state.responses
