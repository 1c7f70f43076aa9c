"""Turns of the thinker within one answer: which calls run here, and what all turns add up to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.hosted_tools.schema import IMAGE_TOOL
from gateway.pipeline.events import Finished
from quartet.v1 import thinker_pb2

_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


@dataclass
class Turn:
    """One answer of the thinker, as far as it has come.

    Attributes:
        text: of it.
        reasoning: the thought before it.
        pictures: calls of image_generation, by their index: arguments as the model wrote them.
        calls: the client's functions, by the thinker's index of the call: its index in what the client is told.
        end: the stages' summaries, once it has finished.
    """

    text: str = ""
    reasoning: str = ""
    pictures: dict[int, str] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    end: Finished = field(default_factory=Finished)

    @property
    def is_cut_short(self) -> bool:
        """Whether the most tokens ended it."""
        return self.end.thinker is not None and self.end.thinker.finish_reason == thinker_pb2.FINISH_REASON_LENGTH

    def take(self, delta: thinker_pb2.GenerateDelta) -> thinker_pb2.GenerateDelta:
        """Counts it in. What the client is told of it: all but the calls that run here."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        told = thinker_pb2.GenerateDelta()
        told.CopyFrom(delta)
        del told.tool_calls[:]
        for call in delta.tool_calls:
            if call.name == IMAGE_TOOL:
                self.pictures[call.index] = ""
            if call.index in self.pictures:
                self.pictures[call.index] += call.arguments_json
                continue
            own = told.tool_calls.add()
            own.CopyFrom(call)
            own.index = self.calls.setdefault(call.index, len(self.calls))
        return told


def sum_of(turns: Sequence[Turn]) -> Finished:
    """The stages' summaries of turns that have finished: tokens and frames of all together, the rest of the last."""
    ends, last = [turn.end for turn in turns], turns[-1]
    thinker = thinker_pb2.GenerateSummary()
    summaries = [end.thinker for end in ends if end.thinker is not None]
    thinker.CopyFrom(summaries[-1])
    for name in _SUMS:
        setattr(thinker, name, sum(getattr(summary, name) for summary in summaries))
    if last.pictures and not last.calls and not last.is_cut_short:
        thinker.finish_reason = thinker_pb2.FINISH_REASON_STOP
    spoken = [end.talker for end in ends if end.talker is not None]
    talker = type(spoken[-1])() if spoken else None
    if talker is not None:
        talker.CopyFrom(spoken[-1])
        talker.frames = sum(summary.frames for summary in spoken)
    code2wav = next((end.code2wav for end in reversed(ends) if end.code2wav is not None), None)
    found = {"thinker": thinker, "talker": talker, "code2wav": code2wav}
    return Finished({kind: summary for kind, summary in found.items() if summary is not None})
