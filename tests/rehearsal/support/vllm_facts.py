"""What vLLM makes of the thinker's settings on GPUs that are not here, and what the thinker says of them.

A program: `python -m tests.rehearsal.support.vllm_facts`. It reads a list of `Run` as JSON and writes, for each of
them, the facts of its cases. Nothing is computed: models are built on the meta device.
"""

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from tests.rehearsal.support.vllm_on_cuda import Gpu, choose, install

ROWS_ADDRESS = "ipc:///nowhere"
LORA = ("max_loras", "max_lora_rank", "max_cpu_loras")


@dataclasses.dataclass(frozen=True)
class Case:
    """How a thinker is started: model folder, flags and environment variables."""

    model: str
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """Cases on one machine."""

    gpu: Gpu
    cases: dict[str, Case]

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Run":
        gpu = Gpu(**given["gpu"] | {"capability": tuple(given["gpu"]["capability"])})
        return cls(gpu, {name: Case(**case) for name, case in given["cases"].items()})


def facts(case: Case) -> dict[str, Any]:
    """Starts a thinker's engine, up to the engine's configuration. `said` is its line `execution paths` in the log."""
    from structlog.testing import capture_logs
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.thinker import engine, environment
    from services.thinker.config import ThinkerSettings
    from services.thinker.family import load_checkpoint

    settings = ThinkerSettings.load([f"--model={case.model}", *case.flags])
    environment.configure(settings)
    with patch.object(AsyncLLM, "from_vllm_config", lambda config, **_: config), capture_logs() as logged:
        config = cast(Any, engine._load(settings, load_checkpoint(case.model), ROWS_ADDRESS))
    (line,) = [each for each in logged if each["event"] == "execution paths"]
    found = {"said": {part: line[part] for part in line["reasons"]}, **_of_config(config)}
    if settings.tensor_parallel_size == 1:
        found |= _of_model(config)
    return found


def _of_config(config: Any) -> dict[str, Any]:
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    compilation, scheduler, cache = config.compilation_config, config.scheduler_config, config.cache_config
    lora = config.lora_config
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "compilation": compilation.mode.name,
        "cuda_graphs": compilation.cudagraph_mode.name,
        "captured_tokens": list(compilation.cudagraph_capture_sizes or ()),
        "sampler": "FlashInfer" if flashinfer_sampler_supported() else "native",
        "ranks": config.parallel_config.tensor_parallel_size,
        "executor": config.parallel_config.distributed_executor_backend.__name__,
        "connector": config.kv_transfer_config.kv_connector,
        "step_tokens": scheduler.max_num_batched_tokens,
        "requests": scheduler.max_num_seqs,
        "async_scheduling": scheduler.async_scheduling,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "prefix_caching": cache.enable_prefix_caching,
        "context_tokens": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "gpu_share": cache.gpu_memory_utilization,
        "kv_cache_bytes": cache.kv_cache_memory_bytes,
        "lora": lora and {name: getattr(lora, name) for name in LORA},
    }


def _of_model(config: Any) -> dict[str, Any]:
    """Builds the model as vLLM's worker does."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.selector import get_attn_backend

    from services.thinker.plugin.connector import settings_of
    from services.thinker.plugin.recording import kv_bytes_per_slot
    from services.thinker.plugin.rows import row_bytes
    from tests.rehearsal.support.thinker_loading import be_the_only_rank

    shape, cache = config.model_config, config.cache_config
    rotary_embedding._ROPE_DICT.clear()  # else those of the model before are built in
    with set_current_vllm_config(config), set_default_torch_dtype(shape.dtype):
        be_the_only_rank()
        with torch.device("meta"):
            model = initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
        specs = {layer.layer_name: layer.get_kv_cache_spec(config) for layer in layers}
        config.attention_config.backend = None
        heads = shape.get_num_attention_heads(config.parallel_config)
        own_choice = get_attn_backend(shape.get_head_size(), shape.dtype, cache.cache_dtype, num_heads=heads)
    rotary = [layer for layer in model.modules() if isinstance(layer, MRotaryEmbedding)]
    settings = settings_of(config)
    assert settings is not None
    return {
        "model": type(model).__module__,
        "layers": len(layers),
        "attention": sorted({layer.attn_backend.get_name() for layer in layers}),
        "attention_of_vllm": own_choice.get_name(),
        "rotary_embedding": sorted({layer._forward_method.__name__ for layer in rotary}),
        "block_tokens": cache.block_size,
        "kv_bytes_per_token": kv_bytes_per_slot({name: spec for name, spec in specs.items() if spec is not None}),
        "row_bytes_per_token": row_bytes(settings.kinds, shape.dtype),
    }


def run(given: Run, out: Path) -> None:
    """In a process of its own: vLLM keeps what it has asked of the GPU. `out` takes the facts by case, as JSON."""
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        if status:
            raise SystemExit(f"the process of {given.gpu} ended with status {status}")
        return
    status = 1
    try:
        choose(given.gpu)
        found = {}
        for name, case in given.cases.items():
            with patch.dict(os.environ, case.variables):
                found[name] = facts(case)
        out.write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    runs = [Run.of(each) for each in json.load(sys.stdin)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install(folder)
        for name in ("transformers.models.auto.processing_auto", "vllm.engine.arg_utils"):
            importlib.import_module(name)  # it takes long and asks nothing of the GPU: each process of `run` has it
        for number, each in enumerate(runs):
            run(each, folder / f"{number}.json")
        json.dump([json.loads((folder / f"{number}.json").read_text()) for number in range(len(runs))], sys.stdout)


if __name__ == "__main__":
    main()
