"""A chat that images answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from gateway.answers.conversation import (
    AssistantMessage,
    ImagePart,
    Message,
    RefusalPart,
    TextPart,
    ToolMessage,
    UserMessage,
)
from gateway.answers.diffusion import ImageOptions, ImagePipelineOptions, ImageRequest
from gateway.answers.extensions import OF_ONE_TEXT
from gateway.answers.gateway import Gateway
from gateway.answers.images import GeneratedImage, ImageGeneration, InputImages, begin, image_facts
from gateway.answers.jobs import last_words, refuse_members
from gateway.answers.meter import Meter
from gateway.answers.prompt_messages import media_file, refuse_large, sent_files
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.tools.events import image_url
from gateway.errors import in_own_terms, invalid
from gateway.media.check import MediaFile
from gateway.pipeline.stage import Stage
from gateway.validation import validated
from quartet.v1 import dit_pb2

# Members of a chat that ask for another answer than images; those that say how text is sampled are not read.
_TEXT_ONLY = (
    *("lora", "audio", "tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "top_logprobs"),
    *OF_ONE_TEXT,
)
_CHAT_NAMES = {"model", "n", "seed"}  # of members that a request for images has, too
_WHY, _READS = "it says what the image shows", "reads text and images"


@dataclass
class _Said:
    """What a conversation says to a model that makes images.

    Attributes:
        place: of the prompt, in the request.
        context: texts and indices of `images`, which come before the prompt.
    """

    place: str
    prompt: str
    images: list[MediaFile]
    context: list[dit_pb2.ContextPart] = field(default_factory=list[dit_pb2.ContextPart])


def answers_with_images(gateway: Gateway, stage: Stage, request: ChatCompletionRequest) -> bool:
    """Whether `stage`, which makes images, answers the request: its model is meant, which writes no answers, or has
    them written by another stage and shall make an image."""
    if not gateway.pipeline.answer or gateway.catalog.models.get(request.model) is stage:
        return True
    return "image" in (request.modalities or ()) and gateway.catalog.also_makes_images(request.model)


class ImageChat:
    """A chat that images answer. A model that reads conversations reads all of it, another one the user's last message.

    Args:
        owner: whose media its messages name.
    """

    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, stage: Stage, owner: str | None) -> None:
        self._gateway, self._request, self._stage, self._owner = gateway, request, stage, owner
        self._options = request.quartet.dit or ImageOptions()
        self._prompt_field = "messages"

    async def generation(self, meter: Meter) -> ImageGeneration:
        """Raises ApiError: 400 naming the member at fault."""
        request = self._request
        refuse_members(request, _TEXT_ONLY, "this model answers with images; leave it out")
        if "audio" in (request.modalities or ()):
            raise invalid("modalities", 'this model answers with images: use ["image"]')
        said = self._said()
        self._prompt_field = said.place
        info = image_facts(self._stage, edits=bool(said.images))
        members = {"prompt": said.prompt, "n": request.n, "seed": request.seed}
        of_the_pipeline = set(ImagePipelineOptions.model_fields)
        members |= self._options.model_dump(exclude_none=True, exclude=of_the_pipeline)
        members["quartet"] = {"dit": self._options.model_dump(include=of_the_pipeline)}
        with in_own_terms(self._chat_name):
            drawing = validated(ImageRequest, members)
            start = drawing.image_start(info)
        if len(said.images) > info.max_images:
            reason = f"there are {len(said.images)} images; this model takes {info.max_images} at most"
            raise invalid(said.images[info.max_images].field, reason)
        start.context.extend(said.context)
        refuse_large(start, "messages")
        inputs = InputImages(said.images, controls=drawing.control_images)
        return await begin(self._gateway, self._stage, start, inputs, meter)

    async def parts(self, generation: ImageGeneration) -> AsyncGenerator[str | tuple[int, dict[str, Any]], None]:
        """Yields pieces of the thoughts that all images share, then (index, content part) of finished images. Raises
        ApiError."""
        with in_own_terms(self._chat_name):
            async with aclosing(generation.events()) as events:
                async for event in events:
                    if isinstance(event, dit_pb2.DitThoughts):
                        yield event.text
                    elif isinstance(event, GeneratedImage) and event.preview is None:
                        file = await asyncio.to_thread(self._options.to_base64, event.pixels)
                        url = image_url(file, self._options.file_format)
                        yield event.output, {"type": "image_url", "image_url": {"url": url}}

    def _said(self) -> _Said:
        """Raises ApiError: 400, there is no message of the user's, or naming the part that is not read."""
        request, info = self._request, self._stage.info
        place, prompt, images = last_words(request, _WHY, _READS, ImagePart, self._owner)
        if info is None or not info.dit.reads_context:
            return _Said(place, prompt, images)
        last = max(i for i, message in enumerate(request.messages) if isinstance(message, UserMessage))
        *turns, words = [
            list(self._read(each, f"messages[{i}]")) for i, each in enumerate(request.messages[: last + 1])
        ]
        said = _Said(place, prompt, [])
        if texts := [i for i, part in enumerate(words) if isinstance(part, str)]:
            said.prompt = str(words.pop(texts[-1]))
        for part in chain(*turns, words):
            if isinstance(part, str):
                said.context.append(dit_pb2.ContextPart(text=part))
            else:
                said.context.append(dit_pb2.ContextPart(image=len(said.images)))
                said.images.append(part)
        return said

    def _read(self, message: Message, place: str) -> Iterator[str | MediaFile]:
        """Texts and images of a message in their order. Raises ApiError: 400 naming a part that is not read."""
        if isinstance(message, ToolMessage):
            raise invalid(f"{place}.role", "this model calls no tools; leave the message out")
        texts: list[str] = []
        for j, part in enumerate(message.content or ()):
            if isinstance(part, TextPart):
                texts.append(part.text)
            elif isinstance(part, RefusalPart):
                texts.append(part.refusal)
            elif isinstance(part, ImagePart):
                yield from _joined(texts)
                texts = []
                yield media_file(part, f"{place}.content[{j}]", self._owner)
            else:
                raise invalid(f"{place}.content[{j}]", f"this model {_READS} only")
        yield from _joined(texts)
        if isinstance(message, AssistantMessage):
            yield from sent_files(message, place)

    def _chat_name(self, member: str) -> str:
        if member in _CHAT_NAMES or member.startswith(("messages", "quartet.dit.")):
            return member
        if member.startswith("context"):
            return "messages"
        return self._prompt_field if member == "prompt" else f"quartet.dit.{member}"


def _joined(texts: list[str]) -> list[str]:
    """One text, if they say anything."""
    text = "\n".join(texts)
    return [text] if text.strip() else []
