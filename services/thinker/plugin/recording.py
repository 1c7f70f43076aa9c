"""What a model of vLLM's needs to keep rows of its forward pass. Imports vLLM."""

from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from services.thinker.plugin import store
from services.thinker.plugin.connector import PluginSettings, settings_of


class Recorder:
    """Mixin of a vLLM model: writes rows of every token to the process's RowStore."""

    _slots_of_layer: str | None = None

    @staticmethod
    def recording(vllm_config: VllmConfig) -> PluginSettings | None:
        """What is to be kept, or None where vLLM runs without our connector.

        Raises:
            ValueError: it cannot be kept with this config.
        """
        settings = settings_of(vllm_config)
        if settings and vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("hidden states cannot be kept with pipeline_parallel_size > 1")
        return settings

    def record(self, rows: Sequence[torch.Tensor]) -> None:
        """Keeps the rows of a forward pass: for each kind of the settings, in order, (tokens, width)."""
        slots = self._slots()
        if slots is not None and (kept := store.installed()) is not None:
            kept.write(slots, rows)

    def _slots(self) -> torch.Tensor | None:
        """KV slot of each token of the batch, or None in a run without a KV cache (memory profiling)."""
        mapping = get_forward_context().slot_mapping
        if not isinstance(mapping, dict):
            raise ValueError("hidden states cannot be kept with micro-batching (enable_dbo)")
        if not mapping:
            return None
        # All layers of the language model are in one KV cache group and share their slots.
        if self._slots_of_layer is None:
            self._slots_of_layer = next(iter(mapping))
        return mapping[self._slots_of_layer]
