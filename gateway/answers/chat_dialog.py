"""The conversation of a chat with tools that run here, for the answer loop."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any

from gateway.answers import conversation
from gateway.answers.conversation import AssistantMessage, ImagePart, ImageUrl, TextPart, ToolMessage, UserMessage
from gateway.answers.extensions import OF_ONE_TEXT
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import refuse_members, to_jobs
from gateway.answers.meter import Meter
from gateway.answers.request import ChatCompletionRequest, NamedFunction, Tool, ToolChoice
from gateway.answers.tools.calls import HostedTool, Rules
from gateway.answers.tools.events import ToolFailure, ToolResult, made_url
from gateway.answers.tools.generators import ImageGenerator
from gateway.answers.tools.registry import TOOLS, available, offered, read_tool
from gateway.answers.turn import AnswerEvent, ToolCall, Turn
from gateway.answers.turns import Turns
from gateway.errors import invalid
from gateway.pipeline.run import Job


def needs_dialog(gateway: Gateway, request: ChatCompletionRequest) -> bool:
    """Whether the request has tools that run here, or images that one made and that are read here."""
    if any(tool.type in TOOLS for tool in request.tools or ()):
        return True
    if ImageGenerator.name not in gateway.settings.hosted_tools or gateway.catalog.also_makes_images(request.model):
        return False
    return any(map(_has_images, request.messages))


async def run_dialog(
    gateway: Gateway, request: ChatCompletionRequest, owner: str | None, rules: Rules, meter: Meter
) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
    """In place of `run` for a request that needs a dialog: the events of all turns and tools as those of one answer, 0.

    Raises:
        ApiError: as `ChatDialog` and `Turns` do.
    """
    dialog = ChatDialog(gateway, request, owner)
    async with aclosing(Turns(gateway, dialog, dialog.tools, rules, meter).as_one()) as events:
        async for event in events:
            yield 0, event


def _has_images(message: conversation.Message) -> bool:
    return isinstance(message, AssistantMessage) and (
        bool(message.images) or any(isinstance(part, ImagePart) for part in message.content or ())
    )


class ChatDialog:
    """The conversation of a chat whose model may call tools that run here, or that has images which one made.

    Args:
        owner: whose uploaded voices can speak.

    Attributes:
        tools: those that run here, by name.

    Raises:
        ApiError: 400 naming the member at fault.
    """

    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, owner: str | None) -> None:
        self._gateway, self._request, self._owner = gateway, request, owner
        self._call_numbers = count(1)
        self._last_image: str | None = None
        self._last_words = ""  # of the user
        self._messages: list[Any] = []
        self._places: list[int] = []  # of each message: the message of the request that it is, or belongs to
        self._place = 0  # of what is added next
        self._calls: list[conversation.ToolCall] = []  # that run next
        thinker = gateway.pipeline.info("thinker")
        self._sees_images = thinker is not None and "image" in thinker.input_modalities
        self.tools: dict[str, HostedTool] = {}
        self._read_tools()
        request.check()
        refuse_members(request, OF_ONE_TEXT, "is for one turn, and an answer with tools that run here has several")
        for self._place, message in enumerate(request.messages):
            self._read(message)

    def _read_tools(self) -> None:
        for i, given in enumerate(self._request.tools or ()):
            place = f"tools[{i}]"
            if given.type in TOOLS:
                self._check_served(given.type, f"{place}.type")
                tool = self.tools[given.type] = read_tool(given.model_dump(), place, self.tools)
                tool.check(self._gateway, place)
            elif isinstance(given, Tool) and given.function.name in offered(self._gateway):
                reason = f"{given.function.name!r} is the name of a tool that runs here; take another"
                raise invalid(f"{place}.function.name", reason)
        if self.tools and (self._request.n or 1) > 1:
            raise invalid("n", f"only 1 with {next(iter(self.tools))}")

    def _check_served(self, name: str, place: str) -> None:
        if name not in available(self._gateway):
            what = "sound" if TOOLS[name].output == "audio" else f"{TOOLS[name].output}s"
            raise invalid(place, f"this server makes no {what}; leave it out")
        if name not in self._gateway.settings.hosted_tools:
            reason = f"{name} does not run here in chats: ask /v1/responses, or start the gateway with"
            raise invalid(place, f"{reason} --hosted-tools {name}")

    def _add(self, message: Any) -> None:
        self._messages.append(message)
        self._places.append(self._place)

    def _read(self, message: conversation.Message) -> None:
        """Adds a message of the request. Images become the call that made them, and its result."""
        if isinstance(message, AssistantMessage) and _has_images(message):
            inline = [(part.image_url.url, None) for part in message.content or () if isinstance(part, ImagePart)]
            for url, prompt in [*conversation.sent_images(message, f"messages[{self._place}]"), *inline]:
                called_with = {"prompt": self._last_words if prompt is None else prompt}
                call = self._new_call(ImageGenerator.name, ImageGenerator.arguments(called_with))
                self._add(AssistantMessage(role="assistant", tool_calls=[call]))
                self._add_output(call, ImageGenerator.done, url)
            texts = [part for part in message.content or () if not isinstance(part, ImagePart)]
            left = message.model_copy(update={"content": texts or None, "images": None})
            has_text = any(isinstance(part, TextPart) and part.text for part in texts)
            if has_text or left.tool_calls or left.audio:
                self._add(left)
            return
        if isinstance(message, UserMessage):
            urls = [self._url(part, i) for i, part in enumerate(message.content) if isinstance(part, ImagePart)]
            self._last_image = urls[-1] if urls else self._last_image
            self._last_words = " ".join(part.text for part in message.content if isinstance(part, TextPart))
        self._add(message)

    def _url(self, part: ImagePart, index: int) -> str:
        """Raises ApiError: 400, the picture is not there: a tool may change it."""
        if not part.image_url.url:
            reason = "required where tools run, which may change the picture: a uuid alone is not enough"
            field = f"messages[{self._place}].content[{index}].image_url"
            raise invalid(field, reason, "missing_required_parameter")
        return part.image_url.url

    def _new_call(self, name: str, arguments: str) -> conversation.ToolCall:
        return conversation.ToolCall.of(f"call_{name}_{next(self._call_numbers)}", name, arguments)

    def _add_output(self, call: conversation.ToolCall, came: str, url: str | None) -> None:
        parts: list[Any] = [TextPart(type="text", text=came)]
        if url is not None:
            self._last_image = url
            if self._sees_images:
                parts.append(ImagePart(type="image_url", image_url=ImageUrl(url=url)))
        self._add(ToolMessage(role="tool", content=parts, tool_call_id=call.id))

    async def job(self, request_id: str, offers_tools: bool, is_first: bool) -> Job:
        request = self._request
        tools = [
            self.tools[tool.type].function() if tool.type in self.tools else tool
            for tool in request.tools or ()
            if offers_tools or tool.type not in self.tools
        ]
        choice = request.tool_choice
        if choice is not None and choice.type in self.tools:
            choice = ToolChoice(type="function", function=NamedFunction(name=choice.type))
        update = {"messages": self._messages, "tools": tools or None, "tool_choice": choice if is_first else None}
        (job,) = await to_jobs(self._gateway, request.model_copy(update=update), request_id, self._owner)
        return job

    def shorten(self) -> bool:
        """A chat's messages are the client's: none is left out."""
        return False

    def end_turn(self, turn: Turn) -> None:
        self._calls = [self._new_call(call.name, call.arguments) for call in turn.hosted.values()]
        said: dict[str, Any] = {"content": turn.text or None, "reasoning_content": turn.reasoning or None}
        self._add(AssistantMessage(role="assistant", tool_calls=[*self._calls], **said))

    def last_image(self) -> str | None:
        return self._last_image

    def add_result(self, call: ToolCall, event: ToolResult | ToolFailure) -> None:
        is_made = isinstance(event, ToolResult)
        came = self.tools[call.name].result(event.members, is_made)
        url = made_url(event.members) if is_made and event.output == "image" else None
        self._add_output(self._calls.pop(0), came, url)

    def own_name(self, member: str) -> str:
        return re.sub(r"^messages\[(\d+)\]", lambda found: f"messages[{self._places[int(found[1])]}]", member)
