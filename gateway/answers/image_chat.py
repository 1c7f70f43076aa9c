"""Chats whose model makes images; the user's last message is the prompt."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from gateway.answers.conversation import ImagePart
from gateway.answers.diffusion import ImageOptions, ImageRequest
from gateway.answers.gateway import Gateway
from gateway.answers.images import ImageGeneration, begin, image_facts
from gateway.answers.jobs import last_words, refuse_members
from gateway.answers.meter import Meter
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.tools.events import image_url
from gateway.errors import in_own_terms, invalid
from gateway.pipeline.stage import Stage
from gateway.validation import validated

# Members that ask for another answer than images; those that only say how text is sampled are not read.
_TEXT_ONLY = ("lora", "audio", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs")
_OWN_NAME = {"model", "n", "seed"}


class ImageChat:
    """A chat that images answer."""

    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, stage: Stage) -> None:
        self._gateway, self._request, self._stage = gateway, request, stage
        self._options = request.quartet.dit or ImageOptions()
        self._prompt_field = "messages"

    async def generation(self, meter: Meter) -> ImageGeneration:
        """Raises ApiError: 400 naming the member at fault."""
        request = self._request
        refuse_members(request, _TEXT_ONLY, "this model answers with images; leave it out")
        if "audio" in (request.modalities or ()):
            raise invalid("modalities", 'this model answers with images: use ["image"]')
        why, reads = "it says what the image shows", "reads text and images"
        self._prompt_field, prompt, images = last_words(request, why, reads, ImagePart)
        info = image_facts(self._stage, edits=bool(images))
        members = {"prompt": prompt, "n": request.n, "seed": request.seed}
        with in_own_terms(self._chat_name):
            start = validated(ImageRequest, members | self._options.model_dump(exclude_none=True)).image_start(info)
        if len(images) > info.max_images:
            reason = f"there are {len(images)} images; this model takes {info.max_images} at most"
            raise invalid(images[info.max_images].field, reason)
        return await begin(self._gateway, self._stage, start, images, None, meter)

    async def parts(self, generation: ImageGeneration) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Yields (index, content part) of finished images. Raises ApiError."""
        with in_own_terms(self._chat_name):
            async with aclosing(generation.finished()) as finished:
                async for image in finished:
                    file = await asyncio.to_thread(self._options.to_base64, image.pixels)
                    url = image_url(file, self._options.file_format)
                    yield image.output, {"type": "image_url", "image_url": {"url": url}}

    def _chat_name(self, member: str) -> str:
        if member in _OWN_NAME or member.startswith("messages"):
            return member
        return self._prompt_field if member == "prompt" else f"quartet.dit.{member}"
