"""The table of kinds of stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gateway.pipeline.events import Event
from gateway.pipeline.links import Links, link_decoder, link_in_line
from gateway.pipeline.response_events import code2wav_event, no_event, talker_event, thinker_event
from quartet.v1.aligner_pb2_grpc import AlignerServiceStub
from quartet.v1.code2wav_pb2_grpc import Code2WavServiceStub
from quartet.v1.dit_pb2 import DitServiceGenerateRequest
from quartet.v1.dit_pb2_grpc import DitServiceStub
from quartet.v1.embedder_pb2_grpc import EmbedderServiceStub
from quartet.v1.encoder_pb2 import EncodeRequest
from quartet.v1.encoder_pb2_grpc import EncoderServiceStub
from quartet.v1.talker_pb2 import SpeakRequest
from quartet.v1.talker_pb2_grpc import TalkerServiceStub
from quartet.v1.thinker_pb2 import GenerateRequest
from quartet.v1.thinker_pb2_grpc import ThinkerServiceStub

Output = Literal["text", "speech", "transcript", "image", "video", "audio", "embedding", "scores", "words"]


@dataclass(frozen=True)
class StageKind:
    """A kind of stage.

    Attributes:
        method: call that serves a request.
        streamed_request: type of the call's requests; None: it takes the start message alone.
        reads: kinds that it may read from.
        link: writes its neighbours into a start message.
        event: the client's event in a response to a start message. Raises ResponseFault.
        separates_deltas: whether the answer to a start message may come by `StreamDeltas`.
        is_model: clients name its model.
        is_diffusion: its checkpoint is in diffusers' format.
        shares_checkpoint: its sources must have its checkpoint.
        loads_adapters: requests may name an adapter.
    """

    name: str
    stub: type[Any]
    method: str
    streamed_request: Callable[..., Any] | None = None
    reads: tuple[str, ...] = ()
    makes: tuple[Output, ...] = ()
    link: Callable[[Any, Links], None] = link_in_line
    event: Callable[[Any, Any], Event | None] = no_event
    separates_deltas: Callable[[Any], bool] = lambda start: False
    is_model: bool = False
    is_diffusion: bool = False
    shares_checkpoint: bool = False
    caches_prompts: bool = False
    loads_adapters: bool = False

    @property
    def service(self) -> str:
        return f"quartet.v1.{self.name.title()}Service"  # e.g. Code2WavService


KINDS = {
    kind.name: kind
    for kind in (
        StageKind(
            "thinker",
            ThinkerServiceStub,
            "Generate",
            GenerateRequest,
            makes=("text", "transcript"),
            event=thinker_event,
            # log-probabilities of the prompt must precede the deltas, and whole vocabularies are large
            separates_deltas=lambda start: (
                not start.sampling.HasField("prompt_logprobs") and start.sampling.top_logprobs >= 0
            ),
            is_model=True,
            caches_prompts=True,
            loads_adapters=True,
        ),
        StageKind(
            "talker",
            TalkerServiceStub,
            "Speak",
            SpeakRequest,
            reads=("thinker",),
            event=talker_event,
            is_model=True,
            shares_checkpoint=True,
        ),
        StageKind(
            "code2wav",
            Code2WavServiceStub,
            "Decode",
            reads=("talker",),
            makes=("speech",),
            link=link_decoder,
            event=code2wav_event,
            shares_checkpoint=True,
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
        # Its other method, Score, is called by gateway/pipeline/embedder.py.
        StageKind("embedder", EmbedderServiceStub, "Embed", makes=("embedding", "scores"), is_model=True),
        # Called by gateway/pipeline/aligner.py: its request has the sound, and its response is one message.
        StageKind("aligner", AlignerServiceStub, "Align", makes=("words",)),
    )
}


def maker(output: Output) -> StageKind:
    return next(kind for kind in KINDS.values() if output in kind.makes)
