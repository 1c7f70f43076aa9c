"""The conversation of a chat with image_generation, for the answer loop."""

import re
from collections.abc import Iterator
from typing import Any

from gateway.answers import conversation
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import to_jobs
from gateway.answers.request import ChatCompletionRequest, NamedFunction, ToolChoice
from gateway.answers.tools.calls import arguments_of
from gateway.answers.tools.events import ToolEvent, ToolFailure, ToolImage
from gateway.answers.tools.image import ImageGenerator
from gateway.answers.tools.schema import IMAGE_TOOL, ImageTool
from gateway.answers.turn import ToolCall, Turn
from gateway.errors import invalid
from gateway.pipeline.run import Job


def needs_dialog(gateway: Gateway, request: ChatCompletionRequest) -> bool:
    """Whether the request has the tool, or images that it made. Raises ApiError: 400, it does not run here."""
    is_on = IMAGE_TOOL in gateway.settings.hosted_tools
    for i, tool in enumerate(request.tools or ()):
        if isinstance(tool, ImageTool) and not is_on:
            reason = f"{IMAGE_TOOL} does not run here in chats: ask /v1/responses, or start the gateway with"
            raise invalid(f"tools[{i}].type", f"{reason} --hosted-tools {IMAGE_TOOL}")
    if len(request.functions) < len(request.tools or ()):
        return True
    return is_on and any(
        isinstance(each, conversation.AssistantMessage) and _has_images(each) for each in request.messages
    )


def _has_images(message: conversation.AssistantMessage) -> bool:
    return bool(message.images) or any(isinstance(part, conversation.ImagePart) for part in message.content or ())


