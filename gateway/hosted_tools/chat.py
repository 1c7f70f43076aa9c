"""A chat whose model makes pictures by image_generation: its turns, and what runs between them, told as one answer."""

import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from gateway.errors import ApiError, from_error, invalid
from gateway.gateway import Gateway
from gateway.hosted_tools import image
from gateway.hosted_tools.calls import arguments_of
from gateway.hosted_tools.events import Failed, NextTurn, Painted, PaintEvent
from gateway.hosted_tools.schema import IMAGE_TOOL, ImageTool
from gateway.hosted_tools.turns import Turn, sum_of
from gateway.openai import content
from gateway.openai.chat_requests import to_jobs
from gateway.openai.schema import ChatCompletionRequest, NamedFunction, ToolChoice
from gateway.pipeline.events import Event, Finished, PromptRead, TextDelta
from gateway.pipeline.run import run
from quartet.v1 import thinker_pb2
from services.common.errors import StageError

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")


def wants_pictures(gateway: Gateway, request: ChatCompletionRequest) -> bool:
    """Whether the tool is for this request, or its messages have what it made. Raises ApiError: 400, it is not here."""
    is_on = IMAGE_TOOL in gateway.settings.hosted_tools
    for i, tool in enumerate(request.tools or ()):
        if isinstance(tool, ImageTool) and not is_on:
            reason = f"{IMAGE_TOOL} does not run here in chats: ask /v1/responses, or start the gateway with"
            raise invalid(f"tools[{i}].type", f"{reason} --hosted-tools {IMAGE_TOOL}")
    if len(request.functions) < len(request.tools or ()):
        return True
    return is_on and any(isinstance(each, content.AssistantMessage) and _has_images(each) for each in request.messages)


def _has_images(message: content.AssistantMessage) -> bool:
    return bool(message.images) or any(isinstance(part, content.ImagePart) for part in message.content or ())


