"""The kinds of stages: what each reads, what it makes, and how it is called. One table for all who ask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quartet.v1.code2wav_pb2_grpc import Code2WavServiceStub
from quartet.v1.dit_pb2 import DitServiceGenerateRequest
from quartet.v1.dit_pb2_grpc import DitServiceStub
from quartet.v1.encoder_pb2 import EncodeRequest
from quartet.v1.encoder_pb2_grpc import EncoderServiceStub
from quartet.v1.talker_pb2 import SpeakRequest
from quartet.v1.talker_pb2_grpc import TalkerServiceStub
from quartet.v1.thinker_pb2 import GenerateRequest
from quartet.v1.thinker_pb2_grpc import ThinkerServiceStub

Output = Literal["text", "speech", "image", "video", "audio"]


@dataclass(frozen=True)
class StageKind:
    """A kind of stage.

    Attributes:
        name: in pipeline files, metrics and logs.
        stub: client of its gRPC service.
        method: the call of it that serves a request.
        streamed_request: type of the call's requests where there are several, the start message and then files; None
            where the start message is the only one.
        reads: kinds that its `source` may name.
        makes: the outputs that can come from it.
        is_model: whether clients ask for its model by name.
        is_diffusion: whether its checkpoint is one of diffusers.
        shares_checkpoint: whether its checkpoint must be that of its source.
        caches_prompts: whether a replica that has read the beginning of a prompt is faster with the rest.
        streams_deltas: whether it has `StreamDeltas`.
    """

    name: str
    stub: type[Any]
    method: str
    streamed_request: Callable[..., Any] | None = None
    reads: tuple[str, ...] = ()
    makes: tuple[Output, ...] = ()
    is_model: bool = False
    is_diffusion: bool = False
    shares_checkpoint: bool = False
    caches_prompts: bool = False
    streams_deltas: bool = False

    @property
    def service(self) -> str:
        """Full name of its gRPC service."""
        return f"quartet.v1.{self.name.title()}Service"  # e.g. Code2WavService


KINDS = {
    kind.name: kind
    for kind in (
        StageKind(
            "thinker",
            ThinkerServiceStub,
            "Generate",
            GenerateRequest,
            makes=("text",),
            is_model=True,
            caches_prompts=True,
            streams_deltas=True,
        ),
        StageKind(
            "talker",
            TalkerServiceStub,
            "Speak",
            SpeakRequest,
            reads=("thinker",),
            is_model=True,
            shares_checkpoint=True,
        ),
        StageKind(
            "code2wav", Code2WavServiceStub, "Decode", reads=("talker",), makes=("speech",), shares_checkpoint=True
        ),
        StageKind(
            "dit",
            DitServiceStub,
            "Generate",
            DitServiceGenerateRequest,
            reads=("encoder",),
            makes=("image", "video", "audio"),
            is_model=True,
            is_diffusion=True,
        ),
        StageKind("encoder", EncoderServiceStub, "Encode", EncodeRequest, is_diffusion=True),
    )
}


def maker(output: Output) -> StageKind:
    """The kind that makes `output`."""
    return next(kind for kind in KINDS.values() if output in kind.makes)
