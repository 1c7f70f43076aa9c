"""The job that answers a conversation."""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.answers.answer_speech import AnswerSpeech, answer_speech
from gateway.answers.gateway import Gateway
from gateway.answers.prompt_messages import MAX_START_BYTES, attach, fill_tools
from gateway.answers.request import Tool
from gateway.answers.sampling import talker_sampling
from gateway.answers.tools.calls import HostedTool
from gateway.answers.tools.registry import tool_of
from gateway.answers.transcription.sound_transcripts import hears
from gateway.dialects.realtime.audio import MODEL_RATE_HZ
from gateway.dialects.realtime.conversation.items import Item, SampledAnswer
from gateway.dialects.realtime.settings.session import RetentionRatio, Session
from gateway.errors import ApiError
from gateway.media.check import MediaFile, load_media
from gateway.media.encode import BYTES_PER_SAMPLE, encode_audio
from gateway.pipeline.run import Job
from gateway.pipeline.sampling import TalkerSampling
from quartet.v1 import media_pb2, thinker_pb2

_KEPT_PART = 0.75
# Of the spectrograms that models hear.
_HOP_SAMPLES = MODEL_RATE_HZ // 100
_WINDOW_SAMPLES = MODEL_RATE_HZ // 40

# A message's media, which is empty, and its file.
_Media = tuple[media_pb2.Media, bytes]


@dataclass(frozen=True)
class Prompt:
    """The prompt of one turn.

    Attributes:
        items: oldest first.
        conversation_id: routes all turns to one thinker, for its prefix cache; "": any thinker.
    """

    session: Session
    items: Sequence[Item]
    conversation_id: str = ""

    def shortened(self) -> "Prompt | None":
        """Without the oldest items, by default a quarter, and without outputs whose call is left out. None: it cannot
        be shorter, or must not be."""
        truncation = self.session.truncation
        if truncation == "disabled" or len(self.items) < 2:
            return None
        kept_part = truncation.ratio if isinstance(truncation, RetentionRatio) else _KEPT_PART
        begin = min(max(1, math.ceil(len(self.items) * (1 - kept_part))), len(self.items) - 1)
        while begin < len(self.items) - 1 and self.items[begin].kind == "function_call_output":
            begin += 1
        return replace(self, items=self.items[begin:])

    def retained(self, tokens: int) -> "Prompt":
        """The prompt that the next turn begins with: shorter if `tokens` exceed the session's limit."""
        truncation = self.session.truncation
        limit = truncation.post_instructions if isinstance(truncation, RetentionRatio) else None
        return self if limit is None or tokens <= limit else self.shortened() or self

    async def speech(self, gateway: Gateway, owner: str | None) -> AnswerSpeech:
        """How the answer is spoken, if it is. Raises ApiError: 400, there is no such voice."""
        if not self.speaks(gateway):
            return AnswerSpeech({})
        sampling = talker_sampling(gateway, TalkerSampling(), None)
        return await answer_speech(gateway, self.session.voice, sampling, owner, "session.audio.output.voice")

    def job(
        self,
        gateway: Gateway,
        request_id: str,
        hosted: Sequence[Tool] = (),
        is_first: bool = True,
        spoken: AnswerSpeech = AnswerSpeech({}),
    ) -> Job:
        """The job of a turn. Blocking.

        Args:
            hosted: tools that run here, if they are offered.
            is_first: whether the session's tool_choice counts.
            spoken: see `speech`.

        Raises:
            ApiError: 400, the prompt is empty or too long.
        """
        start = thinker_pb2.GenerateStart(sampling=self._sampling(gateway), lora=self.session.lora)
        thinker = gateway.pipeline.info("thinker")
        senses = {"audio"} if hears(gateway) else set[str]()
        senses |= {"image"} if thinker is not None and "image" in thinker.input_modalities else set()
        if instructions := self.session.response_config.instructions:
            start.messages.add(role="system").content.add(text=instructions)
        late = attach([media for turn in _turns(self.items) for media in _fill(start, *turn, senses)])
        self._fill_tools(start, hosted, is_first)
        if not start.messages:
            raise ApiError(400, "there is nothing to answer: no instructions, and no items", None, "empty_conversation")
        if start.ByteSize() > MAX_START_BYTES:
            reason = "the conversation is longer than a request can be; delete items"
            raise ApiError(400, reason, None, "context_length_exceeded")
        starts, most_bytes = {"thinker": start, **spoken.starts}, spoken.utterance_bytes
        return Job(request_id, starts, late, conversation_id=self.conversation_id, utterance_bytes=most_bytes)

    def speaks(self, gateway: Gateway) -> bool:
        return "audio" in self.session.modalities and gateway.pipeline.config.outputs.speech is not None

    def _sampling(self, gateway: Gateway) -> thinker_pb2.SamplingParameters:
        assert gateway.pipeline.config.thinker is not None, "a session needs a thinker"
        values = gateway.pipeline.config.thinker.sampling.model_dump(exclude_none=True)
        if (most := self.session.max_output_tokens) is not None:
            values["max_tokens"] = most
        return thinker_pb2.SamplingParameters(**values)

    def _fill_tools(self, start: thinker_pb2.GenerateStart, hosted: Sequence[Tool], with_choice: bool) -> None:
        for tool in self.session.tools:
            parameters = "" if tool.parameters is None else json.dumps(tool.parameters, ensure_ascii=False)
            start.tools.add(name=tool.name, description=tool.description or "", parameters_json=parameters)
        fill_tools(start, hosted, None)
        if start.tools and with_choice:
            choice, name = self.session.tool_choice
            start.tool_choice.CopyFrom(thinker_pb2.ToolChoice(mode=f"MODE_{choice.upper()}", name=name or ""))


