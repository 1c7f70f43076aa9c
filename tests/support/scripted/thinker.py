"""A thinker that answers as its script says."""

import math
import sys
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from quartet.v1 import thinker_pb2, thinker_pb2_grpc
from services.common.errors import InvalidInput, NotFound
from services.common.rpc.status import abort
from services.thinker.delta_streams import DeltaStreams
from tests.support.scripted.script import TIMINGS, Script
from tests.support.scripted.server_info import ServerInfo

PIECES = ("Hello", ", ", "world")
MEDIUM, MEDIUM_TOKENS = 700, 3  # the placeholder of any medium, and how often the model reads it


class Thinker(thinker_pb2_grpc.ThinkerServiceServicer):
    """It has any adapter but those in a directory `missing`, whose digest is the directory's name."""

    def __init__(self, script: Script, server: ServerInfo) -> None:
        self.script, self.server, self._deltas = script, server, DeltaStreams()

    async def StreamDeltas(self, request, context):
        async for message in self._deltas.serve(request.stream_id):
            yield message

    async def Tokenize(self, request, context):
        """A token for each character; a conversation is its texts."""
        text = request.text or "".join(part.text for message in request.messages for part in message.content)
        self.script.requests.append(request)
        return thinker_pb2.TokenizeResponse(token_ids=map(ord, text), tokens=list(text) if request.wants_tokens else [])

    async def Detokenize(self, request, context):
        if max(request.token_ids, default=0) > sys.maxunicode:
            await abort(context, InvalidInput("token_ids", "is none"))
        return thinker_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def DescribeTokenizer(self, request, context):
        return thinker_pb2.DescribeTokenizerResponse(config_json='{"tokenizer_class": "Letters"}')

    async def LoadLora(self, request, context):
        if request.path == self.script.missing:
            await abort(context, InvalidInput("path", "has no adapter_config.json"))
        loras = self.server.info.thinker.loras
        is_new = request.name not in [lora.name for lora in loras]
        if is_new:
            loras.add(name=request.name, digest=request.path)
            self.server.revision += 1
        return thinker_pb2.LoadLoraResponse(is_new=is_new)

    async def UnloadLora(self, request, context):
        loras = self.server.info.thinker.loras
        kept = [lora for lora in loras if lora.name != request.name]
        if len(kept) == len(loras):
            await abort(context, NotFound(f"there is no adapter {request.name!r}"))
        del loras[:]
        loras.extend(kept)
        self.server.revision += 1
        return thinker_pb2.UnloadLoraResponse()

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        media = [p.media for m in start.messages for p in m.content] + list(start.prompt.media)
        expected = sum(each.size_bytes for each in media if not each.data)
        received = 0
        while received < expected:
            chunk = (await anext(request_iterator)).media.data
            received += len(chunk)
            self.script.media += chunk
        deltas, reason = _answer(self.script, start)
        thought = [thinker_pb2.GenerateDelta(reasoning=piece, token_ids=[9]) for piece in self.script.thought]
        summary = thinker_pb2.GenerateSummary(
            finish_reason=reason,
            prompt_tokens=10,
            cached_tokens=2,
            completion_tokens=3 + len(thought),
            reasoning_tokens=len(thought),
            timings=TIMINGS,
            token_ids_reusable=self.script.ids_reusable,
            stop=self.script.stop,
        )
        ids = _prompt_ids(start) if start.wants_prompt_token_ids else []
        places = [i for i, token_id in enumerate(ids) if token_id == MEDIUM][::MEDIUM_TOKENS]
        ranges = [
            thinker_pb2.MediaRange(kind=each.kind, offset=at, length=MEDIUM_TOKENS)
            for each, at in zip((each for each in media if each.kind), places, strict=False)
        ]
        opens_thought = bool(thought) and not start.HasField("prompt")
        prompt = thinker_pb2.PromptInfo(
            prompt_tokens=10, audio_tokens=3, image_tokens=4, token_ids=ids, media=ranges, opens_thought=opens_thought
        )
        outputs = [
            thinker_pb2.GenerateResponse(prompt=prompt),
            *(thinker_pb2.GenerateResponse(prompt_logprobs=told) for told in _prompt_logprobs(start)),
            *(thinker_pb2.GenerateResponse(prompt_scores=scores) for scores in _prompt_scores(start)),
            *(thinker_pb2.GenerateResponse(beam=beam) for beam in _beams(start, deltas)),
            *(
                thinker_pb2.GenerateResponse(delta=delta)
                for delta in (*thought, *deltas)
                if not (start.count_only or start.HasField("beams"))
            ),
            thinker_pb2.GenerateResponse(summary=summary),
        ]
        # closed here: one that a failure leaves behind would count as running until it is collected
        async with aclosing(self.script.play(start, outputs, context)) as played:
            async for output in self._deltas.redirected(played, start.deltas_to):
                yield output


