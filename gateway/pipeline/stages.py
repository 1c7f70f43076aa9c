"""The stages of a pipeline that the gateway talks to."""

import asyncio
from typing import Any

from gateway.pipeline.choose import MAX_IMBALANCE
from gateway.pipeline.config import Output, PipelineConfig
from gateway.pipeline.replicas import LATE_CHECKS, SERVICE
from gateway.pipeline.resolve import Resolver, resolve_host
from gateway.pipeline.stage import Stage
from services.common.rpc.channels import Channels

__all__ = ["LATE_CHECKS", "SERVICE", "Stage", "Stages"]


class Stages:
    """All stages of a pipeline. Use as `async with Stages(...) as stages`: watches them meanwhile.

    Args:
        config: the pipeline.
        interval_s: between two health checks of a replica.
        timeout_s: of a health check.
        resolve_s: between two look-ups of a name.
        max_imbalance: see `choose.by_key`.
        resolver: looks up the names among the stages' addresses.
        channels: to the stages; None: connections in the clear.
    """

    def __init__(
        self,
        config: PipelineConfig,
        interval_s: float,
        timeout_s: float,
        resolve_s: float = 1.0,
        max_imbalance: int = MAX_IMBALANCE,
        resolver: Resolver = resolve_host,
        channels: Channels | None = None,
    ) -> None:
        self.config = config
        self._timing = resolve_s, interval_s, timeout_s
        self._max_imbalance, self._resolver = max_imbalance, resolver
        self._channels = channels or Channels()
        self._by_name: dict[str, Stage] = {}
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Stages":
        for name, config in self.config.stages.items():
            self._by_name[name] = Stage(name, config, self._resolver, self._max_imbalance, self._channels)
        for name, config in self.config.stages.items():
            if (source := getattr(config, "source", None)) is not None:
                self._by_name[name].source = self._by_name[source]
                self._by_name[source].readers.append(self._by_name[name])
        self._watches = [asyncio.create_task(stage.watch(*self._timing)) for stage in self._by_name.values()]
        return self

    async def __aexit__(self, *_) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._channels.close_all()

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
    def replicas(self) -> dict[str, list[dict[str, Any]]]:
        """Each stage's replicas, for people and programs that watch."""
        return {name: stage.describe_replicas() for name, stage in self._by_name.items()}

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