def _turns(items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], SampledAnswer | None]]:
    """The items of each answer that is there as it was sampled; each other item alone."""
    begin = 0
    while begin < len(items):
        sampled = items[begin].sampled
        turn = items[begin : begin + len(sampled.item_ids)] if sampled else ()
        if tuple(item.id for item in turn if item.sampled is sampled) != (sampled and sampled.item_ids):
            turn, sampled = items[begin : begin + 1], None
        yield turn, sampled
        begin += len(turn)


def _fill(
    start: thinker_pb2.GenerateStart, turn: Sequence[Item], sampled: SampledAnswer | None, senses: Collection[str]
) -> list[_Media]:
    """Adds a turn's message. `senses`: the media that the thinker is sent, of "audio" and "image"."""
    item = turn[0]
    if sampled:
        start.messages.add(role="assistant", token_ids=sampled.token_ids)
    elif item.kind == "function_call":
        if item.members["status"] == "completed":
            name, arguments = item.members["name"], item.members["arguments"] or "{}"
            _assistant(start).tool_calls.add(id=item.members["call_id"], name=name, arguments_json=arguments)
    elif item.kind == "function_call_output":
        start.messages.add(role="tool", tool_call_id=item.members["call_id"]).content.add(text=item.members["output"])
    elif (tool := tool_of(item.kind)) is not None:
        return _fill_call(start, item, tool, "image" in senses)
    elif item.role == "assistant":
        if text := "".join(part.get("text") or part.get("transcript") or "" for part in item.content):
            start.messages.add(role="assistant").content.add(text=text)
    else:
        return _fill_input(start.messages.add(role=item.role), item, "audio" in senses)
    return []


def _fill_call(start: thinker_pb2.GenerateStart, item: Item, tool: type[HostedTool], sees_images: bool) -> list[_Media]:
    """Adds a call of a tool that ran here, and its result."""
    arguments, is_made = tool.arguments(item.members), item.members["status"] == "completed"
    _assistant(start).tool_calls.add(id=item.id, name=tool.name, arguments_json=arguments)
    result = start.messages.add(role="tool", tool_call_id=item.id)
    result.content.add(text=tool.result(item.members, is_made, "it was cancelled"))
    if not item.images or not sees_images:
        return []
    media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_IMAGE, field=item.id)
    return [(result.content.add(media=media).media, item.images[0])]


def _fill_input(result: thinker_pb2.ChatMessage, item: Item, hears: bool) -> list[_Media]:
    """Fills an input message."""
    pending = []
    for index, part in enumerate(item.content):
        field = f"{item.id}.content[{index}]"
        if part["type"] == "input_text":
            result.content.add(text=part["text"])
        elif part["type"] == "input_audio" and (not hears or index not in item.sound):  # some sessions keep no sound
            result.content.add(text=part["transcript"] or "")
        elif part["type"] == "input_audio":
            media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_AUDIO, field=field)
            file = encode_audio(_padded(item.sound[index]), MODEL_RATE_HZ, "wav")
            pending.append((result.content.add(media=media).media, file))
        else:
            media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_IMAGE, field=field)
            pending.append((result.content.add(media=media).media, item.images[index]))
    return pending


def _padded(pcm16: bytes) -> bytes:
    """Pads to whole hops of a spectrogram with a silent last window: a longer sound in a later turn then does not
    change the model's input for this one, and the prefix cache stays valid."""
    samples = len(pcm16) // BYTES_PER_SAMPLE
    whole = -(-(samples + _WINDOW_SAMPLES) // _HOP_SAMPLES) * _HOP_SAMPLES
    return pcm16.ljust(whole * BYTES_PER_SAMPLE, b"\0")


def _assistant(start: thinker_pb2.GenerateStart) -> thinker_pb2.ChatMessage:
    """The last message if it is the assistant's and has no token ids, else a new one."""
    if start.messages and start.messages[-1].role == "assistant" and not start.messages[-1].token_ids:
        return start.messages[-1]
    return start.messages.add(role="assistant")


async def load_images(gateway: Gateway, item: Item, param: str) -> None:
    files = {
        index: MediaFile(f"{param}.content[{index}].image_url", "image", part["image_url"])
        for index, part in enumerate(item.content)
        if part["type"] == "input_image"
    }
    await load_media(gateway.fetcher, list(files.values()))
    item.images.update((index, file.content) for index, file in files.items())
