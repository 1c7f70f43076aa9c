"""The tool image_generation: the function that the model sees, and its calls."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from gateway.answers.diffusion import ImageRequest
from gateway.answers.gateway import Gateway
from gateway.answers.images import GeneratedImage, ImageGeneration, image_facts, load_images
from gateway.answers.request import Tool
from gateway.answers.tools import calls
from gateway.answers.tools.calls import HostedCall
from gateway.answers.tools.events import ToolEvent, ToolImage, ToolProgress
from gateway.answers.tools.schema import IMAGE_TOOL, ImageTool
from gateway.errors import invalid
from gateway.media.check import MediaFile
from gateway.pipeline.kinds import Output
from gateway.pipeline.stage import Stage
from gateway.validation import validated
from quartet.v1 import dit_pb2

_MEMBERS = ("size", "output_format", "output_compression")


@dataclass(frozen=True)
class ImageGenerator:
    """The tool with a request's settings."""

    settings: ImageTool
    name: ClassVar[str] = IMAGE_TOOL
    output: ClassVar[Output] = "image"
    schema: ClassVar[type[BaseModel]] = ImageTool
    done: ClassVar[str] = "The picture was made, and the user sees it."
    failed: ClassVar[str] = "The picture could not be made: "

    def function(self) -> Tool:
        """The tool as the model sees it: a function."""
        more: dict[str, dict[str, Any]] = {}
        if self.settings.action in (None, "auto"):
            why = "edit: change the conversation's last picture; generate: make a new one"
            more["action"] = {"type": "string", "enum": ["generate", "edit"], "description": why}
        what = "Makes a picture, which the user sees. Call it when the user asks for a picture, or for a change of one."
        shown = "what the picture shows, or what is to be changed in the conversation's last picture"
        return calls.function(IMAGE_TOOL, what, shown, **more)

    def check(self, gateway: Gateway, place: str) -> None:
        """Refuses settings that the model here cannot follow, if its stage serves. Raises ApiError: 400."""
        if (stage := calls.serving_stage(gateway, self.output)) is None or stage.info is None:
            return
        with calls.settings_at(place, {"model": "action"}):
            if self.settings.action == "edit":
                image_facts(stage, edits=True)
            if self.settings.input_image_mask is not None and not stage.info.dit.mask:
                raise invalid("input_image_mask", "this model takes none; leave it out")
            self._request("a picture", previews=True).image_start(stage.info.dit)

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        """Makes the image, which is the last event. Closing the generator cancels the stage's call. Raises ApiError."""
        stage = gateway.pipeline.output("image")
        assert stage is not None, "the tool is offered where images are made"
        generation, request = await self._prepare(gateway, stage, call)
        yield ToolProgress()
        async with aclosing(generation.events()) as events:
            async for event in events:
                if not isinstance(event, GeneratedImage):
                    continue
                file = await asyncio.to_thread(request.to_base64, event.pixels)
                facts = request.file_facts(event.pixels)
                if event.preview is None:
                    facts["action"] = "edit" if generation.images else "generate"
                    facts["revised_prompt"] = request.prompt
                yield ToolImage(file, facts, event.preview)

    def _request(self, prompt: str, previews: bool) -> ImageRequest:
        members = {name: getattr(self.settings, name) for name in _MEMBERS}
        shown = {"stream": True, "partial_images": self.settings.partial_images} if previews else {}
        return validated(ImageRequest, {"prompt": prompt, **members, **shown})

    async def _prepare(self, gateway: Gateway, stage: Stage, call: HostedCall) -> tuple[ImageGeneration, ImageRequest]:
        prompt, arguments = calls.read(call.arguments)
        fixed = self.settings.action if self.settings.action != "auto" else None
        action = fixed or arguments.get("action")
        base = None
        if action != "generate" and _edits(stage) and call.last_image is not None:
            base = MediaFile("image", "image", call.last_image)
        if self.settings.action == "edit" and base is None:  # a model that says so without an image means a new one
            raise invalid("action", "there is no picture to change, or this model does not change pictures")
        info = image_facts(stage, edits=base is not None)
        mask = self._mask() if base is not None else None
        request = self._request(prompt, call.rules.previews)
        start = request.image_start(info)
        start.request_id = call.request_id
        images = [] if base is None else [base]
        await load_images(gateway, [*images, *([mask] if mask else [])])
        deadline = max(call.meter.deadline, time.monotonic())
        return ImageGeneration(stage, start, images, mask, deadline, call.meter.log), request

    def _mask(self) -> MediaFile | None:
        url = (self.settings.input_image_mask or {}).get("image_url")
        return MediaFile("input_image_mask", "image", url) if isinstance(url, str) and url else None


def _edits(stage: Stage) -> bool:
    """Whether the stage's model changes images."""
    return stage.info is not None and dit_pb2.DIT_TASK_IMAGE_EDIT in stage.info.dit.tasks
