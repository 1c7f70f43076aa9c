"""What Quartet adds to vLLM: models that keep hidden states, and a connector that sends them.

vLLM calls its connector API experimental: all that depends on it is in this package.
"""

import multiprocessing
import os
from pathlib import Path

from services.common.engine.process import end_with_parent, lower_priority
from services.common.telemetry import logs
from services.registry import families
from services.thinker.cpu import vllm_is_for_cpus
from services.thinker.plugin.background import let_others_go_first
from services.thinker.plugin.chosen_logprobs import keep_alternatives
from services.thinker.plugin.prompt_scores import score_prompts
from services.thinker.plugin.whole_media import keep_media_whole

SCRATCH_DIR = "QUARTET_SCRATCH_DIR"
"""Environment variable: directory to remove when the process that made it is gone."""


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls this in each of its processes."""
    from vllm import ModelRegistry

    for family in families():
        if family.has("thinker"):
            for architecture, model in family.part("thinker").ARCHITECTURES.items():
                ModelRegistry.register_model(architecture, model)  # by name: it is imported where it is needed
    logs.adopt("transformers")
    scratch_dir = os.environ.get(SCRATCH_DIR)
    end_with_parent(Path(scratch_dir) if scratch_dir else None)
    if multiprocessing.parent_process() is None:
        return
    keep_alternatives()
    score_prompts()
    keep_media_whole()
    if scratch_dir:
        let_others_go_first(Path(scratch_dir))
    if vllm_is_for_cpus():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, "services.thinker.plugin.prefix_attention.PrefixBackend")
        lower_priority()  # the event loops go before the engine; its other threads inherit the priority
