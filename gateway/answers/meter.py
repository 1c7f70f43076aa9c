"""One request's clock and counts, for its log line and the metrics."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

from prometheus_client import Histogram

from gateway import metrics
from gateway.access.api_key import ApiKey
from gateway.answers.answer import Answer, usage
from gateway.errors import ApiError
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pipeline.events import AudioDelta, PromptTokens, TextDelta
from quartet.v1 import thinker_pb2
from services.common.sampling_limits import MAX_LOGPROBS


@dataclass
class Meter:
    """One request's.

    Attributes:
        request_id: names the request in every stage.
        timeout_s: from the request's arrival to its deadline.
        log: fields of its log line, filled in.
        arrived: in `time.monotonic()`.
        key: whose limits count it; None: there are no keys.
        logprobs: that have come, alternatives included.
    """

    request_id: str
    timeout_s: float
    log: dict[str, Any] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None
    logprobs: int = 0

    @classmethod
    def of(cls, state: Any, timeout_s: float) -> Self:
        """The meter of an HTTP request: `state` has its `request_id`, `log`, `deadline` and `key`."""
        return cls(state.request_id, timeout_s, state.log, state.deadline - timeout_s, getattr(state, "key", None))

    @property
    def left_s(self) -> float:
        return max(0.0, self.arrived + self.timeout_s - time.monotonic())

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.arrived

    def charge(self, answers: int, field: str) -> None:
        """Counts a request as so many. Raises ApiError: 429, the key may not have so many now; 400, or ever."""
        if self.key is None:
            return
        try:
            self.key.charge(answers - 1, field)
        except ApiError:
            self.key.refund()  # a refused request takes nothing
            raise

    def at_once(self, answers: int, field: str) -> AbstractContextManager[None]:
        """Holds a place for each of so many, which run together. Raises ApiError: as `ApiKey.at_once`."""
        return nullcontext() if self.key is None else self.key.at_once(answers - 1, field)

    def owe(self, seconds: float) -> None:
        """Counts sound that was heard or made for the key, a begun minute as a request."""
        if self.key is not None:
            self.key.owe(seconds)

    def count_embedded(self, inputs: int, tokens: int) -> None:
        """Counts texts, or pairs, that embeddings or scores were made of, for the key, too."""
        metrics.PROMPT_TOKENS.inc(tokens)
        metrics.EMBEDDED.inc(inputs)
        self.log |= {"inputs": inputs, "prompt_tokens": tokens}
        if self.key is not None:
            self.key.owe_tokens(tokens)

    def observe(self, event: object) -> None:
        """Measures TTFT and TTFA. Raises ApiError: 400, too many log-probabilities have come."""
        if isinstance(event, TextDelta):
            if not event.is_plain and event.delta.logprobs:
                self._count_logprobs(event.delta.logprobs)
            if "ttft_ms" not in self.log and event.delta.token_ids:
                self._came(metrics.TTFT, "ttft_ms")
        elif isinstance(event, AudioDelta) and "ttfa_ms" not in self.log:
            self._came(metrics.TTFA, "ttfa_ms")
        elif isinstance(event, PromptTokens):
            self._count_logprobs(event.tokens)

    def _count_logprobs(self, tokens: Iterable[thinker_pb2.TokenLogprob]) -> None:
        self.logprobs += sum(1 + len(token.top) for token in tokens)
        if self.logprobs > MAX_LOGPROBS:
            reason = f"more than {MAX_LOGPROBS} log-probabilities; ask for fewer alternatives, or fewer texts at once"
            raise ApiError(400, reason, None, "too_many_logprobs")

    def count(self, prompt_tokens: int, text_tokens: int, frames: int | None) -> None:
        """Counts what the stages read and wrote; `frames`: None for a request without audio."""
        metrics.PROMPT_TOKENS.inc(prompt_tokens)
        metrics.TEXT_TOKENS.inc(text_tokens)
        self.log |= {"prompt_tokens": prompt_tokens, "text_tokens": text_tokens}
        if frames is not None:
            self.log["frames"] = frames

    def _came(self, metric: Histogram, name: str) -> None:
        elapsed_s = self.elapsed_s
        metric.observe(elapsed_s)
        self.log[name] = round(elapsed_s * 1000, 1)

    def count_answers(self, answers: Sequence[Answer]) -> None:
        """Counts finished answers to one prompt."""
        tokens = usage(answers)
        details = tokens["completion_tokens_details"]
        self.count(tokens["prompt_tokens"], details["text_tokens"], details["audio_tokens"])
        self.count_speech(answers)

    def count_speech(self, answers: Sequence[Answer]) -> None:
        """Measures the real-time factor of the answers that have audio."""
        for answer in answers:
            if answer.audio_bytes:
                seconds = answer.audio_bytes / BYTES_PER_SAMPLE / answer.sample_rate_hz
                metrics.spoken(seconds, self.elapsed_s)
                self.owe(seconds)