def _beams(start: thinker_pb2.GenerateStart, deltas: list[thinker_pb2.GenerateDelta]) -> Iterator[Any]:
    """The first has all pieces, and each other one a piece less."""
    for i in range(start.beams.width):
        whole = thinker_pb2.GenerateDelta()
        for delta in deltas[: max(1, len(deltas) - i)]:
            whole.text += delta.text
            whole.token_ids.extend(delta.token_ids)
            whole.logprobs.extend(delta.logprobs)
        reason = thinker_pb2.FINISH_REASON_LENGTH if i else thinker_pb2.FINISH_REASON_STOP
        summary = thinker_pb2.GenerateSummary(
            finish_reason=reason, prompt_tokens=10, cached_tokens=2, completion_tokens=len(whole.token_ids)
        )
        yield thinker_pb2.GeneratedBeam(delta=whole, summary=summary)


def _answer(
    script: Script, start: thinker_pb2.GenerateStart
) -> tuple[list[thinker_pb2.GenerateDelta], thinker_pb2.FinishReason]:
    """Text, or a call of a function, and why it ends there."""
    if script.tool_call:
        return _call("call_1", "lamp", '{"on":', "true}"), thinker_pb2.FINISH_REASON_TOOL_CALLS
    reply = script.replies(start) if script.replies else []
    calls = [reply] if isinstance(reply, tuple) else script.calls
    if calls and (given := calls.pop(0)) is not None:
        called = list[thinker_pb2.GenerateDelta]()
        for index, (name, arguments) in enumerate(given if isinstance(given, list) else [given]):
            half = len(arguments) // 2
            called += _call(
                f"call_{name}_{index}" if index else f"call_{name}", name, arguments[:half], arguments[half:]
            )
            for delta in called[-3:]:
                delta.tool_calls[0].index = index
        return called, thinker_pb2.FINISH_REASON_TOOL_CALLS
    pieces = reply or script.pieces or PIECES
    deltas = [thinker_pb2.GenerateDelta(text=text, token_ids=[i]) for i, text in enumerate(pieces)]
    if script.logprobs:
        for delta in deltas:
            text, token_id = delta.text.encode(), delta.token_ids[0]
            token = delta.logprobs.add(token_id=token_id, token=delta.text, token_bytes=text, logprob=-0.5)
            token.top.add(token_id=120, token="x", token_bytes=b"x", logprob=-0.5)
    return deltas, thinker_pb2.FINISH_REASON_LENGTH if script.too_long else thinker_pb2.FINISH_REASON_STOP


def _call(call_id: str, name: str, *arguments: str, index: int = 0) -> list[thinker_pb2.GenerateDelta]:
    """A call whose arguments come in pieces."""
    calls = [thinker_pb2.ToolCallDelta(index=index, id=call_id, name=name)]
    calls += [thinker_pb2.ToolCallDelta(index=index, arguments_json=piece) for piece in arguments]
    return [thinker_pb2.GenerateDelta(token_ids=[i], tool_calls=[call]) for i, call in enumerate(calls)]


def _prompt_ids(start: thinker_pb2.GenerateStart) -> list[int]:
    """One for each character, or those of the request. A medium has several."""
    if start.prompt.token_ids.ids:
        given = start.prompt.token_ids.ids
        return [each for token_id in given for each in [token_id] * (MEDIUM_TOKENS if token_id == MEDIUM else 1)]
    parts = [part for message in start.messages for part in message.content]
    texts = [start.prompt.text, *(part.text or chr(MEDIUM) * MEDIUM_TOKENS for part in parts)]
    return list(map(ord, "".join(texts)))


def _prompt_scores(start: thinker_pb2.GenerateStart) -> Iterator[thinker_pb2.PromptScores]:
    """Of each id its negative; -inf where a row has none."""
    rows = [list(row.ids) for row in start.sampling.prompt_logprob_token_ids]
    if rows:
        columns = max(map(len, rows))
        numbers = [-float(each) for row in rows for each in row + [math.inf] * (columns - len(row))]
        yield thinker_pb2.PromptScores(columns=columns, logprobs=numbers)


def _prompt_logprobs(start: thinker_pb2.GenerateStart) -> Iterator[thinker_pb2.PromptLogprobs]:
    """A message for each character or id, likelier from one to the next."""
    if start.sampling.HasField("prompt_logprobs"):
        for i, token_id in enumerate(_prompt_ids(start)):
            token = thinker_pb2.TokenLogprob(token_id=token_id, token=chr(token_id), logprob=-1 / i if i else math.nan)
            token.rank = 2 if i else 0
            for _ in range(start.sampling.prompt_logprobs if i else 0):
                token.top.add(token_id=120, token="x", logprob=-0.125, rank=1)
            yield thinker_pb2.PromptLogprobs(tokens=[token])
