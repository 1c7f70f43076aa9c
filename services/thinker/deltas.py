"""Engine steps as GenerateDeltas."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from quartet.v1 import thinker_pb2
from services.thinker.engine import Logprob, Step
from services.thinker.tools import Parsed, ToolCallParser

_FINISH_REASONS = {
    "stop": thinker_pb2.FINISH_REASON_STOP,
    "length": thinker_pb2.FINISH_REASON_LENGTH,
}


class DeltaWriter:
    """Turns the steps of one request into messages.

    Args:
        tokenizer: the checkpoint's, for the text of single tokens.
        top_logprobs: alternatives to report for each token, or None where no log-probabilities were asked for.
        tool_calls: finds calls in the text, or None where there are no tools.
    """

    def __init__(self, tokenizer: Any, top_logprobs: int | None, tool_calls: ToolCallParser | None) -> None:
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs
        self._tool_calls = tool_calls

    def delta(self, step: Step) -> thinker_pb2.GenerateDelta:
        """The message for `step`."""
        message = thinker_pb2.GenerateDelta(text=step.text, token_ids=step.token_ids)
        if self._tool_calls:
            parsed = self._tool_calls.feed(step.text)
            message.text = parsed.text
            _add_calls(message, parsed)
            if step.finish_reason:
                message.text += self._tool_calls.finish().text
        if self._top_logprobs is not None:  # vLLM adds the sampled token to the alternatives where it is not among them
            most = 1 + self._top_logprobs
            message.logprobs.extend(self._logprob(entry[0], entry[1:most]) for entry in step.logprobs)
        return message

    def finish_reason(self, reason: str) -> thinker_pb2.FinishReason:
        """Why the answer ended, given the engine's reason."""
        if reason == "stop" and self._tool_calls and self._tool_calls.calls:
            return thinker_pb2.FINISH_REASON_TOOL_CALLS
        return _FINISH_REASONS[reason]

    def _logprob(self, entry: Logprob, top: Sequence[Logprob] = ()) -> thinker_pb2.TokenLogprob:
        token_bytes = _token_bytes(self._tokenizer, entry.token_id)
        return thinker_pb2.TokenLogprob(
            token_id=entry.token_id,
            token=token_bytes.decode(errors="replace"),
            token_bytes=token_bytes,
            logprob=entry.logprob,
            top=[self._logprob(alternative) for alternative in top],
        )


def _add_calls(message: thinker_pb2.GenerateDelta, parsed: Parsed) -> None:
    for piece in parsed.calls:
        message.tool_calls.add(index=piece.index, id=piece.id, name=piece.name, arguments_json=piece.arguments_json)


@cache
def _byte_of_character() -> dict[str, int]:
    """A byte-level BPE vocabulary spells bytes as printable characters (GPT-2)."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def _token_bytes(tokenizer: Any, token_id: int) -> bytes:
    if token_id in tokenizer.added_tokens_decoder:
        return tokenizer.added_tokens_decoder[token_id].content.encode()
    spelled = tokenizer.convert_ids_to_tokens(token_id) or ""  # ids past the vocabulary only fill up the matrix
    table = _byte_of_character()
    return bytes(table[character] for character in spelled)
