"""`POST /v1/chat/completions/batch`: several conversations, each answered by a choice, as vLLM's server has it."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.access.places import Places
from gateway.answers.answer import Answer, usage
from gateway.answers.chat_dialog import needs_dialog
from gateway.answers.conversation import MediaPart, Message
from gateway.answers.files.parts import with_files
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import to_jobs
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.turn import AnswerEvent
from gateway.dialects.openai.answer import Form
from gateway.dialects.openai.chat import AnswerKind, ChatRun
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, owner_of, respond
from gateway.http.forms import JSON, page, read_json
from gateway.pipeline.run import Job, run
from gateway.validation import Listed

router = APIRouter(tags=["chat"])
MAX_CONVERSATIONS = 128
_OF_ONE_CHAT = ("stream", "tools", "use_beam_search", "prompt_logprobs", "audio", "kv_transfer_params")


class BatchRequest(ChatCompletionRequest):
    """As a chat's, with a list of conversations."""

    messages: Listed[Annotated[Listed[Message], Field(min_length=1)]] = Field(  # pyright: ignore
        min_length=1, max_length=MAX_CONVERSATIONS, description=f"conversations, at most {MAX_CONVERSATIONS}"
    )

    def check(self) -> None:
        """Raises ApiError: 400 naming a member that is for one conversation."""
        for name in _OF_ONE_CHAT:
            value = getattr(self, name)
            if value or (value == 0 and value is not False):  # 0 alternatives are log-probabilities all the same
                raise invalid(name, "is not for batches; leave it out, or send each conversation by itself")
        if self.speaks:
            raise invalid("modalities", 'a batch is text: use ["text"], or send each conversation by itself')
        if self.n not in (None, 1):
            raise invalid("n", "must be 1: each conversation has one answer")

    def chat(self, index: int) -> ChatCompletionRequest:
        """The request of one conversation."""
        members = {name: getattr(self, name) for name in type(self).model_fields}
        members["messages"] = self.messages[index]
        return ChatCompletionRequest.model_construct(self.model_fields_set, **members)


@router.post(
    "/v1/chat/completions/batch", openapi_extra=page(BatchRequest, "chat.completion, a choice for each", answered=JSON)
)
async def batch(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers several conversations with text."""
    request = await read_json(http, BatchRequest)
    request.check()
    request.model = gateway.catalog.meant(request.model) or ""
    gateway.catalog.stage_for("text", request.model, takes_loras=True)
    for i, messages in enumerate(request.messages):
        request.messages[i] = await with_files(gateway, messages, owner_of(http), f"messages[{i}]")
    return await respond(http, BatchRun(gateway, request, http), streams=False)


class BatchRun(ChatRun):
    def __init__(self, gateway: Gateway, request: BatchRequest, http: Request) -> None:
        super().__init__(gateway, request, http)
        self._chats = [request.chat(i) for i in range(len(request.messages))]

    def _form(self, index: int = 0) -> Form:
        return self._form_of(self._chats[index])

    def _new(self, kind: type[AnswerKind]) -> list[AnswerKind]:
        self._meter.log |= {"speech": False, "answers": len(self._chats)}
        return [kind(i, "", 0) for i in range(len(self._chats))]

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return _sum([usage([answer]) for answer in answers])

    def _count(self, answers: Sequence[Answer]) -> None:
        total = self._usage(answers)
        self._meter.count(total["prompt_tokens"], total["completion_tokens"], None)

    async def _run(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        parts = [part for chat in self._chats for message in chat.messages for part in message.content or ()]
        limits = self._gateway.fetcher.limits
        if sum(isinstance(part, MediaPart) for part in parts) > limits.media_max_parts:
            raise invalid("messages", f"at most {limits.media_max_parts} media parts are allowed in all conversations")
        self._meter.charge(len(self._chats), "messages")
        jobs, left_bytes = list[Job](), limits.max_body_bytes
        for i, chat in enumerate(self._chats):
            jobs.append(job := await self._job(i, chat))
            left_bytes -= job.starts["thinker"].ByteSize() + sum(map(len, job.media))
            if left_bytes < 0:
                raise invalid("messages", f"all conversations together are more than {limits.max_body_bytes} bytes")
        places = Places(self._gateway.admission, self._key)
        return run(self._gateway.pipeline, jobs, self._meter.left_s, places.take)

    async def _job(self, index: int, chat: ChatCompletionRequest) -> Job:
        """Raises ApiError, which names the conversation."""
        if needs_dialog(self._gateway, chat):
            raise invalid(f"messages[{index}]", "has images that a tool made; send it by itself")
        try:
            (job,) = await to_jobs(self._gateway, chat, f"{self._meter.request_id}-{index}", self._owner)
        except ApiError as error:
            if error.param and error.param.startswith("messages"):
                place = _in_batch(error.param, index)
                error.message, error.param = error.message.replace(error.param, place, 1), place
            raise
        for message in job.starts["thinker"].messages:
            for part in message.content:
                if part.HasField("media"):  # errors of the thinker name it
                    part.media.field = _in_batch(part.media.field, index)
        return job


def _in_batch(place: str, index: int) -> str:
    return f"messages[{index}]{place.removeprefix('messages')}"


def _sum(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _sum([each[name] for each in counts]) if isinstance(value, dict) else sum(each[name] for each in counts)
        for name, value in counts[0].items()
    }
