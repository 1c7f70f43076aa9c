"""Requests as `/inference/v1/generate` takes them: a prompt's ids and media, and how the answer is sampled."""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import pybase64

from gateway.answers.request import WriterSampling
from gateway.errors import invalid
from gateway.pipeline.run import Job
from quartet.v1 import media_pb2, thinker_pb2

MAX_FILE_BYTES = 16 * 1024 * 1024  # of all media that are given back: they are here twice more, in base64 and as JSON
_SAMPLING = {*WriterSampling.model_fields, "logprob_token_ids", "n", "prompt_logprobs"} - {"priority", "max_tokens"}


def placeholders(prompt: thinker_pb2.PromptInfo) -> Mapping[str, list[dict[str, Any]]] | None:
    """Where media stand in a prompt, by their kind; None: it has none."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in prompt.media:
        by_kind.setdefault(_kind(each), []).append({"offset": each.offset, "length": each.length})
    return by_kind or None


def _kind(medium: media_pb2.Media | thinker_pb2.MediaRange) -> str:
    return media_pb2.MediaKind.Name(medium.kind).removeprefix("MEDIA_KIND_").lower()


async def features(job: Job, prompt: thinker_pb2.PromptInfo, has_files: bool) -> dict[str, Any] | None:
    """The media of a job, as a later request gives them back; None: it has none. Raises ApiError: 400, too large.

    Args:
        prompt: as it was read.
        has_files: whether the files come along.
    """
    files = list(_files(job))
    if has_files and sum(len(content) for _, content in files) > MAX_FILE_BYTES:
        reason = f'"tensors" gives back files of {MAX_FILE_BYTES} bytes in all, and these are more'
        raise invalid("mm_payload", f"{reason}; set it to none, and send them as content_parts")
    found = placeholders(prompt)
    if found is None:
        return None

    def by_kind(written: Any) -> dict[str, list[str]]:
        return {kind: [written(content) for each, content in files if each == kind] for kind in found}

    hashes = await asyncio.to_thread(by_kind, lambda content: hashlib.sha256(content).hexdigest())
    data = await asyncio.to_thread(by_kind, pybase64.b64encode_as_string) if has_files else None
    return {"mm_hashes": hashes, "mm_placeholders": found, "kwargs_data": data, "mm_metadata": None}


def _files(job: Job) -> Iterator[tuple[str, bytes]]:
    """(kind, content) of each medium of a chat, in their order."""
    late = iter(job.media)
    for message in job.starts["thinker"].messages:
        for part in message.content:
            if part.HasField("media"):
                yield _kind(part.media), part.media.data or next(late)


def generate_body(
    request: Any,
    request_id: str,
    prompt: thinker_pb2.PromptInfo,
    media: dict[str, Any] | None,
    max_tokens: int | None,
    logprobs: int | None,
) -> dict[str, Any]:
    """The body for `/inference/v1/generate` that a chat or a completion `request` stands for.

    Args:
        prompt: as it was read.
        max_tokens: None: up to the longest context.
        logprobs: alternatives of each token; None: no log-probabilities.
    """
    sampling = request.model_dump(mode="json", by_alias=True, exclude_none=True, include=_SAMPLING)
    options = request.stream_options and request.stream_options.model_dump(exclude_none=True)
    return {
        "request_id": request_id,
        "token_ids": list(prompt.token_ids),
        "features": media,
        "sampling_params": sampling | {"max_tokens": max_tokens, "logprobs": logprobs},
        "model": request.lora or request.model,
        "reasoning_ended": not prompt.opens_thought,
        "return_token_ids": request.return_token_ids,
        "stream": bool(request.stream),
        "stream_options": options,
        "priority": request.priority or 0,
    }
