"""The stages of a pipeline, as the gateway knows them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gateway.pipeline.addresses import Resolver, resolve_host
from gateway.pipeline.balance import MAX_IMBALANCE
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.kinds import Output
from gateway.pipeline.stage import Stage
from services.common.rpc.channels import Channels


@dataclass(eq=False)
class Pipeline:
    """All stages of a pipeline. Use as `async with Pipeline(...)`: watches them meanwhile.

    Attributes:
        config: the pipeline.
        interval_s: between two health checks of a replica.
        timeout_s: of a health check.
        resolve_s: between two look-ups of a name.
        max_imbalance: see `balance.rendezvous`.
        resolver: looks up the names among the stages' addresses.
        channels: to the stages; default: connections in the clear.
        by_name: the stages, by their names in the pipeline file.
        answer: the stages that an answer comes through, spoken if the pipeline speaks, the first first.
    """

    config: PipelineConfig
    interval_s: float
    timeout_s: float
    resolve_s: float = 1.0
    max_imbalance: int = MAX_IMBALANCE
    resolver: Resolver = resolve_host
    channels: Channels = field(default_factory=Channels)
    by_name: dict[str, Stage] = field(default_factory=dict, init=False)
    answer: list[Stage] = field(default_factory=list, init=False)
    _outputs: dict[Output, Stage] = field(default_factory=dict, init=False)
    _watches: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    async def __aenter__(self) -> "Pipeline":
        for name, config in self.config.stages.items():
            self.by_name[name] = Stage(name, config, self.resolver, self.max_imbalance, self.channels)
        for name in self.config.stages:
            for source in self.config.sources(name):
                self.by_name[name].sources.append(self.by_name[source])
                self.by_name[source].readers.append(self.by_name[name])
        self.answer = [self.by_name[name] for name in self.config.answer]
        self._outputs = {output: self.by_name[self.config.model_stage(output)] for output in self.config.made}
        timing = self.resolve_s, self.interval_s, self.timeout_s
        self._watches = [asyncio.create_task(stage.watch(*timing)) for stage in self.by_name.values()]
        return self

    async def __aexit__(self, *_) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self.channels.close_all()

    def output(self, output: Output) -> Stage | None:
        """The stage whose model clients ask for when they want `output`, if the pipeline has that output."""
        return self._outputs.get(output)

    @property
    def main(self) -> Stage:
        """The stage that the pipeline's `model` names: that of the text, else that of the first other output."""
        return self.with_models[0]

    @property
    def with_models(self) -> list[Stage]:
        """The stages whose models clients ask for by name, the main one first."""
        return list(dict.fromkeys(self._outputs.values()))

    def info(self, kind: str) -> Any | None:
        """What the answer's stage of `kind` says of that kind: ThinkerInfo, TalkerInfo or Code2WavInfo. None while it
        was never reached, or without one."""
        found = next((stage for stage in self.answer if stage.kind == kind), None)
        return getattr(found.info, kind) if found and found.info else None

    @property
    def ready(self) -> bool:
        """Whether every stage serves."""
        return all(stage.serving for stage in self.by_name.values())

    @property
    def served(self) -> list[Output]:
        """The outputs whose stages serve, down to the first that they come from."""
        by_name, route = self.by_name, self.config.route
        return [output for output in self.config.made if all(by_name[name].serving for name in route(output))]

    @property
    def is_settled(self) -> bool:
        """Whether every stage serves, or was found not to: nothing that serves is merely not known yet."""
        return all(stage.is_settled for stage in self.by_name.values())

    @property
    def has_room(self) -> bool:
        """Whether each stage of an answer has a replica that no request waits for."""
        return all(
            any(replica.serving and not replica.queued for replica in stage.replicas.values()) for stage in self.answer
        )

    @property
    def voices(self) -> list[str]:
        """Voices of the talker; empty while it was never reached, or without one."""
        talker = self.info("talker")
        return list(talker.speakers) if talker else []
