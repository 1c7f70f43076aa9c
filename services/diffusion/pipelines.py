"""diffusers' pipelines, called side by side on the same models.

Two processes can share a pipeline: each leaves some models without weights, on torch's device "meta". Such a model
still has its config, which is all that the other part of the pipeline reads.
"""

import contextlib
import copy
import inspect
import json
import threading
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import structlog
import torch
from accelerate import init_empty_weights
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from services.common.errors import InternalError, InvalidInput, QueueFull, StageError
from services.common.revisions import parted
from services.diffusion import loaded, modular, modular_index
from services.diffusion.conditioning import Conditioning
from services.diffusion.encoding_cache import EncodingCache
from services.diffusion.families import OWN, checkpoint_class, family_of, own_class
from services.diffusion.modular_index import INDEX, MODULAR_INDEX, Index, is_modular

log = structlog.get_logger()


def silence_libraries() -> None:
    """Keeps progress bars of diffusers and transformers out of the log."""
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


class PipelineStopped(BaseException):
    """Raised inside a pipeline to end it. No Exception, so no pipeline catches it."""


def find_checkpoint(model: str) -> Path:
    """The checkpoint's directory, fetched if need be. Raises ValueError: there is no such diffusers checkpoint."""
    if Path(model).is_dir():
        if not any((Path(model) / index).is_file() for index in (INDEX, MODULAR_INDEX, *OWN)):
            raise ValueError(f"{model} has no {INDEX} and no {MODULAR_INDEX}: it is no diffusers checkpoint")
        return Path(model)
    name, revision = parted(model)
    try:
        return Path(DiffusionPipeline.download(name, revision=revision))
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            return modular_index.fetch(name, revision)
        with contextlib.suppress(OSError, ValueError):
            return _fetch_own(name, revision)
        raise ValueError(f"{model} is neither a directory nor a diffusers model on the hub: {error}") from None


