"""The responses of a gateway: their input, those that are stored, and those that run in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import structlog

from gateway.access.api_key import ApiKey
from gateway.answers.files.contents import read_files
from gateway.answers.gateway import Gateway
from gateway.answers.tools.registry import available
from gateway.dialects.responses.background import Background, BackgroundRuns, followed
from gateway.dialects.responses.files import named_files
from gateway.dialects.responses.items import new_id, read_items
from gateway.dialects.responses.leases import LOST, Leases
from gateway.dialects.responses.output import ResponseEvent
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.run import ResponseRun
from gateway.dialects.responses.schema import ResponseRequest
from gateway.dialects.responses.spec import UNFINISHED, ResponseSpec, with_places
from gateway.dialects.responses.store import ResponseStore, Thread
from gateway.dialects.responses.tools import read_tools
from gateway.errors import ApiError, invalid
from gateway.store.clock import LEASE_S

_STORE_AGAIN_S = 1.0
_STORE_FOR_S = 60.0  # how long the end of a response waits for the database: longer than that takes to start anew
_CANCEL_S = 2 * LEASE_S  # how long another gateway may take to cancel
_LOOK_S = 0.25
_PREFIXES = {"conversation": "conv_", "response": "resp_"}  # of ids

log = structlog.get_logger()


class Responses:
    """Use as `async with`: leaving it ends what runs in the background."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, settings = gateway, gateway.settings
        place = gateway.place(settings.responses_dir)
        self.store = ResponseStore(place, settings.response_ttl_s, settings.max_response_bytes)
        self.background = BackgroundRuns(Leases(self.store, gateway.name), place is not None, settings.drain_timeout_s)

    async def __aenter__(self) -> "Responses":
        await self.background.__aenter__()
        return self

    async def __aexit__(self, *_) -> None:
        """Waits for those that run, `drain_timeout_s` at most; the others are stored as cancelled."""
        await self.background.__aexit__()
        await self.store.close()

    async def ask(
        self,
        request: ResponseRequest,
        request_id: str | None,
        key: ApiKey | None,
        log_fields: dict[str, Any],
        hold: Callable[[int], None],
        held: Mapping[str, Sequence[Item]] = MappingProxyType({}),
    ) -> ResponseRun:
        """The response to `request`, not begun.

        Args:
            request_id: names it in every stage; None: its own id does.
            hold: counts the bytes that are read of the store.
            held: by response, the items of turns that are not stored.

        Raises:
            ApiError: 400 naming what is at fault; 404, there is no such earlier response or conversation; of `hold`.
        """
        self._check(request)
        owner = key and key.name
        tools = read_tools(request.tools, request.tool_choice, available(self.gateway))
        for tool, place in tools.hosted.values():
            tool.check(self.gateway, place)
        items = read_items(request.input)
        items = [await self._referred(item, f"input[{i}]", owner) for i, item in enumerate(items)]
        earlier = await self._earlier(request, owner, hold, held)
        if not earlier and not items:
            raise invalid("input", "required, but missing", "missing_required_parameter")
        files = await read_files(self.gateway, named_files(with_places(earlier, items)), owner)
        response_id = new_id("resp")
        name, sampling = request_id or response_id, _sampling(self.gateway, request)
        spec = ResponseSpec(request, tools, earlier, items, sampling, response_id, name, key, log_fields, files)
        log_fields |= {"response_id": response_id, "stream": bool(request.stream)}
        return ResponseRun(self.gateway, spec, self._keep)

    def _check(self, request: ResponseRequest) -> None:
        if request.prompt is not None:
            raise invalid("prompt", "no prompts are kept here; send instructions and input")
        text_format = request.text and request.text.format
        if request.structured_outputs is not None and text_format is not None and text_format.type != "text":
            raise invalid("text.format", "cannot be beside structured_outputs; send one of the two")
        if request.background and not request.is_stored:
            raise invalid("background", "only with store: it has to be got later")
        if request.enable_response_messages and request.include_reasoning is False:
            raise invalid("enable_response_messages", "tells the reasoning; leave it out, or include_reasoning")
        if request.conversation is not None and request.previous_response_id is not None:
            raise invalid("conversation", "says what previous_response_id says, too; send one of the two")
        if self.gateway.pipeline.config.thinker is None:
            raise invalid("model", "this server has no model that writes", "unsupported_model")
        request.model = self.gateway.catalog.meant(request.model) or ""
        self.gateway.catalog.answerer(request.model)

    async def _referred(self, item: Item, field: str, owner: str | None) -> Item:
        if item["type"] != "item_reference":
            return item
        found = await self.store.item(item["id"], owner)
        if found is None:
            raise _missing(f"{field}.id", "item", item["id"])
        return found

    async def _earlier(
        self,
        request: ResponseRequest,
        owner: str | None,
        hold: Callable[[int], None],
        held: Mapping[str, Sequence[Item]],
    ) -> list[tuple[str, Item]]:
        if request.conversation is not None:
            thread = await self.thread("conversation", request.conversation.id, owner, "conversation")
            hold(thread.size)
            return [("conversation", item) for item in await self.store.items(thread.id)]
        if request.previous_response_id is None:
            return []
        param, previous = "previous_response_id", request.previous_response_id
        if previous in held:
            return [(param, item) for item in held[previous]]
        try:
            body = await self.get(previous, owner, param)
        except ApiError as error:
            if error.status == 404:  # OpenAI's status for it
                error.status, error.code = 400, "previous_response_not_found"
            raise
        if body["status"] in UNFINISHED:
            raise invalid(param, f"{previous!r} has not finished; wait for it, or cancel it")
        hold(await self.store.size_of_turns(previous))
        items = await self.store.turns(previous, owner)
        if items is None:
            raise invalid(param, f"a response before {previous!r} is gone", "previous_response_not_found")
        return [(param, item) for item in items]

    async def thread(self, what: str, thread_id: str, owner: str | None, param: str | None) -> Thread:
        """A "conversation", or a "response". Raises ApiError: 404, naming `param`: there is none."""
        thread = await self.store.get(thread_id, owner) if thread_id.startswith(_PREFIXES[what]) else None
        if thread is None:
            raise _missing(param, what, thread_id)
        return thread

    async def begin(self, run: ResponseRun, place: ExitStack) -> Background:
        """Runs it in the background. `place`: as of `Background`. Raises ApiError: it cannot be stored."""
        spec = run.spec
        with ExitStack() as held:
            held.push(place)
            await self.background.leases.begin(_thread(run), spec.owner, spec.items)
            held.pop_all()
        running = Background(run, place)
        self.background.add(running)
        return running

    async def _keep(self, run: ResponseRun) -> None:
        """Stores a response if it is to be, and adds its items to its conversation if it is done. Raises ApiError."""
        spec = run.spec
        output, is_done = list(map(without_sound, run.output)), run.status in ("completed", "incomplete")
        conversation = spec.request.conversation.id if spec.request.conversation and is_done else None
        if spec.request.background:
            await self._finish(run, output, conversation)
        elif spec.request.is_stored:
            await self.store.put(_thread(run), spec.owner, spec.items, output, conversation)
        elif conversation is not None:
            await self.store.add(conversation, [*spec.items, *output])

    async def _finish(self, run: ResponseRun, output: Sequence[Item], conversation: str | None) -> None:
        """Raises ApiError: 503, this gateway has lost it, or cannot reach the database."""
        end_s = time.monotonic() + _STORE_FOR_S
        while True:
            try:
                is_mine = await self.background.leases.finish(_thread(run), run.spec.items, output, conversation)
                break
            except ApiError as error:
                if error.status != 503 or time.monotonic() > end_s:
                    raise
            await asyncio.sleep(_STORE_AGAIN_S)
        if not is_mine:
            message = "this response was ended while this server stood still; send the request again"
            raise ApiError(503, message, None, "response_lost")

    async def get(
        self,
        response_id: str,
        owner: str | None,
        param: str | None = None,
        hold: Callable[[int], None] = lambda more: None,
    ) -> dict[str, Any]:
        """The object of a response; `hold` counts its bytes. Raises ApiError: 404, naming `param`: there is none."""
        thread = await self.thread("response", response_id, owner, param)
        hold(thread.size)
        running = self.background.get(response_id)
        if running is not None and thread.holder == self.background.leases.name:  # newer than what is stored
            return running.run.public()
        body = thread.body | {"output": await self.store.items(response_id, output=True)}
        if body["status"] in UNFINISHED and thread.holder is None:  # of a gateway of before 0.3.0
            return body | {"status": "failed", "error": LOST}
        return body

    async def events(self, response_id: str, owner: str | None, after: int) -> AsyncGenerator[ResponseEvent, None]:
        """The events after the number `after` of a response that runs in the background, or did until lately.

        Raises:
            ApiError: 404, there is none; 400, it was not in the background, or its events are not kept any more.
        """
        thread = await self.thread("response", response_id, owner, None)
        if not thread.body["background"]:
            message = f"{response_id}: its events are kept only with background: true"
            raise ApiError(400, message, None, "invalid_value")
        if (running := self.background.get(response_id)) is not None:
            return running.events(after)
        leases = self.background.leases
        events, is_more = await leases.events_after(response_id, -1)
        if not events and not is_more:
            message = f"{response_id}: its events are not kept any more; get it without stream"
            raise ApiError(400, message, "stream", "invalid_value")
        return followed(leases, response_id, after)

    async def cancel(
        self, response_id: str, owner: str | None, hold: Callable[[int], None] = lambda more: None
    ) -> dict[str, Any]:
        """Ends a response in the background, if it has not ended. Returns its object, whose bytes `hold` counts.

        Raises:
            ApiError: 404, there is none; 400, it was not in the background.
        """
        thread = await self.thread("response", response_id, owner, None)
        if not thread.body["background"]:
            raise ApiError(400, f"{response_id}: only those with background: true are cancelled", None, "invalid_value")
        if (running := self.background.get(response_id)) is not None and not running.task.done():
            running.cancel()
            await asyncio.wait([running.task])
        elif thread.holder is not None:
            await self._cancel_elsewhere(response_id)
        return await self.get(response_id, owner, hold=hold)

    async def _cancel_elsewhere(self, response_id: str) -> None:
        """Waits until the gateway that makes it has ended it, or is found to be gone."""
        await self.background.leases.request_cancel(response_id)
        for _ in range(round(_CANCEL_S / _LOOK_S)):
            thread = await self.store.get(response_id, None)
            if thread is None or thread.holder is None:
                return
            await asyncio.sleep(_LOOK_S)

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Ends and removes a response. Raises ApiError: 404, there is none."""
        thread = await self.thread("response", response_id, owner, None)
        if thread.body["background"]:
            await self.cancel(response_id, owner)
            self.background.forget(response_id)
        await self.store.remove(response_id)


def _thread(run: ResponseRun) -> Thread:
    spec = run.spec
    return Thread(spec.id, spec.created_at, spec.request.previous_response_id, run.public() | {"output": []})


def without_sound(item: Item) -> Item:
    """An item as it is kept."""
    if item["type"] != "message":
        return item
    parts = [{name: value for name, value in part.items() if name != "data"} for part in item["content"]]
    return item | {"content": parts}


def _missing(param: str | None, what: str, name: str) -> ApiError:
    label = f"{param}: " if param else ""
    why = "it was deleted, has expired, was not stored, is another gateway's, or never was"
    reason = f"there is no {what} {name[:80]!r}; {why}"
    return ApiError(404, f"{label}{reason}", param, "not_found")


def _sampling(gateway: Gateway, request: ResponseRequest) -> dict[str, float]:
    """What `ResponseSpec.sampling` has."""
    assert gateway.pipeline.config.thinker is not None, "a response of a pipeline without a thinker"
    info = gateway.pipeline.info("thinker")
    defaults = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name in ("temperature", "top_p"):
        if info is not None and info.HasField(f"default_{name}"):
            defaults[name] = getattr(info, f"default_{name}")
    used = request.over(gateway.pipeline.config.thinker.sampling)
    return {name: used.get(name, default) for name, default in defaults.items()}
