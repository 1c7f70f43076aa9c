"""Beam search: one run of the thinker writes all answers to a prompt."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from gateway.access.places import Places
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.errors import invalid
from gateway.pipeline.events import Event, Finished, TextDelta, TextEnd, WholeBeam
from gateway.pipeline.run import Job, run
from gateway.validation import Strict
from quartet.v1 import thinker_pb2
from services.common import sampling_limits as limits

MAX_BEAMS = int(limits.BEAMS.most)
# Members of requests that a search does not heed; how tokens are drawn (temperature, top_p, seed, ...) changes nothing.
_OF_DRAWN_ANSWERS = (
    *("stream", "tools", "structured_outputs", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids"),
    *("bad_words", "min_tokens", "presence_penalty", "frequency_penalty", "include_stop_str_in_output"),
    "logprob_token_ids",
)
_OF_PROMPTS = ("prompt_logprobs", "of_prompt", "thinking_token_budget")  # 0 says something


class BeamMembers(Strict):
    """Of requests for text."""

    use_beam_search: bool | None = Field(
        default=None, description=f"the n likeliest answers that a search finds; n is at most {MAX_BEAMS}"
    )
    length_penalty: Annotated[float, Field(ge=limits.LENGTH_PENALTY.least, le=limits.LENGTH_PENALTY.most)] | None = (
        Field(default=None, description="of use_beam_search: above 0 favours long answers; default: 1")
    )

    def check_beams(self, count: int) -> None:
        """Raises ApiError: 400, the request contradicts itself; `count` answers are wanted."""
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise invalid("length_penalty", "only with use_beam_search: true")
            return
        if count > MAX_BEAMS:
            raise invalid("n", f"at most {MAX_BEAMS} with use_beam_search")
        for name in (*_OF_DRAWN_ANSWERS, *_OF_PROMPTS):
            value = getattr(self, name, None)
            if value or (name in _OF_PROMPTS and value is not None):
                name = "echo" if name == "of_prompt" else name
                raise invalid(name, "cannot be beside use_beam_search; leave one of the two out")
        if getattr(self, "repetition_penalty", None) not in (None, 1):
            raise invalid("repetition_penalty", "cannot be beside use_beam_search; leave one of the two out")
        for name in ("top_logprobs", "logprobs"):
            if getattr(self, name, None) == limits.WHOLE_VOCABULARY:
                raise invalid(name, "must be 0 to 20 beside use_beam_search")
        wanted: Any = getattr(self, "response_format", None)
        if wanted is not None and getattr(wanted, "type", "text") != "text":
            raise invalid("response_format", "cannot be beside use_beam_search; leave one of the two out")

    def search(self, start: thinker_pb2.GenerateStart, count: int) -> None:
        """Asks for `count` beams, if they are wanted."""
        if self.use_beam_search:
            start.beams.width = count
            if self.length_penalty is not None:
                start.beams.length_penalty = self.length_penalty


async def beams(
    gateway: Gateway, jobs: Sequence[Job], width: int, meter: Meter
) -> AsyncGenerator[tuple[int, Event], None]:
    """Runs `jobs`, and yields their events as those of `width` answers each, which hold places as other answers do.

    Raises ApiError or StageError.
    """
    places = Places(gateway.admission, meter.key, width)
    found: list[list[WholeBeam]] = [[] for _ in jobs]
    with meter.at_once(width, "n"):
        async with aclosing(run(gateway.pipeline, jobs, meter.left_s, places.take)) as events:
            async for job, event in events:
                answers = range(job * width, (job + 1) * width)
                match event:
                    case WholeBeam(delta) if len(found[job]) < width:
                        yield answers[len(found[job])], TextDelta(delta)
                        found[job].append(event)
                    case Finished(summaries):
                        for index, beam in zip(answers, found[job], strict=False):
                            beam.summary.timings.CopyFrom(summaries["thinker"].timings)
                            yield index, Finished({**summaries, "thinker": beam.summary})
                    case TextEnd():
                        pass
                    case _:
                        for index in answers:
                            yield index, event
