"""Beam search: of the answers that a search keeps open, token by token, the likeliest."""

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput, require
from services.common.sampling_limits import BEAMS, LENGTH_PENALTY, WHOLE_VOCABULARY
from services.thinker.conversation import Prompt
from services.thinker.engine import Step, ThinkerEngine

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest

Logprobs = Mapping[int, "Logprob"]
# Parts of a request that a search does not have.
_OF_DRAWN_ANSWERS = (
    *("logprob_token_ids", "prompt_logprob_token_ids"),
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
)


@dataclass(frozen=True, eq=False)
class Beam:
    """An answer so far: a token after another beam.

    Attributes:
        logprob: the sum over its tokens.
        length: in tokens, without one that ended it.
        by_id: log-probabilities of the token and its alternatives.
        before: None: it has no token yet.
    """

    logprob: float = 0.0
    length: int = 0
    has_ended: bool = False
    token_id: int = -1
    by_id: Logprobs = field(default_factory=dict)
    before: "Beam | None" = None

    def after(self, token_id: int, by_id: Logprobs, ends: bool) -> "Beam":
        length = self.length + (not ends)
        return Beam(self.logprob + by_id[token_id].logprob, length, ends, token_id, by_id, self)

    def path(self) -> list["Beam"]:
        """The beams that it has been, from its first token on."""
        path, beam = list[Beam](), self
        while beam.before is not None:
            path.append(beam)
            beam = beam.before
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        return [beam.token_id for beam in self.path()]


@dataclass(frozen=True)
class Search:
    """How beams are found, as vLLM's server finds them.

    Attributes:
        width: beams that stay open, and that are found.
        length_penalty: a beam's score is its logprob by its length, prompt included, to this power.
        prompt_tokens: of the prompt.
        most: tokens of a beam.
        ends: ids that end a beam.
    """

    width: int
    length_penalty: float
    prompt_tokens: int
    most: int
    ends: frozenset[int]

    def score(self, beam: Beam) -> float:
        return beam.logprob / max(1, self.prompt_tokens + beam.length) ** self.length_penalty

    async def run(self, look: Callable[[Sequence[Beam]], Awaitable[Sequence[Logprobs]]]) -> list[Beam]:
        """The best beams, best first. It ends when no open one scores better than `width` that have ended.

        Args:
            look: the next token's alternatives after each beam, at least twice `width`, by token id.
        """
        beams, ended = [Beam()], list[Beam]()
        for _ in range(self.most):
            longer = list[Beam]()
            for beam, by_id in zip(beams, await look(beams), strict=True):
                longer += self._longer(beam, by_id)
            ended = self._best([*ended, *(beam for beam in longer if beam.has_ended)])
            beams = heapq.nlargest(self.width, (each for each in longer if not each.has_ended), lambda b: b.logprob)
            if not beams or (len(ended) == self.width and self.score(beams[0]) <= self.score(ended[-1])):
                break
        return self._best([*ended, *beams])

    def _longer(self, beam: Beam, by_id: Logprobs) -> list[Beam]:
        likeliest = heapq.nsmallest(2 * self.width, by_id, key=lambda token_id: by_id[token_id].rank or 0)
        possible = [token_id for token_id in likeliest if by_id[token_id].logprob > -math.inf]
        return [beam.after(token_id, by_id, token_id in self.ends) for token_id in possible]

    def _best(self, beams: Sequence[Beam]) -> list[Beam]:
        return heapq.nlargest(self.width, beams, self.score)


def refuse(start: thinker_pb2.GenerateStart) -> None:
    """Raises InvalidInput, which names the field: the request asks for beams, and for what they do not have."""
    require(start.beams.width in BEAMS, "beams.width", f"must be {BEAMS}, not {start.beams.width}")
    if start.beams.length_penalty not in LENGTH_PENALTY:
        raise InvalidInput("beams.length_penalty", f"must be {LENGTH_PENALTY}, not {start.beams.length_penalty:g}")
    reason = "cannot be beside beams; leave it out"
    for name in ("output_stream_id", "tools", "count_only"):
        require(not getattr(start, name), name, reason)
    require(start.sampling.top_logprobs != WHOLE_VOCABULARY, "sampling.top_logprobs", f"of -1 {reason}")
    structure = start.sampling.WhichOneof("structure")
    for name in (*_OF_DRAWN_ANSWERS, *((structure,) if structure else ())):
        require(not getattr(start.sampling, name), f"sampling.{name}", reason)
    for name in ("prompt_logprobs", "thinking_token_budget"):
        require(not start.sampling.HasField(name), f"sampling.{name}", reason)


def params_of(start: thinker_pb2.GenerateStart) -> "SamplingParams":
    """vLLM's parameters for the next token after a beam."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    most = max(2 * start.beams.width, start.sampling.top_logprobs)
    return SamplingParams(
        temperature=0, max_tokens=1, logprobs=most, detokenize=False, output_kind=RequestOutputKind.DELTA
    )


@dataclass
class BeamRun:
    """The search of one request. `params` are those of `params_of`, validated.

    Attributes:
        first: the engine's first step.
    """

    engine: ThinkerEngine
    start: thinker_pb2.GenerateStart
    prompt: Prompt
    params: "SamplingParams"
    lora: "LoRARequest | None"
    first: Step | None = None

    async def beams(self) -> list[Beam]:
        """Raises as `ThinkerEngine.generate`. Cancelling ends what the engine does for it."""
        sampling, read = self.start.sampling, len(self.prompt.token_ids)
        room = self.engine.max_context_tokens - read
        most = min(sampling.max_tokens, room) if sampling.HasField("max_tokens") else room
        ends = frozenset[int]() if sampling.ignore_eos else self.engine.end_ids
        penalty = self.start.beams.length_penalty if self.start.beams.HasField("length_penalty") else 1.0
        return await Search(self.start.beams.width, penalty, read, most, ends).run(self._look)

    async def _look(self, beams: Sequence[Beam]) -> list[Logprobs]:
        tasks = [asyncio.ensure_future(self._next(i, beam)) for i, beam in enumerate(beams)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self, index: int, beam: Beam) -> Logprobs:
        token_ids = [*self.prompt.token_ids, *beam.token_ids]
        prompt = replace(
            self.prompt, token_ids=token_ids, engine_input={**self.prompt.engine_input, "prompt_token_ids": token_ids}
        )
        request_id = f"{self.start.request_id}-{beam.length}-{index}"
        logprobs: Logprobs = {}
        async for step in self.engine.generate(
            request_id, prompt, self.params, priority=self.start.priority, lora=self.lora
        ):
            self.first = self.first or step
            logprobs = next(iter(step.logprobs), logprobs)
        return logprobs
