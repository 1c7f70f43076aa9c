"""Chat completions by a model that makes pictures: the user's last message says what of."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.responses import Response

from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway
from gateway.openai.answer import chunk
from gateway.openai.chat_requests import last_words, refuse_members
from gateway.openai.connection import DONE, sse
from gateway.openai.content import ImagePart
from gateway.openai.diffusion import ImageOptions, ImageRequest
from gateway.openai.forms import validated
from gateway.openai.image_generation import (
    FinishedImage,
    ImageGeneration,
    image_facts,
    load_pictures,
    to_base64,
)
from gateway.openai.schema import ChatCompletionRequest
from gateway.pipeline.stage import Stage

# Members that ask for another answer than pictures; those that only say how text is sampled are not read.
_TEXT_ONLY = ("audio", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs")
_OWN_NAME = {"model", "n", "seed"}


class ImageChat:
    """One chat request and its response.

    Args:
        gateway: the gateway.
        stage: makes the pictures.
        request: the request, valid by itself.
        state: its id, and the fields of its log line, filled in here.
    """

    def __init__(self, gateway: Gateway, stage: Stage, request: ChatCompletionRequest, state: State) -> None:
        self._gateway, self._stage, self._request = gateway, stage, request
        self._request_id, self._log = state.request_id, state.log
        self._deadline = time.monotonic() + gateway.settings.request_timeout_s
        self._options = request.quartet.dit or ImageOptions()
        self._head = {"id": f"chatcmpl-{self._request_id}", "created": int(time.time()), "model": request.model}
        self._asked_in = "messages"  # where the prompt is
        self._log["stream"] = bool(request.stream)

    async def whole(self) -> Response:
        """The response in one piece. Raises ApiError."""
        pictures = await self._pictures()
        async with aclosing(self._parts(pictures)) as made:
            parts = {i: part async for i, part in made}
        choices = [
            {
                "index": i,
                "finish_reason": "stop",
                "logprobs": None,
                "message": {"role": "assistant", "content": [parts[i]], "refusal": None},
            }
            for i in sorted(parts)
        ]
        body = self._head | {"object": "chat.completion", "modality": "image", "choices": choices}
        return await asyncio.to_thread(JSONResponse, body | {"quartet": pictures.quartet()})  # megabytes of text

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises ApiError."""
        pictures = await self._pictures()
        head, indices = self._head | {"object": "chat.completion.chunk"}, []
        async with aclosing(self._parts(pictures)) as made:
            async for i, part in made:
                indices.append(i)
                delta = {"role": "assistant", "content": [part]}
                yield await asyncio.to_thread(sse, head | chunk(i, "image", delta))
        for i in sorted(indices):
            yield sse(head | chunk(i, "image", {}, finish_reason="stop") | {"quartet": pictures.quartet()})
        yield DONE

    async def _part(self, picture: FinishedImage) -> dict[str, Any]:
        file_format = self._options.file_format
        file = await asyncio.to_thread(to_base64, picture.pixels, file_format, self._options.file_quality)
        return {"type": "image_url", "image_url": {"url": f"data:image/{file_format};base64,{file}"}}

    async def _pictures(self) -> ImageGeneration:
        request = self._request
        refuse_members(request, _TEXT_ONLY, "this model answers with images; leave it out")
        if "audio" in (request.modalities or ()):
            raise invalid("modalities", 'this model answers with images: use ["image"]')
        why, reads = "it says what the image shows", "reads text and images"
        self._asked_in, prompt, images = last_words(request, why, reads, ImagePart)
        info = image_facts(self._stage, edits=bool(images))
        members = {"prompt": prompt, "n": request.n, "seed": request.seed}
        with self._in_chat_terms():
            start = validated(ImageRequest, members | self._options.model_dump(exclude_none=True)).image_start(info)
        if len(images) > info.max_images:
            reason = f"there are {len(images)} images; this model takes {info.max_images} at most"
            raise invalid(images[info.max_images].field, reason)
        await load_pictures(self._gateway, images)
        start.request_id = self._request_id
        return ImageGeneration(self._stage, start, images, None, self._deadline, self._log)

    async def _parts(self, pictures: ImageGeneration) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """(index, content part) of each picture, as they are finished. Raises ApiError."""
        with self._in_chat_terms():
            async with aclosing(pictures.events()) as events:
                async for event in events:
                    if isinstance(event, FinishedImage):
                        yield event.output, await self._part(event)

    @contextmanager
    def _in_chat_terms(self) -> Iterator[None]:
        """Gives refusals the names of this endpoint's members. Raises ApiError."""
        try:
            yield
        except ApiError as error:
            param = error.param
            if param is not None and param not in _OWN_NAME and not param.startswith("messages"):
                error.param = self._asked_in if param == "prompt" else f"quartet.dit.{param}"
                error.message = error.param + error.message.removeprefix(param)
            raise