class ChatDialog:
    """The conversation of a chat whose model may call image_generation, or that has images which it made.

    Args:
        owner: whose uploaded voices can speak.

    Attributes:
        tools: those that run here, by name.

    Raises:
        ApiError: 400 naming the member at fault.
    """

    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, owner: str | None) -> None:
        self._gateway, self._request, self._owner = gateway, request, owner
        self._call_count = 0
        self._last_image: str | None = None
        self._last_words = ""  # of the user
        self._messages: list[Any] = []
        self._places: list[int] = []  # of each message: the message of the request that it is, or belongs to
        self._call_ids: list[str] = []  # of calls that run next
        thinker = gateway.pipeline.info("thinker")
        self._sees_images = thinker is not None and "image" in thinker.input_modalities
        request.check()
        tool = self._checked_tool()
        self.tools = {} if tool is None else {tool.name: tool}
        for i, message in enumerate(request.messages):
            self._read(i, message)

    def _checked_tool(self) -> ImageGenerator | None:
        request, tool = self._request, None
        for i, given in enumerate(request.tools or ()):
            if isinstance(given, ImageTool):
                if tool is not None:
                    raise invalid(f"tools[{i}]", f"{IMAGE_TOOL} is there twice; leave one out")
                if self._gateway.pipeline.config.outputs.image is None:
                    raise invalid(f"tools[{i}].type", "this server makes no images; leave it out")
                tool = ImageGenerator(given)
                tool.check(self._gateway, f"tools[{i}]")
            elif given.function.name == IMAGE_TOOL:
                reason = f"{IMAGE_TOOL!r} is the name of a tool that runs here; take another"
                raise invalid(f"tools[{i}].function.name", reason)
        if tool is not None and (request.n or 1) > 1:
            raise invalid("n", f"only 1 with {IMAGE_TOOL}")
        return tool

    def _add(self, place: int, message: Any) -> None:
        self._messages.append(message)
        self._places.append(place)

    def _read(self, place: int, message: conversation.Message) -> None:
        """Adds a message of the request. Images become the call that made them, and its result."""
        if isinstance(message, conversation.AssistantMessage) and _has_images(message):
            for url, prompt in _images(message, f"messages[{place}]"):
                call_id = self._new_call()
                self._add_calls(place, [(call_id, arguments_of(self._last_words if prompt is None else prompt))])
                self._add_output(place, call_id, ImageGenerator.done, url)
            texts = [part for part in message.content or () if not isinstance(part, conversation.ImagePart)]
            left = message.model_copy(update={"content": texts or None, "images": None})
            if (
                any(isinstance(part, conversation.TextPart) and part.text for part in texts)
                or left.tool_calls
                or left.audio
            ):
                self._add(place, left)
            return
        if isinstance(message, conversation.UserMessage):
            urls = [part.image_url.url for part in message.content if isinstance(part, conversation.ImagePart)]
            self._last_image = urls[-1] if urls else self._last_image
            self._last_words = " ".join(
                part.text for part in message.content if isinstance(part, conversation.TextPart)
            )
        self._add(place, message)

    def _new_call(self) -> str:
        self._call_count += 1
        return f"call_{IMAGE_TOOL}_{self._call_count}"

    def _add_calls(self, place: int, calls: list[tuple[str, str]], **said: Any) -> None:
        """Adds an assistant's message with calls of the tool: (id, arguments)."""
        made = [
            conversation.ToolCall(
                id=name, type="function", function=conversation.FunctionCall(name=IMAGE_TOOL, arguments=arguments)
            )
            for name, arguments in calls
        ]
        self._add(place, conversation.AssistantMessage(role="assistant", tool_calls=made, **said))

    def _add_output(self, place: int, call_id: str, came: str, url: str | None) -> None:
        parts: list[Any] = [conversation.TextPart(type="text", text=came)]
        if url is not None:
            self._last_image = url
            if self._sees_images:
                parts.append(conversation.ImagePart(type="image_url", image_url=conversation.ImageUrl(url=url)))
        self._add(place, conversation.ToolMessage(role="tool", content=parts, tool_call_id=call_id))

    async def job(self, request_id: str, offers_tools: bool, is_first: bool) -> Job:
        request = self._request
        tools = [
            self.tools[IMAGE_TOOL].function() if isinstance(tool, ImageTool) else tool
            for tool in request.tools or ()
            if offers_tools or not isinstance(tool, ImageTool)
        ]
        choice = request.tool_choice
        if choice is not None and choice.type == IMAGE_TOOL:
            choice = ToolChoice(type="function", function=NamedFunction(name=IMAGE_TOOL))
        update = {"messages": self._messages, "tools": tools or None, "tool_choice": choice if is_first else None}
        (job,) = await to_jobs(self._gateway, request.model_copy(update=update), request_id, self._owner)
        return job

    def shorten(self) -> bool:
        """A chat's messages are the client's: none is left out."""
        return False

    def end_turn(self, turn: Turn) -> None:
        self._call_ids = [self._new_call() for _ in turn.hosted]
        calls = [(name, call.arguments) for name, call in zip(self._call_ids, turn.hosted.values(), strict=True)]
        said = {"content": turn.text or None, "reasoning_content": turn.reasoning or None}
        self._add_calls(len(self._request.messages) - 1, calls, **said)

    def last_image(self) -> str | None:
        return self._last_image

    def add_result(self, call: ToolCall, event: ToolEvent) -> None:
        place, call_id = len(self._request.messages) - 1, self._call_ids.pop(0)
        if isinstance(event, ToolImage):
            self._add_output(place, call_id, ImageGenerator.done, event.url)
        elif isinstance(event, ToolFailure):
            self._add_output(place, call_id, ImageGenerator.failed + event.error.message, None)

    def own_name(self, member: str) -> str:
        return re.sub(r"^messages\[(\d+)\]", lambda found: f"messages[{self._places[int(found[1])]}]", member)


def _images(message: conversation.AssistantMessage, field: str) -> Iterator[tuple[str, str | None]]:
    """(URL, prompt if known) of each image of an answer, in `images` or in its content. Raises ApiError: 400."""
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
        if isinstance(part, conversation.ImagePart):
            yield part.image_url.url, None
