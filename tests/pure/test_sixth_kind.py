"""A further kind of stage in the gateway: a row of `KINDS`, here a captioner that reads a thinker and a code2wav.

Its start messages are made here: a real one would need fields that the protos of the stages do not have yet.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gateway.pipeline import config, kinds
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.events import Finished, PromptRead, TextDelta, TextEnd
from gateway.pipeline.kinds import KINDS, StageKind
from gateway.pipeline.links import Links, link_in_line
from gateway.pipeline.replica import Replica
from gateway.pipeline.run import Job, linked_starts, run
from gateway.pipeline.stage import mark_incompatible
from quartet.v1 import code2wav_pb2, server_info_pb2, stream_pb2, talker_pb2, thinker_pb2
from services.common.rpc.channels import Channels

Words = Sequence[str]


def _message(name: str, **fields: tuple[int, bool]) -> type[Any]:
    """A message type with these fields: (type, whether it is repeated)."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"sixth/{name}.proto", package="sixth", syntax="proto3")
    file.dependency.append(stream_pb2.DESCRIPTOR.name)
    message = file.message_type.add(name=name)
    for number, (field_name, (kind, repeated)) in enumerate(fields.items(), 1):
        label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
        added = message.field.add(name=field_name, number=number, type=kind, label=label)
        if kind == field.TYPE_MESSAGE:
            added.type_name = ".quartet.v1.StreamSource"
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"sixth.{name}"))


_STRING, _SOURCE = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
CaptionStart = _message("CaptionStart", request_id=(_STRING, False), sources=(_SOURCE, True))
ReadStart = _message(
    "ReadStart",
    request_id=(_STRING, False),
    source=(_SOURCE, False),
    output_stream_ids=(_STRING, True),
    lora=(_STRING, False),
)


@dataclass(frozen=True)
class CaptionWords:
    words: Words


@dataclass
class CaptionResponse:
    """`words`, or the summary."""

    words: Words = ()
    summary: str = ""

    def HasField(self, name: str) -> bool:
        return bool(getattr(self, name))


class CaptionerStage(config._Stage):
    kind: Literal["captioner"]
    source: list[str]


def link_captioner(start: Any, links: Links) -> None:
    start.sources.extend(source.stream for source in links.sources)


def link_to_readers(start: Any, links: Links) -> None:
    """Links a stage whose start message names as many streams as there are readers."""
    start.output_stream_ids.extend(links.stream_ids)
    for source in links.sources:
        start.source.CopyFrom(source.stream)


CAPTIONER = StageKind(
    "captioner",
    SimpleNamespace,
    "Caption",
    reads=("thinker", "code2wav"),
    link=link_captioner,
    event=lambda start, response: CaptionWords(response.words) if response.words else None,  # pyright: ignore
)
WIDER = {  # these kinds as they are, but for a start message that names several streams
    kind: replace(KINDS[kind], link=link_to_readers) for kind in ("thinker", "talker", "code2wav")
}


class ScriptedReplica:
    """A replica that answers every call with `responses`."""

    faults, serving, info = 0, True, None

    def __init__(self, kind: str, responses: Sequence[Any]) -> None:
        self.kind, self.responses, self.starts = kind, responses, list[Any]()

    def source(self, stream_id: str) -> stream_pb2.StreamSource:
        return stream_pb2.StreamSource(address=f"{self.kind}:1", stream_id=stream_id)

    @contextmanager
    def request(self) -> Iterator[None]:
        yield

    def call(self, start: Any, *_: Any) -> Any:
        self.starts.append(start)
        return ScriptedCall(self.responses)


class ScriptedCall:
    def __init__(self, responses: Sequence[Any]) -> None:
        self._responses = responses

    async def __aiter__(self) -> AsyncIterator[Any]:
        for response in self._responses:
            yield response

    def cancel(self) -> None:
        pass