def _fetch_own(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint of the hub that a class of ours serves. Raises OSError, ValueError: it is none."""
    own = own_class(Path(snapshot_download(name, revision=revision, allow_patterns=["*.json"])))
    if own is None:
        raise ValueError(f"it has none of {', '.join(OWN)}")
    return Path(snapshot_download(name, revision=revision, allow_patterns=list(own.files)))


def checkpoint_dtype(folder: Path, requested: str) -> torch.dtype:
    """`requested`, or what the weights of the first denoiser are stored in."""
    if requested != "auto":
        return getattr(torch, requested)
    if (own := own_class(folder)) is not None:
        return own.stored_dtype(folder)
    folders = (folder_of(folder, name) for name in denoisers_in(folder))
    files = [file for each in folders for file in sorted(each.glob("*.safetensors"))]
    if not files:
        return torch.float32
    with safe_open(files[0], framework="pt") as weights:
        return weights.get_slice(next(iter(weights.keys())))[:1].dtype


def denoisers_in(folder: Path) -> list[str]:
    """Components of the checkpoint that are called at each step."""
    if is_modular(folder):
        return modular.denoisers_of(checkpoint_class(folder))
    if (own := own_class(folder)) is not None:
        return list(own.denoisers)
    index = json.loads((folder / INDEX).read_text())
    classes: dict[str, Any] = {}
    for name, entry in index.items():
        with contextlib.suppress(
            ImportError, AttributeError, TypeError
        ):  # other settings, and code of the checkpoint's
            classes[name] = _class(*entry)
    return [name for name, cls in classes.items() if inspect.isclass(cls) and loaded.is_denoiser(cls)]


def folder_of(folder: Path, component: str) -> Path:
    """Where a component of a checkpoint is. Raises ValueError: it is nowhere."""
    return Index(folder).folder_of(component) if is_modular(folder) else folder / component


class Pipelines:
    """A loaded pipeline, and its variants on the same models.

    Attributes:
        pipeline: the checkpoint's own.
        device: where models run.
        pipelines: by further tasks, "edit", "inpaint" and "of_video". The checkpoint's own may be one of them.
        encodings: of prompts and images, kept for later requests; None: none are kept.

    Raises:
        ValueError: a pipeline that is not served.
    """

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        self.pipeline: Any = pipeline
        # Read once: diffusers walks all modules for it, which is milliseconds, too long for every step.
        self.device: torch.device = self.pipeline._execution_device
        self.family = family_of(type(pipeline))
        # One of its own: a fast tokenizer's padding is state, which the pipelines set in the engine's thread.
        self._counter: Any = copy.deepcopy(loaded.tokenizer_of(pipeline))
        self._counting = threading.Lock()
        self.encodings: EncodingCache | None = None
        edits_too = self.family.images and not self.family.needs_image
        self.pipelines: dict[str, Any] = {"edit": pipeline} if edits_too else {}
        if self.family.needs_mask:
            self.pipelines["inpaint"] = pipeline
        if self.family.from_video:
            self.pipelines["of_video"] = pipeline
        for task in ("edit", "inpaint", "of_video"):
            name: str | None = getattr(self.family, task)
            if name is not None and (made := _variant(self.pipeline, name)) is not None:
                self.pipelines[task] = made

    def for_request(self, edits: bool, masked: bool, from_video: bool) -> DiffusionPipeline:
        """The pipeline for a request with pictures, and with a mask, or without, or with a video."""
        if from_video:
            return self.pipelines["of_video"]
        return self.pipelines.get("inpaint" if masked else "edit", self.pipeline) if edits else self.pipeline

    def keep_encodings(self, stage: str, mib: int) -> None:
        """From now on keeps up to so many MiB of encoded prompts and images. Call it before there are requests."""
        if mib:
            self.encodings = EncodingCache(stage, mib * 1024 * 1024)
            vae: Any = getattr(self.pipeline, "vae", None)
            if hasattr(vae, "encode") and not any(each.is_meta for each in vae.parameters()):
                self.encodings.attach_vae(vae)

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt; 0 without a tokenizer. For any thread."""
        with self._counting:
            return len(self._counter(text).input_ids) if self._counter is not None else 0


def _variant(pipeline: DiffusionPipeline, name: str) -> DiffusionPipeline | None:
    """A pipeline of class `name` with the same models, not copies, and settings; None: it needs further models."""
    if isinstance(pipeline, modular.BlocksPipeline):
        return pipeline.variant(name)
    cls: type[DiffusionPipeline] = getattr(diffusers, name)
    wanted = inspect.signature(cls.__init__).parameters
    settings = {key: value for key, value in pipeline.config.items() if not isinstance(value, (list, tuple))}
    given = {key: value for key, value in (settings | pipeline.components).items() if key in wanted}
    if any(key not in (*given, "self") and each.default is each.empty for key, each in wanted.items()):
        return None
    made = cls(**given)
    if type(pipeline) is not getattr(diffusers, type(pipeline).__name__):  # some models have no weights
        run_on(made, pipeline._execution_device)
    return made


@contextlib.contextmanager
def own_view(
    pipeline: DiffusionPipeline, conditioning: Conditioning, prepare: Callable[[Any], None] = lambda scheduler: None
) -> Iterator[Any]:
    """`pipeline` for one call: the same models, schedulers of its own, which `prepare` gets, and for a pipeline of the
    table results of encoders from `conditioning`. It is emptied afterwards, as it refers to itself."""
    own: dict[int, Any] = {}
    copied = _copy(pipeline, own)
    for part in own.values():
        if isinstance(part, SchedulerMixin):
            prepare(part)
    # of classes without a row it is not known that the seed changes no encoding
    conditioning.attach(copied, keeps=family_of(type(pipeline)).listed)
    try:
        yield copied
    finally:
        for part in own.values():
            vars(part).clear()


def _copy(pipeline: DiffusionPipeline, own: dict[int, Any]) -> Any:
    """`pipeline` with the same models, and with all anew that changes during a call: schedulers, guiders, pipelines
    within it. `own` has what is new, by the original's id."""
    copied: Any = own.setdefault(id(pipeline), copy.copy(pipeline))
    part: Any
    for name, part in vars(pipeline).items():
        if isinstance(part, (SchedulerMixin, BaseGuidance)) and id(part) not in own:
            own[id(part)] = type(part).from_config(part.config)  # type: ignore[attr-defined]
        elif isinstance(part, DiffusionPipeline) and id(part) not in own:
            _copy(part, own)
        vars(copied)[name] = own.get(id(part), part)
    vars(copied).update(
        _progress_bar_config={"disable": True},
        maybe_free_model_hooks=lambda: None,  # it resets what other calls are using
    )
    return copied


def explain(error: Exception) -> StageError:
    """The error as a requester gets it. Logs all but expected ones."""
    if isinstance(error, StageError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return QueueFull(
            "the device has not enough memory for this size now; retry later or ask for a smaller one", 5.0
        )
    log.error("a pipeline failed", exc_info=error)
    if isinstance(error, ValueError):  # how pipelines refuse arguments that we took for good
        return InvalidInput("request", str(error))
    return InternalError("the pipeline failed; the stage's log has the details")


def load_meta_modules(folder: Path, dtype: torch.dtype, names: Collection[str]) -> dict[str, torch.nn.Module]:
    """The checkpoint's models in `names`, without weights, as of `dtype`."""
    if (own := own_class(folder)) is not None:
        return own.empty_models(folder, names, dtype)
    index = json.loads((folder / INDEX).read_text()) if names else {}
    made = {}
    for name, entry in index.items():
        if name in names and isinstance(entry, list) and entry[1] is not None:
            cls = _class(*entry)
            with init_empty_weights(include_buffers=True):
                if hasattr(cls, "load_config"):  # diffusers
                    model = cls.from_config(cls.load_config(folder / name))
                else:
                    model = cls._from_config(cls.config_class.from_pretrained(folder / name))
            made[name] = model.to(dtype=dtype)
    return made


def _class(library: str, name: str) -> Any:
    module = import_module(library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}")
    return getattr(module, name, None) or getattr(import_module("transformers"), name)


@contextlib.contextmanager
def without(pipeline: Any, models: dict[str, torch.nn.Module]) -> Iterator[None]:
    """`pipeline` without `models`, for what moves weights; afterwards it runs where those are."""
    for name in models:
        setattr(pipeline, name, None)
    yield
    device = pipeline._execution_device
    if models:
        run_on(pipeline, device)
    for name, model in models.items():
        setattr(pipeline, name, model)


def run_on(pipeline: DiffusionPipeline, device: torch.device) -> None:
    """Fixes the pipeline's device, which it would read from its first model, perhaps one without weights."""
    cls = type(pipeline)
    overridden = {"_execution_device": property(lambda self: device), "device": property(lambda self: device)}
    pipeline.__class__ = type(cls.__name__, (cls,), {**overridden, "__module__": cls.__module__})
