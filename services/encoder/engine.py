"""Runs a diffusers pipeline up to where its prompts are read, and keeps what its encoders made."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from services.common.engine.device import engine_device
from services.common.rpc.errors import InternalError, RequestCancelled
from services.common.telemetry import metrics
from services.dit.conditioning import Conditioning
from services.dit.failure import explain
from services.dit.hollow import ENCODERS, hollow_models, without
from services.dit.loading import checkpoint_dtype, find_checkpoint
from services.dit.models import Pipelines
from services.dit.output import Order, view
from services.dit.weave import DENOISERS, Stopped
from services.encoder.config import EncoderSettings


class EncoderEngine:
    """Text encoders, and what else runs before denoising. One request at a time, in a thread of its own.

    Raises:
        ValueError: no such device, no such checkpoint, or a pipeline that is not served.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = engine_device(settings.device)
        folder = find_checkpoint(settings.model)
        dtype = checkpoint_dtype(folder, settings.dtype)
        hollow = hollow_models(folder, dtype, lambda name: name in DENOISERS or name == "vae")
        pipeline: Any = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **hollow)
        with without(pipeline, hollow):
            pipeline.to(device)
        for model in hollow.values():
            _end_at(model)
        self.models = Pipelines(pipeline)
        self.dtype = dtype
        self.names = [name for name in ENCODERS if getattr(pipeline, name, None) is not None]
        self._cancelled = threading.Event()
        for name in self.names:
            getattr(pipeline, name).register_forward_pre_hook(self._check_cancelled)
        self._thread = ThreadPoolExecutor(1, "encoder-engine")

    @property
    def draws_prior_tokens(self) -> bool:
        """Whether each output needs an encoding of its own, by its seed."""
        return hasattr(self.models.pipeline, "generate_prior_tokens")

    async def encode(self, orders: Sequence[Order], loop: Any) -> list[Conditioning]:
        """What a dit needs to make `orders`. Cancelling it ends the encoding at the next call of a model.

        Raises:
            StageError: the pipeline failed or refused an argument.
        """
        cancelled = threading.Event()
        try:
            return await loop.run_in_executor(self._thread, self._encode, orders, cancelled)
        finally:
            cancelled.set()

    def close(self) -> None:
        """Ends the thread."""
        self._cancelled.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # What follows runs in the engine's thread.

    def _encode(self, orders: Sequence[Order], cancelled: threading.Event) -> list[Conditioning]:
        self._cancelled = cancelled
        wanted = orders if self.draws_prior_tokens else orders[:1]
        metrics.STEP_BATCH.labels("encoder", "encode").observe(len(wanted))
        try:
            with torch.no_grad(), metrics.STEP_SECONDS.labels("encoder", "encode").time():
                return [_run(order) for order in wanted]
        except _Cancelled:
            raise RequestCancelled("the request was cancelled while its prompt was read") from None

    def _check_cancelled(self, module: Any, args: Any) -> None:
        if self._cancelled.is_set():
            raise _Cancelled


class _Cancelled(BaseException):
    """Ends a pipeline whose request is gone."""


def _run(order: Order) -> Conditioning:
    generator = torch.Generator("cpu").manual_seed(order.seed)
    with view(order.pipeline, lambda scheduler: None) as pipeline:
        order.conditioning.attach(pipeline)
        try:
            pipeline(**order.arguments, generator=generator, output_type="latent")
        except Stopped:
            return order.conditioning
        except Exception as error:
            raise explain(error) from error
    raise InternalError("the pipeline went past its encoders")


def _end_at(model: Any) -> None:
    """Pipelines stop where they would call `model`, which has no weights."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Stopped

    for name in ("forward", "encode", "decode"):
        if hasattr(model, name):
            setattr(model, name, stop)
