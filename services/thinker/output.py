"""An answer's way out: the engine's steps as messages to the client, and rows of tokens to the talker."""

import heapq
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from quartet.v1 import stream_pb2, thinker_pb2
from services.common.sampling_limits import WHOLE_VOCABULARY
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import TOKEN_IDS, Rows
from services.thinker.conversation import Prompt
from services.thinker.engine import RowSubscription, Step
from services.thinker.plugin.rows import Range
from services.thinker.reasoning import ThoughtParser
from services.thinker.tools import NamedToolParser, ToolCallParser
from services.thinker.words import BLANK

if TYPE_CHECKING:
    from vllm.logprobs import Logprob

_UNBOUNDED = 2**62
_LOGPROBS_A_MESSAGE = 10_752  # some 0.5 MB


class RowForwarder:
    """Fills `stream` for one request.

    Token ids go out as they are sampled. Rows of an output position are held until its token went out: rows of the
    terminating token, and of what the engine computed ahead, never go.

    Args:
        opening_id: token that opens a call of a tool, which is not spoken; None: there are none.

    Attributes:
        subscription: what the engine is to send; None: the consumer wants token ids only.
    """

    def __init__(
        self,
        stream: OutputStream,
        prompt: Prompt,
        selections: Sequence[stream_pb2.RowSelection],
        opening_id: int | None,
    ) -> None:
        self._opening_id = opening_id
        self._stream = stream
        self._end = len(prompt.token_ids)
        self._held: list[Rows] = []
        self._closed = False
        ranges = {each.name: _ranges(each.positions, prompt) for each in selections if each.name != TOKEN_IDS}
        self.subscription = RowSubscription(ranges, self._receive) if ranges else None
        stream.start(self._end)
        self._put_tokens(0, prompt.token_ids)

    def add(self, step: Step) -> None:
        """Passes a step's tokens on, up to a call of a tool and without the token that ended the answer."""
        token_ids = step.token_ids[:-1] if step.finish_reason == "stop" else step.token_ids
        if self._opening_id in token_ids:
            self._add_tokens(token_ids[: token_ids.index(self._opening_id)])
            self.close()
        else:
            self._add_tokens(token_ids)

    def _add_tokens(self, token_ids: Sequence[int]) -> None:
        if self._closed or not token_ids:
            return
        self._put_tokens(self._end, token_ids)
        self._end += len(token_ids)
        held, self._held = self._held, []
        for rows in held:
            self._receive(rows)

    def close(self) -> None:
        """No later token is for the consumer."""
        self._closed = True

    def finish(self) -> None:
        """All rows of the request came."""
        self._stream.finish(self._end)

    def _put_tokens(self, first_position: int, token_ids: Sequence[int]) -> None:
        self._stream.put([Rows(TOKEN_IDS, first_position, torch.tensor(token_ids, dtype=torch.int32))])

    def _receive(self, rows: Rows) -> None:
        fitting = max(0, min(len(rows.tensor), self._end - rows.first_position))
        if fitting:
            self._stream.put([rows.part(0, fitting)])
        if fitting < len(rows.tensor) and not self._closed:
            self._held.append(rows.part(fitting, len(rows.tensor)))


def _ranges(positions: stream_pb2.Positions, prompt: Prompt) -> list[Range]:
    prompt_end = len(prompt.token_ids)
    of_prompt, of_output = (0, prompt_end), (prompt_end, _UNBOUNDED)
    ranges = {
        stream_pb2.POSITIONS_PROMPT_MULTIMODAL: prompt.multimodal,
        stream_pb2.POSITIONS_PROMPT: [of_prompt],
        stream_pb2.POSITIONS_OUTPUT: [of_output],
    }
    return ranges.get(positions, [of_prompt, of_output])


