"""The stages the gateway talks to: a channel each, and whether they serve right now."""

import asyncio

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.pipeline.config import Output, PipelineConfig, StageConfig
from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from services.common import channels
from services.common.errors import StageError, Unavailable
from services.common.status import from_rpc_error

SERVICE = {
    "thinker": "quartet.v1.ThinkerService",
    "talker": "quartet.v1.TalkerService",
    "code2wav": "quartet.v1.Code2WavService",
    "dit": "quartet.v1.DitService",
    "encoder": "quartet.v1.EncoderService",
}

# Health checks in a row without an answer before a stage that was serving counts as down: a busy machine may be late.
# A stage whose connection is refused or reset is down at once.
LATE_CHECKS = 3

log = structlog.get_logger()


class Stage:
    """One stage's replica.

    Attributes:
        state: "SERVING", or else why not, in words for people.
        info: what the stage said of itself when it was last found serving; None before that.
        source: of a dit, the encoder that reads its prompts, if the pipeline has one.
    """

    def __init__(self, name: str, config: StageConfig) -> None:
        self.name = name
        self.kind = config.kind
        self.address = config.address
        self.channel = channels.channel(config.address)
        self.state = "not checked yet"
        self.info: server_info_pb2.GetServerInfoResponse | None = None
        self.source: Stage | None = None
        self._check_now = asyncio.Event()
        self._late = 0

    @property
    def serving(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state == "SERVING"

    def require_serving(self) -> None:
        """Raises Unavailable unless the stage serves."""
        if not self.serving:
            raise Unavailable(f"stage {self.name} is not serving ({self.state}); retry later")

    def mark_down(self, reason: str) -> None:
        """A request found the stage gone: it gets no more until a health check, made at once, finds it serving."""
        self._set_state(reason)
        self._check_now.set()

    def failure(self, error: grpc.aio.AioRpcError) -> StageError:
        """Why a call to this stage failed. A stage that is lost is marked down."""
        reason = from_rpc_error(error)
        if isinstance(reason, Unavailable) and not _said_so_itself(error):
            self.mark_down(f"lost: {error.details()}")
            return Unavailable(f"stage {self.name} was lost while it worked on the request; retry")
        return reason

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Checks the stage's health for ever, every `interval_s`."""
        while True:
            await self._check(timeout_s)
            try:
                async with asyncio.timeout(interval_s):
                    await self._check_now.wait()
            except TimeoutError:
                continue
            self._check_now.clear()

    async def _check(self, timeout_s: float) -> None:
        was_serving = self.serving
        try:
            health = health_pb2_grpc.HealthStub(self.channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE[self.kind])
            response = await health.Check(request, timeout=timeout_s)  # pyright: ignore[reportAttributeAccessIssue]
            state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            if state == "SERVING" and (not was_serving or self.info is None):
                server = server_info_pb2_grpc.ServerInfoServiceStub(self.channel)
                request = server_info_pb2.GetServerInfoRequest()
                self.info = await server.GetServerInfo(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self._late = self._late + 1 if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else LATE_CHECKS
            if was_serving and self._late < LATE_CHECKS:
                return
            state = f"{error.code().name} at {self.address}"
        else:
            self._late = 0
        self._set_state(state)

    def _set_state(self, state: str) -> None:
        if state != self.state:
            log.info("stage state", name=self.name, address=self.address, state=state, before=self.state)
            self.state = state


def _said_so_itself(error: grpc.aio.AioRpcError) -> bool:
    """Whether the stage's own code sent the status, and not gRPC on behalf of a stage that is gone."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())


class Stages:
    """All stages of a pipeline. Use as `async with Stages(...) as stages`: watches them meanwhile."""

    def __init__(self, config: PipelineConfig, interval_s: float, timeout_s: float) -> None:
        self.config = config
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._by_name: dict[str, Stage] = {}
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Stages":
        for name, config in self.config.stages.items():
            stage = self._by_name[name] = Stage(name, config)
            self._watches.append(asyncio.create_task(stage.watch(self._interval_s, self._timeout_s)))
        for name, config in self.config.stages.items():
            if config.kind == "dit" and config.source is not None:
                self._by_name[name].source = self._by_name[config.source]
        return self

    async def __aexit__(self, *_) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await channels.close_all()

    def output(self, output: Output) -> Stage | None:
        """The stage that `output` comes from, if the pipeline has that output."""
        name = getattr(self.config.outputs, output)
        return None if name is None else self._by_name[name]

    @property
    def main(self) -> Stage:
        """The stage that the pipeline's `model` names."""
        return self._by_name[self.config.main_name]

    @property
    def with_models(self) -> list[Stage]:
        """The stages whose models clients ask for by name, the main one first."""
        names = dict.fromkeys(name for output, name in self.config.outputs if name is not None and output != "audio")
        return [self._by_name[name] for name in names]

    @property
    def thinker(self) -> Stage | None:
        """The stage that writes the text, if the pipeline has one."""
        return self.output("text")

    @property
    def talker(self) -> Stage | None:
        """The stage that speaks, if the pipeline has one."""
        return None if self.config.talker_name is None else self._by_name[self.config.talker_name]

    @property
    def code2wav(self) -> Stage | None:
        """The stage the sound comes from, if the pipeline has one."""
        return self.output("audio")

    @property
    def states(self) -> dict[str, str]:
        """Each stage's state."""
        return {name: stage.state for name, stage in self._by_name.items()}

    @property
    def ready(self) -> bool:
        """Whether every stage serves."""
        return all(stage.serving for stage in self._by_name.values())

    @property
    def voices(self) -> list[str]:
        """Voices of the talker; empty while it was never reached, or without one."""
        talker = self.talker
        return list(talker.info.talker.speakers) if talker and talker.info else []

    @property
    def sample_rate_hz(self) -> int | None:
        """Samples a second of the audio; None while code2wav was never reached, or without one."""
        code2wav = self.code2wav
        return code2wav.info.code2wav.sample_rate_hz if code2wav and code2wav.info else None
