"""The stages of a pipeline, and their state."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gateway.pipeline.addresses import Resolver, resolve_host
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.kinds import KINDS, Output
from gateway.pipeline.stage import Stage
from gateway.tasks import cancel
from services.common.rpc.channels import Channels


@dataclass(eq=False)
class Pipeline:
    """The stages of a pipeline, watched while `async with Pipeline(...)` lasts.

    Attributes:
        interval_s, timeout_s: time between two health checks of a replica, and longest that one may take.
        resolve_s: time between two look-ups of a name.
        answer: stages that make an answer, sources first.
        transcript: the stage that writes down speech, if the file names one.
    """

    config: PipelineConfig
    interval_s: float = 0.25
    timeout_s: float = 1.0
    resolve_s: float = 1.0
    resolver: Resolver = resolve_host
    channels: Channels = field(default_factory=Channels)
    by_name: dict[str, Stage] = field(default_factory=dict, init=False)
    answer: list[Stage] = field(default_factory=list, init=False)
    transcript: list[Stage] = field(default_factory=list, init=False)
    _outputs: dict[Output, Stage] = field(default_factory=dict, init=False)
    _watches: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    async def __aenter__(self) -> "Pipeline":
        for name, config in self.config.stages.items():
            self.by_name[name] = Stage(name, config, self.resolver, self.channels)
        for name in self.config.stages:
            for source in self.config.streams(name):
                self.by_name[name].sources.append(self.by_name[source])
                self.by_name[source].readers.append(self.by_name[name])
        self.answer = [self.by_name[name] for name in self.config.answer]
        self.transcript = [self.by_name[name] for name in self.config.route("transcript")]
        self._outputs = {output: self.by_name[self.config.model_stage(output)] for output in self.config.made}
        timing = self.resolve_s, self.interval_s, self.timeout_s
        self._watches = [asyncio.create_task(stage.watch(*timing)) for stage in self.by_name.values()]
        return self

    async def __aexit__(self, *_) -> None:
        await cancel(*self._watches)
        await self.channels.close_all()

    def output(self, output: Output) -> Stage | None:
        """The stage whose model makes `output`; None if the pipeline does not make it."""
        return self._outputs.get(output)

    @property
    def main(self) -> Stage:
        """The stage that the pipeline's `model` names."""
        return self.with_models[0]

    @property
    def with_models(self) -> list[Stage]:
        made = dict.fromkeys(self._outputs.values())
        return [stage for stage in made if KINDS[stage.kind].is_model] or list(made)

    def info(self, kind: str) -> Any | None:
        """Info of the answer's stage, e.g. ThinkerInfo; None before it is known."""
        found = next((stage for stage in self.answer if stage.kind == kind), None)
        return getattr(found.info, kind) if found and found.info else None

    @property
    def ready(self) -> bool:
        return all(stage.serving for stage in self.by_name.values())

    @property
    def served(self) -> list[Output]:
        by_name, route = self.by_name, self.config.route
        return [output for output in self.config.made if all(by_name[name].serving for name in route(output))]

    @property
    def is_settled(self) -> bool:
        return all(stage.is_settled for stage in self.by_name.values())

    async def settle(self, within_s: float) -> None:
        """Returns when every stage was settled once, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(stage.settled.wait() for stage in self.by_name.values()))

    @property
    def has_room(self) -> bool:
        return all(
            any(replica.serving and not replica.queued for replica in stage.replicas.values())
            for stage in (*self.answer, *self.transcript)
        )

    @property
    def voices(self) -> list[str]:
        """The talker's; empty before they are known."""
        talker = self.info("talker")
        return list(talker.speakers) if talker else []