# A byte-level BPE vocabulary spells bytes as printable characters (GPT-2); one of words has bytes as <0x0A>.
_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass
class DeltaWriter:
    """Turns the steps of one request into messages.

    Attributes:
        top_logprobs: alternatives to report for each token, -1: all; None: no log-probabilities were requested.
        chooses: whether all alternatives that come are reported: the request chose them.
        tool_calls: finds calls in the text; None: there are no tools.
        thought: finds the thought before the answer; None: the model has none.
        clean: leaves marks out of a text, piece by piece: takes one, and whether it is the last. None: there are none.
        token_ids: of the answer so far.
    """

    tokenizer: Any
    top_logprobs: int | None
    tool_calls: ToolCallParser | NamedToolParser | None
    thought: ThoughtParser | None = None
    chooses: bool = False
    clean: Callable[[str, bool], str] | None = None
    token_ids: list[int] = field(init=False, default_factory=list)

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        return self.tokenizer.added_tokens_decoder  # is made each time

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self.tokenizer.backend_tokenizer.decoder)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        spelled = self.tokenizer.convert_ids_to_tokens(token_id) or ""  # ids past the vocabulary fill up the matrix
        if self._is_byte_level:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, spelled))
        if byte := _BYTE.fullmatch(spelled):
            return bytes.fromhex(byte[1])
        return spelled.replace(BLANK, " ").encode()

    def prompt(self, token_ids: Sequence[int], step: Step, top: int) -> Iterator[thinker_pb2.PromptLogprobs]:
        """The log-probabilities of the prompt's `token_ids`, with `top` alternatives each, if `step` has them."""
        if not step.prompt_logprobs and len(token_ids) > 1:
            return
        message, count = thinker_pb2.PromptLogprobs(), 0
        for i, token_id in enumerate(token_ids):
            by_id = step.prompt_logprobs[i - 1] if i else {}
            token = self._logprob(token_id, by_id, len(by_id) if top == WHOLE_VOCABULARY else top)
            if count and count + 1 + len(token.top) > _LOGPROBS_A_MESSAGE:
                yield message
                message, count = thinker_pb2.PromptLogprobs(), 0
            message.tokens.append(token)
            count += 1 + len(token.top)
        yield message

    def delta(self, step: Step) -> thinker_pb2.GenerateDelta:
        """The message for `step`."""
        reasoning, text, token_ids = self._separated(step)
        parser, is_last = self.tool_calls, step.finish_reason is not None
        if self.clean is not None:
            text = self.clean(text, is_last)
        message = parser.feed(text, token_ids, is_last) if parser else thinker_pb2.GenerateDelta(text=text)
        message.reasoning = reasoning
        message.token_ids.extend(step.token_ids)
        self.token_ids += step.token_ids
        if self.top_logprobs is not None:
            for token_id, by_id in zip(step.token_ids, step.logprobs, strict=False):
                most = len(by_id) if self.chooses or self.top_logprobs == WHOLE_VOCABULARY else self.top_logprobs
                message.logprobs.append(self._logprob(token_id, by_id, most))
        return message

    def _separated(self, step: Step) -> tuple[str, str, list[int]]:
        """Of the step: (text of the thought, text of the answer, tokens of the answer)."""
        if self.thought is None:
            return "", step.text, step.token_ids
        reasoning, text, token_ids = self.thought.feed(step.text, step.token_ids)
        return (reasoning + self.thought.finish() if step.finish_reason else reasoning), text, token_ids

    @property
    def has_calls(self) -> bool:
        return self.tool_calls is not None and self.tool_calls.calls > 0

    @property
    def reasoning_tokens(self) -> int:
        return self.thought.tokens if self.thought else 0

    def finish_reason(self, reason: str) -> thinker_pb2.FinishReason:
        """Why the answer ended. `reason` is the engine's, "stop" or "length"."""
        if reason == "stop" and self.has_calls:
            return thinker_pb2.FINISH_REASON_TOOL_CALLS
        return getattr(thinker_pb2, f"FINISH_REASON_{reason.upper()}")

    def _place_in(self, by_id: "Mapping[int, Logprob]") -> Callable[[int], float]:
        """The order of alternatives. The ranks of chosen ones are their places in the request."""
        if self.chooses:
            return lambda token_id: -by_id[token_id].logprob
        return lambda token_id: by_id[token_id].rank or 0

    def _logprob(self, token_id: int, by_id: "Mapping[int, Logprob]", alternatives: int) -> thinker_pb2.TokenLogprob:
        token_bytes, own = self._bytes_of(token_id), by_id.get(token_id)
        # vLLM has the sampled token among the alternatives, even if it is less likely than those requested
        best = heapq.nsmallest(alternatives, by_id, key=self._place_in(by_id))
        return thinker_pb2.TokenLogprob(
            token_id=token_id,
            token=token_bytes.decode(errors="replace"),
            token_bytes=token_bytes,
            logprob=own.logprob if own else math.nan,
            rank=own.rank if own else None,
            top=[self._logprob(alternative, by_id, 0) for alternative in best],
        )
