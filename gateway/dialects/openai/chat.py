"""`POST /v1/chat/completions`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.access.places import Places
from gateway.answers.answer import Answer, WholeAnswer, prompt_logprobs, usage
from gateway.answers.beams import beams
from gateway.answers.chat_dialog import needs_dialog, run_dialog
from gateway.answers.files.parts import with_files
from gateway.answers.gateway import Gateway
from gateway.answers.image_chat import ImageChat, answers_with_images
from gateway.answers.jobs import to_jobs
from gateway.answers.meter import Meter
from gateway.answers.request import ChatCompletionRequest, StreamOptions
from gateway.answers.tools.calls import Rules
from gateway.answers.turn import AnswerEvent
from gateway.dialects.openai.answer import Form, StreamedAnswer, choice, chunk, whole_choice
from gateway.errors import in_own_terms
from gateway.http.connection import DONE, admitted, drain, key_of, owner_of, respond, sse
from gateway.http.forms import page, read_json
from gateway.http.json_writer import Json
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.run import run
from gateway.pipeline.stage import Stage

router = APIRouter(tags=["chat"])
AnswerKind = TypeVar("AnswerKind", bound=Answer)

_ANSWER = "chat.completion, or with stream: true chat.completion.chunk events and [DONE]"


@router.post("/v1/chat/completions", openapi_extra=page(ChatCompletionRequest, _ANSWER))
async def chat_completions(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers a conversation with text and, if requested, speech; or with images, if the model makes them."""
    return await answer_chat(http, gateway, await read_json(http, ChatCompletionRequest))


async def answer_chat(http: Request, gateway: Gateway, request: ChatCompletionRequest) -> Response:
    """Raises ApiError."""
    request.model = gateway.catalog.meant(request.model) or ""
    request.messages = await with_files(gateway, request.messages, owner_of(http))
    stage = _stage(gateway, request)
    if KINDS[stage.kind].is_diffusion:
        chat = ImageRun(gateway, request, http, stage)
    else:
        chat = ChatRun(gateway, request, http)
    return await respond(http, chat, request.stream)


def _stage(gateway: Gateway, request: ChatCompletionRequest) -> Stage:
    """The stage that answers. Raises ApiError."""
    image = gateway.pipeline.output("image")
    if image is not None and answers_with_images(gateway, image, request):
        gateway.catalog.require_model(request.model, image)
        return image
    return gateway.catalog.answerer(request.model)


class _BaseRun:
    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, http: Request) -> None:
        self._gateway, self._request, self._key, self._owner = gateway, request, key_of(http), owner_of(http)
        self._meter = Meter.of(http.state, gateway.settings.request_timeout_s)
        self._head = {"id": f"chatcmpl-{http.state.request_id}", "created": int(time.time()), "model": request.model}


