"""Several scripted replicas of each stage, and the gateway's own view of them; no HTTP."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from gateway.pipeline.config import load_pipeline
from gateway.pipeline.events import Event
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.run import Job, run
from gateway.pipeline.run import speech as spoken
from quartet.v1 import talker_pb2, thinker_pb2
from tests.support.clock import until
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, SPEECH

KINDS = ("thinker", "talker", "code2wav")
INTERVAL_S = 0.05
LONG_S = 3600.0  # an interval within which nothing is checked again
TIME_S = 600.0  # of a request


class Routed:
    """Replicas of every stage.

    Attributes:
        groups: each has one replica of each stage.
        stages: the gateway's view.
    """

    def __init__(self, groups: list[ScriptedStages], stages: Pipeline) -> None:
        self.groups, self.stages = groups, stages

    def running(self, kind: str) -> list[int]:
        """Calls in each replica of a stage."""
        return [group.scripts[kind].running for group in self.groups]

    def asked(self, kind: str) -> list[int]:
        """Requests that each replica of a stage has had."""
        return [len(group.scripts[kind].requests) for group in self.groups]

    def hold(self, after: dict[str, int]) -> None:
        """Every replica of these stages stands still after so many outputs."""
        for group in self.groups:
            for kind, count in after.items():
                group.scripts[kind].hold, group.scripts[kind].after = True, count

    def release(self) -> None:
        """None stands still any more."""
        for group in self.groups:
            for script in group.scripts.values():
                script.go_on()

    async def holder(self, kind: str) -> ScriptedStages:
        """The replica of `kind` that stands still in a request."""
        waits = [asyncio.create_task(group.scripts[kind].holding.wait()) for group in self.groups]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        for wait in waits:
            wait.cancel()
        return next(group for group in self.groups if group.scripts[kind].holding.is_set())

    async def ask(
        self,
        text: str = "Hello",
        speech: bool = True,
        media: Sequence[bytes] = (),
        heard: list[Event] | None = None,
        conversation_id: str = "",
    ) -> list[Event]:
        """The events of one answer; in `heard` as they come."""
        return await self.answer(job(text, speech, media, conversation_id), heard)

    async def answer(self, job: Job, heard: list[Event] | None = None) -> list[Event]:
        """The events of `job`; in `heard` as they come."""
        heard = [] if heard is None else heard
        async with aclosing(run(self.stages, [job], TIME_S)) as events:
            async for _, event in events:
                heard.append(event)
        return heard


def job(text: str, speech: bool = True, media: Sequence[bytes] = (), conversation_id: str = "") -> Job:
    """One answer to `text`."""
    start = thinker_pb2.GenerateStart()
    message = start.messages.add(role="user")
    message.content.add(text=text)
    for file in media:
        message.content.add().media.size_bytes = len(file)
    starts = {"thinker": start} | (spoken(talker_pb2.SpeakStart()) if speech else {})
    return Job(uuid.uuid4().hex, starts, list(media), conversation_id=conversation_id)


@asynccontextmanager
async def routed(count: int, interval_s: float = INTERVAL_S, **options) -> AsyncIterator[Routed]:
    """`count` replicas of each stage, at static addresses; all serve."""
    async with AsyncExitStack() as stack:
        groups = [await stack.enter_async_context(scripted_stages()) for _ in range(count)]
        addresses = {kind: [group.addresses[kind] for group in groups] for kind in KINDS}
        stages = Pipeline(load_pipeline(SPEECH, addresses), interval_s, HEALTH_TIMEOUT_S, **options)
        await stack.enter_async_context(stages)
        every = [replica for kind in KINDS for replica in stages.by_name[kind].replicas.values()]
        await until(lambda: all(replica.serving for replica in every))
        yield Routed(groups, stages)
