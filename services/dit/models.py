"""The checkpoint's pipelines as the settings want them, and what has to be switched between two requests' calls."""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from services.dit.batching import RULES, Arguments
from services.dit.config import DitSettings
from services.dit.families import family_of, variant
from services.dit.loading import load_pipeline, supports_caches
from services.dit.parallel import resolve_device
from services.dit.parallel_group import Group
from services.dit.weave import DENOISERS, Call, Point, install

log = structlog.get_logger()


class Pipelines:
    """A loaded pipeline, and its variants on the same models.

    Attributes:
        family: what is known of its class.
        pipelines: by what they do: "text" or "image" (the checkpoint's own), "edit", "inpaint".

    Raises:
        ValueError: a pipeline that is not served.
    """

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        self.pipeline: Any = pipeline
        self.family = family_of(pipeline)
        # One of its own: a fast tokenizer's padding is state, which the pipelines set in the engine's thread.
        self._counter: Any = copy.deepcopy(getattr(pipeline, self.family.tokenizer, None))
        self._counting = threading.Lock()
        self.pipelines: dict[str, DiffusionPipeline] = {"image" if self.family.needs_image else "text": pipeline}
        if self.family.images and not self.family.needs_image:
            self.pipelines["edit"] = pipeline
        for task, name in (("edit", self.family.edit), ("inpaint", self.family.inpaint)):
            if name is not None:
                self.pipelines[task] = variant(self.pipeline, name)

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt; 0 where the pipeline has no tokenizer. For any thread."""
        with self._counting:
            return len(self._counter(text).input_ids) if self._counter is not None else 0

    @functools.cached_property
    def device(self) -> torch.device:
        """Where models run. diffusers walks all modules to say it: milliseconds, too long for every step."""
        return self.pipeline._execution_device


class Models(Pipelines):
    """A checkpoint, loaded for denoising. All but the constructor and `watch` is for the engine's thread.

    Args:
        settings: of the stage.
        rank: where several devices share each call, which of them this process has; the first starts the others.

    Attributes:
        unbatched: why outputs do not share steps; empty if they do.
        denoisers: the models that are called at each step.
        one_at_a_time: whether calling another model takes loading it.

    Raises:
        ValueError: no such checkpoint, a pipeline that is not served, or settings that do not fit it.
        GroupFailed: another device's process could not start.
    """

    def __init__(self, settings: DitSettings, rank: int = 0) -> None:
        self.group = Group(settings) if settings.parallel_devices > 1 and not rank else None
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
        elif settings.context_parallel_ring > 1 and any(RULES[type(m).__name__].padded for m in self.denoisers):
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

    def run(self, point: Point, arguments: Arguments, loras: tuple[tuple[str, float], ...]) -> Any:
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
        self, loras: tuple[tuple[str, float], ...], owner: Any = None, call: Call | None = None
    ) -> Iterator[None]:
        """The adapters `loras`, and for `call` the cache of `owner`, while inside."""
        self._use(loras)
        note = call and self._cached and getattr(self._module(call), "cache_context", None)
        if not note:
            yield
            return
        assert call is not None
        assert call.context is not None
        with note.outside(f"{id(owner)}/{call.context.name}", **call.context.facts):
            yield

    def _module(self, call: Call) -> Any:
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
