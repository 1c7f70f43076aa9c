"""One turn of the thinker, and the events of an answer that has several."""

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from gateway.answers.tools.events import ToolEvent
from gateway.pipeline.events import Event, Finished
from quartet.v1 import thinker_pb2

# Fields that add up over the turns, by stage.
_SUMS = {
    "thinker": ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"),
    "talker": ("frames",),
}


@dataclass
class ToolCall:
    """A call of a tool that runs here. `arguments`: JSON as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class NextTurn:
    """The thinker goes on. `tokens`: of the prompt that it read for that."""

    tokens: thinker_pb2.PromptInfo


@dataclass(frozen=True)
class TurnEnd:
    """Tools run next, or the answer is complete."""

    turn: "Turn"


@dataclass(frozen=True)
class ToolStart:
    """A tool's events follow."""

    call: ToolCall


AnswerEvent = Event | NextTurn | TurnEnd | ToolStart | ToolEvent


@dataclass
class Turn:
    """One turn, as far as it has come.

    Attributes:
        tools: names of the tools that run here.
        hosted: calls of tools that run here, by the thinker's index of the call.
        calls: indices of the client's functions in what the client gets, by the thinker's index of the call.
    """

    tools: Collection[str]
    text: str = ""
    reasoning: str = ""
    hosted: dict[int, ToolCall] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    end: Finished = field(default_factory=Finished)

    @property
    def is_cut_short(self) -> bool:
        """Whether the token limit ended it."""
        return self.end.thinker is not None and self.end.thinker.finish_reason == thinker_pb2.FINISH_REASON_LENGTH

    @property
    def has_output(self) -> bool:
        """Whether the client has got anything of it."""
        return bool(self.text or self.reasoning or self.calls)

    def take(self, delta: thinker_pb2.GenerateDelta) -> thinker_pb2.GenerateDelta:
        """Adds the delta. Returns it without the calls that run here."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        if not delta.tool_calls:
            return delta
        own = thinker_pb2.GenerateDelta()
        own.CopyFrom(delta)
        del own.tool_calls[:]
        for call in delta.tool_calls:
            if call.name in self.tools:
                self.hosted[call.index] = ToolCall(call.name)
            if call.index in self.hosted:
                self.hosted[call.index].arguments += call.arguments_json
                continue
            added = own.tool_calls.add()
            added.CopyFrom(call)
            added.index = self.calls.setdefault(call.index, len(self.calls))
        return own


def sum_of(turns: Sequence[Turn]) -> Finished:
    """Summaries of all turns: the sums of tokens and frames, the rest of the last turn."""
    ends, last = [turn.end.summaries for turn in turns], turns[-1]
    total = deepcopy({kind: summary for end in ends for kind, summary in end.items()})
    for kind, names in _SUMS.items():
        summaries = [end[kind] for end in ends if kind in end]
        for name in names if summaries else ():
            setattr(total[kind], name, sum(getattr(summary, name) for summary in summaries))
    if last.hosted and not last.calls and not last.is_cut_short:
        total["thinker"].finish_reason = thinker_pb2.FINISH_REASON_STOP
    return Finished(total)
