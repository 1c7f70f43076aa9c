"""Prompts: texts, and chats in OpenAI's form with files, arrays and Pillow images."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from quartet.answers import Answer
from quartet.errors import refused
from quartet.media import KINDS, Kind, Media, audio, media_of

Message = Mapping[str, Any]
Prompt = str | Message | Sequence[Message]
Prompts = list[str] | list["Chat"] | list[Prompt]


class PromptOptions(TypedDict, total=False):
    """Members of a chat request of the HTTP API (docs/api.md), and these of Python alone.

    Attributes:
        speech: whether to speak the answer: `modalities` ["text", "audio"].
        voice: one of the model's.
        images, audios, videos: beside a text: URLs, paths, bytes, arrays, ...; see quartet.image.
    """

    speech: bool
    voice: str | None
    images: Sequence[Any]
    audios: Sequence[Any]
    videos: Sequence[Any]
    modalities: list[str]
    lora: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    logit_bias: dict[int, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: dict[str, Any] | None
    priority: int | None
    quartet: dict[str, Any]


_NOT_HERE = {
    "model": "an adapter is asked for by lora; the model is that of the stages",
    "n": "give the prompt as often as you want answers, each with a seed of its own",
    "stream": "call stream()",
    "stream_options": "the last event of stream() has all",
    "audio": "use voice; the samples come as they are, Audio.save writes files",
}


class Chat(list[dict[str, Any]]):
    """A conversation as a prompt, which grows turn by turn."""

    def __init__(self, system: str | None = None) -> None:
        super().__init__([] if system is None else [{"role": "system", "content": system}])

    def user(self, *parts: Any) -> "Chat":
        """Adds texts, paths, Pillow images, arrays, quartet.image(...), ..."""
        self.append({"role": "user", "content": list(parts)})
        return self

    def assistant(self, answer: Answer | str) -> "Chat":
        """Adds an answer."""
        self.append(answer.message if isinstance(answer, Answer) else {"role": "assistant", "content": answer})
        return self

    def tool(self, tool_call_id: str, result: str) -> "Chat":
        """Adds the result of a tool call."""
        self.append({"role": "tool", "tool_call_id": tool_call_id, "content": result})
        return self


def is_batch(prompt: Any) -> bool:
    """A list of messages is one prompt."""
    if isinstance(prompt, str | Mapping | Chat) or not isinstance(prompt, Sequence):
        return False
    return not prompt or not all(isinstance(item, Mapping) for item in prompt)


def members(
    prompt: Any, options: PromptOptions, speaks_only: bool
) -> tuple[dict[str, Any], list[tuple[str, Media, dict]]]:
    """(members of a chat request without model, files). A file is (place, media, the member whose "url" it fills).

    Raises:
        Error: naming the option or message part at fault.
    """
    given: dict[str, Any] = dict(options)
    for name, remedy in _NOT_HERE.items():
        if name in given:
            raise refused(name, f"not taken here: {remedy}")
    files: list[tuple[str, Media, dict]] = []
    beside = [_beside(kind, each) for kind in KINDS for each in given.pop(f"{kind}s", None) or ()]
    if isinstance(prompt, str):
        messages: list[Any] = [{"role": "user", "content": [*beside, prompt] if beside else prompt}]
    elif beside:
        raise refused(f"{beside[0].kind}s", "only beside a text; in a chat, put it into a message's content")
    elif isinstance(prompt, Mapping):
        messages = [prompt]
    elif isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt):
        messages = list(prompt)
    else:
        raise refused("prompt", f"{type(prompt).__name__} is none: give a text or a list of messages")
    given["messages"] = [_message(message, f"messages[{i}]", files) for i, message in enumerate(messages)]
    speech, voice = given.pop("speech", None), given.pop("voice", None)
    if speech is not None and "modalities" in given:
        raise refused("speech", "only one of speech and modalities")
    if speech or (speaks_only and speech is None and "modalities" not in given):
        given["modalities"] = ["audio"] if speaks_only else ["text", "audio"]
    if voice is not None:
        given["audio"] = {"voice": voice}
    return given, files


def _beside(kind: Kind, given: Any) -> Media:
    if isinstance(given, Media):
        return given
    return audio(given) if kind == "audio" else Media(kind, given)


def _message(message: Message, place: str, files: list[tuple[str, Media, dict]]) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = content if isinstance(content, list) else [content]
    return {**message, "content": [_part(part, f"{place}.content[{i}]", files) for i, part in enumerate(parts)]}


def _part(part: Any, place: str, files: list[tuple[str, Media, dict]]) -> Any:
    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, str):
        return {"type": "text", "text": part}
    media = media_of(part, place)
    inner: dict[str, Any] = {"url": media.url or ""}
    if media.url is None:
        files.append((place, media, inner))
    return {"type": f"{media.kind}_url", f"{media.kind}_url": inner}