class ChatRun(_BaseRun):
    async def stream(self) -> AsyncGenerator[bytes, None]:
        options, answers = self._request.stream_options or StreamOptions(), self._new(StreamedAnswer)
        form = self._form()
        for answer in answers:
            answer.form = form
        code2wav = self._gateway.pipeline.info("code2wav")
        if self._request.audio_format == "wav" and code2wav is not None:
            for answer in answers:
                answer.wav_rate_hz = code2wav.sample_rate_hz
        head = self._head | {"object": "chat.completion.chunk"}
        include_usage = bool(options.include_usage)
        if include_usage:  # every chunk has the key, and a last one the numbers
            head["usage"] = None
        async with aclosing(self._events(answers)) as events:
            async for index, event in events:
                if include_usage and options.continuous_usage_stats:
                    head["usage"] = usage(answers)
                for members in answers[index].chunks(event):
                    yield sse(head | members)
        if include_usage:
            yield sse(head | {"choices": [], "modality": "text", "usage": usage(answers)})
        yield DONE

    async def whole(self) -> Response:
        request, answers = self._request, self._new(WholeAnswer)
        await drain(self._events(answers))
        body = self._head | {
            "object": "chat.completion",
            "choices": [
                await whole_choice(answer, request.audio_format, bool(request.logprobs), self._form(answer.index))
                | ({"quartet": answer.quartet()} if len(answers) > 1 else {})
                for answer in answers
            ],
            "usage": self._usage(answers),
            "modality": "audio" if any(answer.samples for answer in answers) else "text",
            "quartet": answers[0].quartet(),
        }
        first = answers[0]
        body["prompt_token_ids"] = list(first.prompt.token_ids) if request.return_token_ids else None
        body["prompt_logprobs"] = None
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, first.prompt_tokens)
        return Json(body)

    def _form(self, index: int = 0) -> Form:
        """Of answer `index`."""
        return self._form_of(self._request)

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage(answers)

    def _count(self, answers: Sequence[Answer]) -> None:
        self._meter.count_answers(answers)

    def _form_of(self, request: ChatCompletionRequest) -> Form:
        info = self._gateway.pipeline.info("thinker")
        return Form.of(request, info is not None and info.reasons)

    def _new(self, kind: type[AnswerKind]) -> list[AnswerKind]:
        self._meter.log |= {"speech": self._request.speaks, "answers": self._request.n or 1}
        return [kind(i, *self._gateway.transcripts.new_id()) for i in range(self._request.n or 1)]

    async def _events(self, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        """(index of the answer, event), once the answer has taken it. Raises ApiError."""
        gateway, meter = self._gateway, self._meter
        with in_own_terms(self._request.own_name):
            async with aclosing(await self._run()) as events:
                async for index, event in events:
                    answers[index].take(event)
                    meter.observe(event)  # as turns do, too: what comes first counts, once
                    yield index, event
        for answer in answers:
            if answer.audio_bytes:
                gateway.transcripts.put(answer.audio_id, answer.expires_at, answer.text)
        self._count(answers)

    async def _run(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        """One run of the pipeline, or turns with the tools that run here. Raises ApiError or StageError."""
        if needs_dialog(self._gateway, self._request):
            rules = Rules(previews=bool(self._request.stream), key=self._key)
            return run_dialog(self._gateway, self._request, self._owner, rules, self._meter)
        jobs = await to_jobs(self._gateway, self._request, self._meter.request_id, self._owner)
        self._meter.charge(self._request.n or 1, "n")
        if self._request.use_beam_search:
            return beams(self._gateway, jobs, self._request.n or 1, self._meter)
        places = Places(self._gateway.admission, self._key)
        return run(self._gateway.pipeline, jobs, self._meter.left_s, places.take)


class ImageRun(_BaseRun):
    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, http: Request, stage: Stage) -> None:
        super().__init__(gateway, request, http)
        self._chat = ImageChat(gateway, request, stage, self._owner)

    async def whole(self) -> Response:
        generation = await self._chat.generation(self._meter)
        async with aclosing(self._chat.parts(generation)) as made:
            parts = dict([part async for part in made if not isinstance(part, str)])
        answer = {"role": "assistant", "refusal": None, **self._thought(generation.thoughts)}
        messages = {i: answer | {"content": [parts[i]]} for i in sorted(parts)}
        choices = [choice(i, {"message": message}, finish_reason="stop") for i, message in messages.items()]
        body = self._head | {"object": "chat.completion", "modality": "image", "choices": choices}
        return await asyncio.to_thread(Json, body | {"quartet": generation.quartet()})  # megabytes of text

    async def stream(self) -> AsyncGenerator[bytes, None]:
        generation = await self._chat.generation(self._meter)
        head, indices = self._head | {"object": "chat.completion.chunk"}, []
        async with aclosing(self._chat.parts(generation)) as made:
            async for part in made:
                if isinstance(part, str):
                    for i in range(generation.start.count if (delta := self._thought(part)) else 0):
                        yield sse(head | chunk(i, "text", {"role": "assistant", **delta}))
                    continue
                i, content = part
                indices.append(i)
                delta = {"role": "assistant", "content": [content]}
                yield await asyncio.to_thread(sse, head | chunk(i, "image", delta))
        for i in sorted(indices):
            yield sse(head | chunk(i, "image", {}, finish_reason="stop") | {"quartet": generation.quartet()})
        yield DONE

    def _thought(self, text: str) -> dict[str, str]:
        """Members of a message or a delta for what was written before the images."""
        shown = text and self._request.include_reasoning is not False
        return {"reasoning_content": text, "reasoning": text} if shown else {}