class PaintingChat:
    """One such chat.

    Args:
        gateway: the gateway.
        request: as the client sent it.
        request_id: names it in every stage.
        owner: whose uploaded voices can speak.
        deadline: `time.monotonic()` at which its time is over.
        log: fields of its log line.

    Raises:
        ApiError: 400 naming the member at fault.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: ChatCompletionRequest,
        request_id: str,
        owner: str | None,
        deadline: float,
        log: dict[str, Any],
    ) -> None:
        self._gateway, self._request, self._request_id = gateway, request, request_id
        self._owner, self._deadline, self._log = owner, deadline, log
        self._turns: list[Turn] = []
        self._calls = self._paintings = 0  # of the conversation; of this answer
        self._last_picture: str | None = None
        self._last_words = ""  # of the user
        self._messages: list[Any] = []
        self._places: list[int] = []  # of each message: which of the request's it is, or belongs to
        thinker = gateway.pipeline.info("thinker")
        self._sees_images = thinker is not None and "image" in thinker.input_modalities
        request.check()
        self._tool = self._checked_tool()
        for i, message in enumerate(request.messages):
            self._read(i, message)

    def _checked_tool(self) -> ImageTool | None:
        request, tool = self._request, None
        for i, given in enumerate(request.tools or ()):
            if isinstance(given, ImageTool):
                if tool is not None:
                    raise invalid(f"tools[{i}]", f"{IMAGE_TOOL} is there twice; leave one out")
                if self._gateway.pipeline.config.outputs.image is None:
                    raise invalid(f"tools[{i}].type", "this server makes no images; leave it out")
                image.check(self._gateway, given, f"tools[{i}]")
                tool = given
            elif given.function.name == IMAGE_TOOL:
                reason = f"{IMAGE_TOOL!r} is the name of a tool that runs here; take another"
                raise invalid(f"tools[{i}].function.name", reason)
        if tool is not None and (request.n or 1) > 1:
            raise invalid("n", f"only 1 with {IMAGE_TOOL}")
        return tool

    def _add(self, place: int, message: Any) -> None:
        self._messages.append(message)
        self._places.append(place)

    def _read(self, place: int, message: content.Message) -> None:
        """Takes a message of the request: pictures of an answer become the call that made them, and its result."""
        if isinstance(message, content.AssistantMessage) and _has_images(message):
            for url, prompt in _images(message, f"messages[{place}]"):
                call_id = self._new_call()
                self._made(place, [(call_id, arguments_of(self._last_words if prompt is None else prompt))])
                self._result(place, call_id, image.MADE, url)
            texts = [part for part in message.content or () if not isinstance(part, content.ImagePart)]
            left = message.model_copy(update={"content": texts or None, "images": None})
            if any(isinstance(part, content.TextPart) and part.text for part in texts) or left.tool_calls or left.audio:
                self._add(place, left)
            return
        if isinstance(message, content.UserMessage):
            urls = [part.image_url.url for part in message.content if isinstance(part, content.ImagePart)]
            self._last_picture = urls[-1] if urls else self._last_picture
            self._last_words = " ".join(part.text for part in message.content if isinstance(part, content.TextPart))
        self._add(place, message)

    def _new_call(self) -> str:
        """Names a call of the tool."""
        self._calls += 1
        return f"call_{IMAGE_TOOL}_{self._calls}"

    def _made(self, place: int, calls: list[tuple[str, str]], **said: Any) -> None:
        """Adds an assistant's message with (id, arguments) of calls of the tool."""
        made = [
            content.ToolCall(
                id=name, type="function", function=content.FunctionCall(name=IMAGE_TOOL, arguments=arguments)
            )
            for name, arguments in calls
        ]
        self._add(place, content.AssistantMessage(role="assistant", tool_calls=made, **said))

    def _result(self, place: int, call_id: str, came: str, url: str | None) -> None:
        """Adds what became of a call, and the picture."""
        parts: list[Any] = [content.TextPart(type="text", text=came)]
        if url is not None:
            self._last_picture = url
            if self._sees_images:
                parts.append(content.ImagePart(type="image_url", image_url=content.ImageUrl(url=url)))
        self._add(place, content.ToolMessage(role="tool", content=parts, tool_call_id=call_id))

    async def events(self) -> AsyncGenerator[tuple[int, Event | NextTurn | PaintEvent], None]:
        """(0, event) of what happens: that of the turns as of one answer, with the pictures between them.

        Raises:
            ApiError: as of any chat.
        """
        while True:
            self._turns.append(turn := Turn())
            async with aclosing(self._answer(turn)) as told:
                async for event in told:
                    yield 0, event
            if not turn.pictures or turn.is_cut_short or self._tool is None:
                break
            place = len(self._request.messages) - 1
            calls = [(self._new_call(), arguments) for arguments in turn.pictures.values()]
            said = {"content": turn.text or None, "reasoning_content": turn.reasoning or None}
            self._made(place, calls, **said)
            for call_id, arguments in calls:
                async with aclosing(self._paint(place, call_id, arguments)) as made:
                    async for event in made:
                        yield 0, event
            if turn.calls or self._paintings > image.MAX_CALLS:
                break
        yield 0, sum_of(self._turns)

    async def _answer(self, turn: Turn) -> AsyncGenerator[Event | NextTurn, None]:
        """The thinker's next turn, but for its end. Raises ApiError."""
        number = len(self._turns) - 1
        name = f"{self._request_id}-{number}" if number else self._request_id
        with self._in_request_terms():
            (job,) = await to_jobs(self._gateway, self._next(), name, self._owner)
            left_s = max(0.0, self._deadline - time.monotonic())
            async with aclosing(run(self._gateway.pipeline, [job], left_s)) as events:
                async for _, event in events:
                    match event:
                        case PromptRead(tokens) if number:
                            yield NextTurn(tokens)
                        case TextDelta(delta):
                            if delta.text and not turn.text and any(before.text for before in self._turns[:-1]):
                                yield TextDelta(thinker_pb2.GenerateDelta(text="\n\n"))  # what is said is two texts
                            yield TextDelta(turn.take(delta))
                        case Finished():
                            turn.end = event
                        case _:
                            yield event

    def _next(self) -> ChatCompletionRequest:
        """The chat request of the next turn."""
        request, is_first = self._request, len(self._turns) == 1
        is_offered = self._paintings < image.MAX_CALLS
        tools = [
            image.function(tool) if isinstance(tool, ImageTool) else tool
            for tool in request.tools or ()
            if is_offered or not isinstance(tool, ImageTool)
        ]
        choice = request.tool_choice
        if choice is not None and choice.type == IMAGE_TOOL:
            choice = ToolChoice(type="function", function=NamedFunction(name=IMAGE_TOOL))
        # what was to be called has been: from then on the model is free to say something
        update = {"messages": self._messages, "tools": tools or None, "tool_choice": choice if is_first else None}
        return request.model_copy(update=update)

    async def _paint(self, place: int, call_id: str, arguments: str) -> AsyncGenerator[PaintEvent, None]:
        """Makes a picture, and tells the model what became of it."""
        assert self._tool is not None
        self._paintings += 1
        if self._paintings > image.MAX_CALLS:
            reason = f"{image.MAX_CALLS} calls of {IMAGE_TOOL} are the most of a request"
            yield (failed := Failed(ApiError(400, reason, None, "too_many_calls")))
            self._result(place, call_id, image.NOT_MADE + failed.error.message, None)
            return
        name, shows = f"{self._request_id}-picture-{self._paintings}", bool(self._request.stream)
        painting = image.Painting(self._tool, arguments, self._last_picture, name, self._deadline, shows, self._log)
        async with aclosing(painting.events(self._gateway)) as events:
            async for event in events:
                if isinstance(event, Painted) and event.preview is None:
                    self._result(place, call_id, image.MADE, event.url)
                elif isinstance(event, Failed):
                    self._result(place, call_id, image.NOT_MADE + event.error.message, None)
                yield event

    @contextmanager
    def _in_request_terms(self) -> Iterator[None]:
        """Gives refusals of a turn's messages the places that they have in the request. Raises ApiError."""
        try:
            yield
        except (ApiError, StageError) as fault:
            error = from_error("gateway", fault) if isinstance(fault, StageError) else fault
            if match := _MESSAGE.match(error.param or ""):
                index = int(match[1])
                place = self._places[index] if index < len(self._places) else len(self._request.messages) - 1
                own = f"messages[{place}]{match[2]}"
                error.message, error.param = own + error.message.removeprefix(error.param or ""), own
            raise error from fault


def _images(message: content.AssistantMessage, field: str) -> Iterator[tuple[str, str | None]]:
    """(URL, what it was asked for by, if that is told) of the pictures of an answer, as it was told or as parts of its
    content. Raises ApiError: 400."""
    given = message.images or []
    if not isinstance(given, list):
        raise invalid(f"{field}.images", "must be a list of {type: image_url, image_url: {url}}", "invalid_type")
    for i, each in enumerate(given):
        place = each.get("image_url") if isinstance(each, dict) else None
        url = place.get("url") if isinstance(place, dict) else None
        if not isinstance(url, str) or not url:
            reason = "required: send the picture back as it was told"
            raise invalid(f"{field}.images[{i}].image_url.url", reason, "missing_required_parameter")
        prompt = each.get("revised_prompt")
        yield url, prompt if isinstance(prompt, str) else None
    for part in message.content or ():
        if isinstance(part, content.ImagePart):
            yield part.image_url.url, None
