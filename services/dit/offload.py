"""Offloading of whole models, where outputs interleave."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import UserCpuOffloadHook
from accelerate.utils.memory import clear_device_cache


def offload_models(pipeline: Any, device: torch.device) -> None:
    """Keeps the models of `pipeline` on the CPU, but for the one that was called last: that is on `device`.

    diffusers' hooks send away the model that stands before the called one in the pipeline's order. That is enough for
    one output after the other. Here a prompt may be read while another output denoises, and Wan's two transformers may
    take turns: the model to send away is the one that is there.
    """
    pipeline.enable_model_cpu_offload(device=device)
    place = _Place()
    for hook in pipeline._all_hooks:
        hook.hook.pre_forward = place.takes(hook)


class _Place:
    """On the device, for one model."""

    def __init__(self) -> None:
        self._here: UserCpuOffloadHook | None = None

    def takes(self, hook: UserCpuOffloadHook) -> Callable[..., Any]:
        """What accelerate is to run before a call of the hook's model."""
        bring = hook.hook.pre_forward

        def pre_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._here is not None and self._here is not hook:
                self._here.offload()
                clear_device_cache()
            self._here = hook  # before it comes: if only a part of it fits, that part is sent away
            return bring(module, *args, **kwargs)

        return pre_forward
