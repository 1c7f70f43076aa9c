"""The checkpoint's pipelines as the settings want them, and what has to be switched between two requests' calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import torch

from services.diffusion.families import DENOISERS
from services.diffusion.pipelines import Pipelines
from services.dit.batching import Arguments
from services.dit.config import DitSettings
from services.dit.coroutine import BatchPoint, ModelCall, install
from services.dit.loading import load_pipeline, supports_caches
from services.dit.parallel import resolve_device
from services.dit.parallel_group import Group

log = structlog.get_logger()


class Models(Pipelines):
    """A checkpoint, loaded for denoising. All but the constructor and `watch` is for the engine's thread.

    Args:
        settings: of the stage.
        rank: where several devices share each call, which of them this process has.
        group: the others, of rank 0. It is closed if loading fails.

    Attributes:
        unbatched: why outputs do not share steps; empty if they do.
        denoisers: the models that are called at each step.
        one_at_a_time: whether calling another model takes loading it.

    Raises:
        ValueError: no such checkpoint, a pipeline that is not served, or settings that do not fit it.
        GroupFailed: another device's process could not start.
    """

    def __init__(self, settings: DitSettings, rank: int = 0, group: Group | None = None) -> None:
        self.group = group
        try:
            if settings.parallel_devices > 1:
                settings = settings.model_copy(update={"device": resolve_device(settings, rank)})
            super().__init__(load_pipeline(settings, denoisers_only=rank > 0))
            self.denoisers = [
                module for name in DENOISERS if (module := getattr(self.pipeline, name, None)) is not None
            ]
            if self.group is not None:
                self.group.join(self.denoisers)
        except BaseException:
            self.close()
            raise
        self.unbatched = ""
        self._cached = settings.cache != "none"
        if self._cached:
            self.unbatched = f"cache={settings.cache} keeps results of each output's own earlier steps"
            # the pipelines of the others do not tell a step's calls apart
            self.pipelines = {task: pipe for task, pipe in self.pipelines.items() if supports_caches(pipe)}
        elif settings.context_parallel_ring > 1 and self.family.batching.padded:
            self.unbatched = "prompts of several lengths need a mask, and context_parallel_ring takes none"
        self.one_at_a_time = settings.offload == "model"
        self._loras: tuple[tuple[str, float], ...] | None = None
        self.lora_names = sorted(settings.lora)
        install(self.pipeline)

    def watch(self, tell: Callable[[Exception], object], give_up: Callable[[Exception], object]) -> None:
        """See `Group.watch`."""
        if self.group is not None:
            self.group.watch(tell, give_up)

    def close(self) -> None:
        """Ends the other devices' processes."""
        if self.group is not None:
            self.group.close()

    def run(self, point: BatchPoint, arguments: Arguments, loras: tuple[tuple[str, float], ...]) -> Any:
        """Calls the point's function, a denoiser's on all devices."""
        if self.group is None or point.name not in DENOISERS:
            return point.run(arguments)
        return self.group.run(point.name, arguments, loras, lambda: point.run(arguments))

    @property
    def dtype(self) -> torch.dtype:
        """Of the transformer."""
        return self.denoisers[0].dtype

    @contextlib.contextmanager
    def set_up(
        self, loras: tuple[tuple[str, float], ...], owner: Any = None, call: ModelCall | None = None
    ) -> Iterator[None]:
        """The adapters `loras`, and for `call` the cache of `owner`, while inside."""
        self._use(loras)
        context = call and self._cached and getattr(self._module(call), "cache_context", None)
        if not context:
            yield
            return
        assert call is not None
        assert call.context is not None
        with context.outside(f"{id(owner)}/{call.context.name}", **call.context.arguments):
            yield

    def _module(self, call: ModelCall) -> Any:
        return getattr(self.pipeline, call.point.name, None)

    def _use(self, loras: tuple[tuple[str, float], ...]) -> None:
        if not self.lora_names or loras == self._loras:
            return
        self._loras = None  # unknown, should this fail
        if loras:
            self.pipeline.enable_lora()
            self.pipeline.set_adapters([name for name, _ in loras], [weight for _, weight in loras])
        else:
            self.pipeline.disable_lora()
        self._loras = loras

    def forget(self, owner: Any) -> None:
        """Frees what the caches keep for `owner`."""
        if not self._cached:
            return
        for denoiser in self.denoisers:
            for module in denoiser.modules():
                registry = getattr(module, "_diffusers_hook", None)
                for hook in registry.hooks.values() if registry else ():
                    for state in vars(hook).values():
                        kept = getattr(state, "_state_cache", {})
                        for name in [name for name in kept if name.startswith(f"{id(owner)}/")]:
                            del kept[name]
