"""Runs a diffusers pipeline up to its first denoising call, and keeps what its encoders made."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from services.common.engine.device import engine_device, make_current
from services.common.errors import InternalError, RequestCancelled
from services.common.telemetry import metrics
from services.diffusion import pipelines
from services.diffusion.conditioning import Conditioning
from services.diffusion.families import DENOISERS, TEXT_ENCODERS, checkpoint_class, family_of
from services.diffusion.model_info import dit_info
from services.diffusion.request import OutputSpec
from services.encoder.config import EncoderSettings


class EncoderEngine:
    """Text encoders, and what else runs before denoising. One request at a time, in a thread of its own.

    Attributes:
        draws_prior_tokens: whether each output needs an encoding of its own, by its seed.
        names: of the text encoders.

    Raises:
        ValueError: no such device, no such checkpoint, a pipeline that is not served, or settings that do not fit it.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        device = engine_device(settings.device)
        make_current(device)
        folder = pipelines.find_checkpoint(settings.model)
        if not family_of(checkpoint_class(folder)).listed:
            raise ValueError("how this pipeline's encoders are divided from it is not known: its dit has its own")
        self.dtype = pipelines.checkpoint_dtype(folder, settings.dtype)
        without_weights = pipelines.load_meta_modules(folder, self.dtype, (*DENOISERS, "vae"))
        pipeline: Any = checkpoint_class(folder).from_pretrained(folder, dtype=self.dtype, **without_weights)
        with pipelines.without(pipeline, without_weights):
            pipeline.to(device)
        for model in without_weights.values():
            _end_at(model)
        self.models = pipelines.Pipelines(pipeline)
        self.info = dit_info(self.models, settings)
        self.draws_prior_tokens = hasattr(pipeline, "generate_prior_tokens")
        self.names = [name for name in TEXT_ENCODERS if getattr(pipeline, name, None) is not None]
        self._cancelled = threading.Event()
        for name in self.names:
            getattr(pipeline, name).register_forward_pre_hook(self._check_cancelled)
        self._thread = ThreadPoolExecutor(1, "encoder-engine", make_current, (device,))

    async def encode(self, outputs: Sequence[OutputSpec]) -> list[Conditioning]:
        """What a diffusion stage needs to make `outputs`. Cancelling ends the encoding at the next call of a model.

        Raises:
            StageError: the pipeline failed or refused an argument.
        """
        cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, outputs, cancelled)
        finally:
            cancelled.set()

    # What follows runs in the engine's thread.

    def _encode(self, outputs: Sequence[OutputSpec], cancelled: threading.Event) -> list[Conditioning]:
        self._cancelled = cancelled
        wanted = outputs if self.draws_prior_tokens else outputs[:1]
        metrics.STEP_BATCH.labels("encoder", "encode").observe(len(wanted))
        with torch.no_grad(), metrics.STEP_SECONDS.labels("encoder", "encode").time():
            made = [_run(spec) for spec in wanted]
        if cancelled.is_set():
            raise RequestCancelled("the request was cancelled while its prompt was read")
        return made

    def _check_cancelled(self, module: Any, args: Any) -> None:
        if self._cancelled.is_set():
            raise pipelines.PipelineStopped


def _run(spec: OutputSpec) -> Conditioning:
    generator = torch.Generator("cpu").manual_seed(spec.seed)
    with pipelines.own_view(spec.pipeline, spec.conditioning) as pipeline:
        try:
            pipeline(**spec.arguments, generator=generator, output_type="latent")
        except pipelines.PipelineStopped:
            return spec.conditioning
        except Exception as error:
            raise pipelines.explain(error) from error
    raise InternalError("the pipeline went past its encoders")


def _end_at(model: Any) -> None:
    """Makes pipelines stop where they call `model`, which has no weights."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise pipelines.PipelineStopped

    for name in ("forward", "encode", "decode"):
        if hasattr(model, name):
            setattr(model, name, stop)
