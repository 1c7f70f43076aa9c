"""Thinkers of `published_folders`, built and loaded on the meta device as vLLM does on an H100.

A program: `python -m tests.rehearsal.support.thinker_loading`. It reads a list of `Loading` as JSON, and writes what
became of each, or its error.
"""

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.engine.weights import SINGLE_FILE
from tests.rehearsal.support.vllm_on_cuda import Gpu, choose, install

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * 1024**2)
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}
_UNREAD = ".g_idx"  # order of inputs, which vLLM needs only where the checkpoint has changed it


@dataclasses.dataclass(frozen=True)
class Loading:
    """A checkpoint's folder, and flags of the thinker."""

    folder: str
    flags: tuple[str, ...] = ()


class Written(TorchDispatchMode):
    """Counts the elements that are written to each memory."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.elements[_memory(args[0])] += args[0].numel()
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def load(wanted: Loading) -> dict[str, Any]:
    """Facts about the thinker:

    - model: its class; layers: whose states it records;
    - bytes of its parameters, and what the file has for them;
    - read: elements of its tensors; written: elements of its parameters, together;
    - incomplete: (written, elements) of each parameter that is not written once;
    - adapters: bytes by vLLM's name of the layer.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _config(wanted)
    rotary_embedding._ROPE_DICT.clear()  # else those of the model before are built in
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        be_the_only_rank()
        with torch.device("meta"):
            model: Any = initialize_model(vllm_config=config)
        kind = type(model)
        found = {"model": f"{kind.__module__}.{kind.__name__}", "layers": list(model._layers)}
        found |= _load(model, Path(wanted.folder, SINGLE_FILE))
        found["adapters"] = _adapters(model, config) if config.lora_config else {}
    return found


def _config(wanted: Loading) -> Any:
    from vllm.usage.usage_lib import UsageContext

    from services.thinker import device, environment, execution
    from services.thinker.config import ThinkerSettings
    from services.thinker.family import load_checkpoint

    settings = ThinkerSettings.load([f"--model={wanted.folder}", *wanted.flags])
    environment.configure(settings)
    args = execution.engine_args(settings, load_checkpoint(wanted.folder), "ipc:///nowhere", device.accelerator())
    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def be_the_only_rank() -> None:
    """Starts vLLM's process groups, with `set_current_vllm_config`."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if not torch.distributed.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
            initialize_model_parallel(1, 1)


def _stored(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors like those of a safetensors file, which is too large to be opened."""
    with path.open("rb") as file:
        stated = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, each in stated.items():
        yield name, torch.empty(each["shape"], dtype=_DTYPES[each["dtype"]], device="meta")


def _load(model: Any, path: Path) -> dict[str, Any]:
    parameters, stored = dict(model.named_parameters()), dict(_stored(path))
    with Written() as written:
        model.load_weights(iter(stored.items()))
    counts = {name: (written.elements[_memory(each)], each.numel()) for name, each in parameters.items()}
    own = [each for name, each in stored.items() if name.startswith("thinker.") and not name.endswith(_UNREAD)]
    return {
        "bytes": sum(each.nbytes for each in parameters.values()),
        "stored_bytes": sum(each.nbytes for each in own),
        "read": sum(each.numel() for each in own),
        "written": sum(times for times, _ in counts.values()),
        "incomplete": {name: both for name, both in counts.items() if both[0] != both[1]},
    }


def _adapters(model: Any, config: Any) -> dict[str, int]:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    for layer in model.modules():
        if isinstance(layer, RoutedExperts):  # which have a kernel from here on
            layer.quant_method.process_weights_after_loading(layer)
    limits, vocabulary = config.scheduler_config, config.model_config.get_vocab_size()
    most = limits.max_num_seqs, limits.max_num_batched_tokens
    manager = LoRAModelManager(model, *most, vocabulary, config.lora_config, torch.device("meta"), config)
    taken: dict[str, dict[int, int]] = {}
    for name, layer in manager.modules.items():
        memories = taken.setdefault(name.rpartition(".")[2], {})
        for member, value in vars(layer).items():
            if member.endswith("_stacked"):
                memories |= {_memory(each): each.untyped_storage().nbytes() for each in _flat(value)}
    return {name: sum(memories.values()) for name, memories in taken.items()}


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from _flat(each)


def _or_error(wanted: Loading) -> dict[str, Any]:
    try:
        return load(wanted)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    loadings = [Loading(**each) for each in json.load(sys.stdin)]
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        choose(H100)
        json.dump([_or_error(each) for each in loadings], sys.stdout)


if __name__ == "__main__":
    main()
