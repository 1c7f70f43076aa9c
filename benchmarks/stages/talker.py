"""The talker alone: one step is one frame of every stream, all passes of the code predictor included."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stages.real_sizes import TALKER, TEXT_IDS
from benchmarks.stages.timing import Stage, parameter_bytes
from services.common.engine.device import Accelerator, Capturer, CudaGraphs, captures
from services.talker import execution
from services.talker.model import TalkerModel
from services.talker.moe import Experts, grouped_experts
from services.talker.runner import Advance, StepInput, TalkerRunner
from services.talker.sampling import resolve


def talker_stage(model: TalkerModel, batch: int, context: int) -> Stage:
    """`batch` streams with `context` cached positions each, sampled as the published model does by default.

    A step takes the path that it takes in the service: on CUDA it is one captured graph.
    """
    sampling = resolve(TALKER.defaults, seed=0)
    width, predictor_width = sampling.top_k, sampling.predictor_top_k
    frame = 0

    def runner_of_all(capturer: Capturer | None) -> TalkerRunner:
        runner = TalkerRunner(model, batch, context + 64, capturer)
        for slot in range(batch):
            runner.assign(slot, replace(sampling, seed=slot))
        return runner

    def step(runner: TalkerRunner) -> torch.Tensor:
        nonlocal frame
        frame += 1
        inputs = [
            StepInput(
                slot,
                frame,
                width,
                predictor_width,
                Advance((slot * 97 + frame) % TEXT_IDS, context, context),  # the context stays as long as it is
            )
            for slot in range(batch)
        ]
        return runner.step(inputs)

    model.use_experts(grouped_experts)  # whose products say what they read
    experts = _experts_hit(lambda: step(runner_of_all(None)))
    accelerator = Accelerator.of(model.device)
    model.use_experts(execution.experts(accelerator, str(model.dtype).removeprefix("torch.")))
    timed = runner_of_all(CudaGraphs(model.device) if captures("auto", accelerator) else None)
    return Stage(
        lambda: step(timed),
        1,
        lambda: _step_bytes(model, batch, context, experts),
        lambda: f"{experts:.1f} experts a layer",
    )


class _ExpertsHit(TorchDispatchMode):
    """Counts the experts of each grouped matrix product that get a token. It waits for the device each time."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            ends = args[2]
            self.counts.append(int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum()))
        return func(*args, **(kwargs or {}))


def _experts_hit(step: Callable[[], object]) -> float:
    """Experts of a layer that `step`, which is not captured, reads: mean over layers."""
    with _ExpertsHit() as hit:
        step()
    return sum(hit.counts) / len(hit.counts)


def _step_bytes(model: TalkerModel, batch: int, context: int, experts_hit: float) -> int:
    """Weights of one pass of the talker with the experts that are hit, of all passes of the code predictor, and the
    cached keys and values. Rows of embedding tables are left out: they are a few KiB."""
    assert TALKER.moe is not None
    all_experts = sum(parameter_bytes(module) for module in model.model.modules() if isinstance(module, Experts))
    stack = parameter_bytes(model.model.layers) - all_experts + round(all_experts * experts_hit / TALKER.moe.experts)
    predictor = model.code_predictor
    assert predictor is not None
    passes = TALKER.num_code_groups  # one for the talker's state, one for each code but the last
    predictor_bytes = passes * parameter_bytes(predictor.model.layers) + parameter_bytes(predictor.lm_head)
    sizes = TALKER.talker
    row_bytes = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * model.dtype.itemsize
    return stack + parameter_bytes(model.codec_head) + predictor_bytes + batch * (context + 1) * row_bytes