TEXT = thinker_pb2.GenerateDelta(text="Hi")
ANSWERS: Mapping[str, Sequence[Any]] = {
    "thinker": [
        thinker_pb2.GenerateResponse(prompt=thinker_pb2.PromptInfo(prompt_tokens=1)),
        thinker_pb2.GenerateResponse(delta=TEXT),
        thinker_pb2.GenerateResponse(summary=thinker_pb2.GenerateSummary(prompt_tokens=1)),
    ],
    "talker": [talker_pb2.SpeakResponse(summary=talker_pb2.SpeakSummary(frames=1))],
    "code2wav": [code2wav_pb2.DecodeResponse(summary=code2wav_pb2.DecodeSummary(frames=1))],
    "captioner": [CaptionResponse(words=["Hi"]), CaptionResponse(summary="one word")],
}
SOURCES = {"talker": ["thinker"], "code2wav": ["talker"], "captioner": ["thinker", "code2wav"]}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stages of an answer with a captioner, each with one scripted replica."""
    monkeypatch.setitem(kinds.KINDS, "captioner", CAPTIONER)
    by_kind: dict[str, Any] = {}
    for kind, responses in ANSWERS.items():
        replica = ScriptedReplica(kind, responses)
        by_kind[kind] = SimpleNamespace(
            name=kind,
            kind=kind,
            reads_text=False,
            sources=[by_kind[source] for source in SOURCES.get(kind, ())],
            replicas={"one": replica},
            require_serving=lambda: None,
            choose=lambda *_, replica=replica: replica,
        )
    return list(by_kind.values())


async def test_a_kind_with_two_sources_is_linked_called_and_read_by_its_row(monkeypatch, stages):
    for kind, row in WIDER.items():
        monkeypatch.setitem(kinds.KINDS, kind, row)
    starts = {kind: ReadStart() for kind in WIDER} | {"captioner": CaptionStart()}
    pipeline: Any = SimpleNamespace(answer=stages)
    events: list[Any] = [event async for _, event in run(pipeline, [Job("r", starts, conversation_id="c")], 60)]

    assert [type(event) for event in events if not isinstance(event, CaptionWords)] == [
        PromptRead,
        TextDelta,
        TextEnd,
        Finished,
    ]
    assert CaptionWords(["Hi"]) in events
    assert events[-1].summaries.keys() == ANSWERS.keys()
    assert events[-1].summaries["captioner"] == "one word"
    sent = {stage.kind: stage.replicas["one"].starts[0] for stage in stages}
    assert [source.address for source in sent["captioner"].sources] == ["thinker:1", "code2wav:1"]
    to_talker, to_captioner = sent["thinker"].output_stream_ids
    assert to_talker == sent["talker"].source.stream_id
    assert to_captioner == sent["captioner"].sources[0].stream_id
    assert list(sent["code2wav"].output_stream_ids) == [sent["captioner"].sources[1].stream_id]


def test_the_protos_of_today_do_not_let_a_second_stage_read(stages):
    """Here it ends: GenerateStart names one stream, DecodeRequest none."""
    starts = {
        "thinker": thinker_pb2.GenerateStart(),
        "talker": talker_pb2.SpeakStart(),
        "code2wav": code2wav_pb2.DecodeRequest(),
        "captioner": CaptionStart(),
    }
    leases: Any = [SimpleNamespace(stage=stage, replica=stage.replicas["one"]) for stage in stages]
    with pytest.raises(NotImplementedError, match="a GenerateStart cannot name 0 sources and 2 readers"):
        linked_starts("r", starts, leases)
    with pytest.raises(NotImplementedError, match="a DecodeRequest cannot name 0 sources and 1 readers"):
        link_in_line(code2wav_pb2.DecodeRequest(), Links(stream_ids=["a"]))


def test_a_pipeline_file_may_name_two_sources(stages):
    address = "h:1"
    found: dict[str, Any] = {
        "a": config.ThinkerStage(kind="thinker", address=address),
        "b": config.TalkerStage(kind="talker", source="a", address=address),
        "c": config.Code2WavStage(kind="code2wav", source="b", address=address),
        "d": CaptionerStage(kind="captioner", source=["a", "c"], address=address),
    }
    pipeline = PipelineConfig.model_construct(stages=found)
    assert pipeline.chain("d") == ["a", "b", "c", "d"]
    assert config._edge_fault(pipeline, "d", "a") is None
    assert (
        config._edge_fault(pipeline, "d", "b") == "a captioner reads from a thinker or a code2wav, but 'b' is a talker"
    )
    found["a"] = config.TalkerStage(kind="talker", source="d", address=address)
    assert config._edge_fault(pipeline, "d", "c") == "a cycle (d -> c -> b -> a -> d): a stage cannot read from itself"


async def test_a_stage_must_have_the_checkpoint_of_each_of_its_sources():
    def replica(stage: str, digest: str) -> Any:
        found = Replica(stage, "thinker", "h:1", "", Channels(), lambda: None)
        found.health, found.down_since = "SERVING", None
        found.info = server_info_pb2.GetServerInfoResponse(checkpoint_digest=digest)
        return found

    same, other = replica("captioner", "x"), replica("captioner", "y")
    mark_incompatible([same, other], None, [replica("thinker", "x"), replica("code2wav", "x")])
    assert same.refusal is None
    assert "than stage thinker" in other.refusal
    mark_incompatible([same], None, [replica("thinker", "x"), replica("code2wav", "y")])
    assert "than stage code2wav" in (same.refusal or "")
