"""The tool image_generation: what the model is told of it, and what happens when it calls it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gateway.answers.diffusion import ImageRequest
from gateway.answers.gateway import Gateway
from gateway.answers.images import GeneratedImage, ImageGeneration, image_facts, load_images
from gateway.answers.request import Tool
from gateway.answers.tools import calls
from gateway.answers.tools.events import Failed, Generating, Painted, PaintEvent
from gateway.answers.tools.schema import IMAGE_TOOL, ImageTool
from gateway.errors import ApiError, invalid
from gateway.media.check import MediaFile
from gateway.pipeline.stage import Stage
from gateway.validation import validated
from quartet.v1 import dit_pb2

MAX_CALLS = 8  # of tools that run here, for one request, unless it says otherwise
MADE = "The picture was made, and the user sees it."
NOT_MADE = "The picture could not be made: "

_MEMBERS = ("size", "output_format", "output_compression")


def function(tool: ImageTool) -> Tool:
    """The tool as the model knows it: a function."""
    more: dict[str, dict[str, Any]] = {}
    if tool.action in (None, "auto"):
        why = "edit: change the conversation's last picture; generate: make a new one"
        more["action"] = {"type": "string", "enum": ["generate", "edit"], "description": why}
    what = "Makes a picture, which the user sees. Call it when the user asks for a picture, or for a change of one."
    shown = "what the picture shows, or what is to be changed in the conversation's last picture"
    return calls.function(IMAGE_TOOL, what, shown, **more)


def check(gateway: Gateway, tool: ImageTool, place: str) -> None:
    """Refuses settings that the model here cannot follow, where it is known. Raises ApiError: 400 naming the member."""
    stage = gateway.pipeline.output("image")
    if stage is None or not stage.serving or stage.info is None:
        return
    with calls.settings_at(place, {"model": "action"}):
        if tool.action == "edit":
            image_facts(stage, edits=True)
        if tool.input_image_mask is not None and not stage.info.dit.mask:
            raise invalid("input_image_mask", "this model takes none; leave it out")
        _request(tool, "a picture", shows=True).image_start(stage.info.dit)


def _request(tool: ImageTool, prompt: str, shows: bool) -> ImageRequest:
    members = {name: getattr(tool, name) for name in _MEMBERS}
    previews = {"stream": True, "partial_images": tool.partial_images} if shows else {}
    return validated(ImageRequest, {"prompt": prompt, **members, **previews})


@dataclass(frozen=True)
class Painting:
    """A picture that the model asked for.

    Attributes:
        tool: the request's settings.
        arguments: of the call, as the model wrote them.
        last_picture: URL of the conversation's last picture, which an edit starts from; None: there is none.
        request_id: names it in the stage.
        deadline: `time.monotonic()` at which the request's time is over.
        shows: whether previews are told.
        log: fields of the request's log line.
    """

    tool: ImageTool
    arguments: str
    last_picture: str | None
    request_id: str
    deadline: float
    shows: bool
    log: dict[str, Any]

    async def events(self, gateway: Gateway) -> AsyncGenerator[PaintEvent, None]:
        """Makes it: last comes the picture, or Failed, of which the model may say why. Closing the generator cancels
        the stage's call."""
        try:
            stage = gateway.pipeline.output("image")
            assert stage is not None, "the tool is offered where pictures are made"
            pictures, request = await self._prepare(gateway, stage)
            yield Generating()
            async with aclosing(pictures.events()) as made:
                async for event in made:
                    if not isinstance(event, GeneratedImage):
                        continue
                    file = await asyncio.to_thread(request.to_base64, event.pixels)
                    facts = request.file_facts(event.pixels)
                    if event.preview is None:
                        facts["action"] = "edit" if pictures.images else "generate"
                        facts["revised_prompt"] = request.prompt
                    yield Painted(file, facts, event.preview)
        except ApiError as error:
            self.log.update(error.log)
            yield Failed(error)

    async def _prepare(self, gateway: Gateway, stage: Stage) -> tuple[ImageGeneration, ImageRequest]:
        prompt, action = self._asked()
        base = self._base(stage) if action != "generate" else None
        if self.tool.action == "edit" and base is None:  # a model that says so without a picture means a new one
            raise invalid("action", "there is no picture to change, or this model does not change pictures")
        info = image_facts(stage, edits=base is not None)
        mask = self._mask() if base is not None else None
        request = _request(self.tool, prompt, self.shows)
        start = request.image_start(info)
        start.request_id = self.request_id
        images = [] if base is None else [base]
        await load_images(gateway, [*images, *([mask] if mask else [])])
        deadline = max(self.deadline, time.monotonic())
        return ImageGeneration(stage, start, images, mask, deadline, self.log), request

    def _asked(self) -> tuple[str, str | None]:
        """(prompt, action) of the call. Raises ApiError: the model wrote something else."""
        prompt, arguments = calls.read(self.arguments)
        fixed = self.tool.action if self.tool.action != "auto" else None
        return prompt, fixed or arguments.get("action")

    def _base(self, stage: Stage) -> MediaFile | None:
        """The conversation's last picture, where the model changes pictures."""
        if stage.info is None or dit_pb2.DIT_TASK_IMAGE_EDIT not in stage.info.dit.tasks:
            return None
        return None if self.last_picture is None else MediaFile("image", "image", self.last_picture)

    def _mask(self) -> MediaFile | None:
        url = (self.tool.input_image_mask or {}).get("image_url")
        return MediaFile("input_image_mask", "image", url) if isinstance(url, str) and url else None
