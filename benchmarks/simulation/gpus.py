"""How long a step takes on a GPU, and what the GPU holds."""

from dataclasses import dataclass

from benchmarks.simulation.costs import Costs
from cli.budget import Demand, Gpus, Layout, other_shares, share_out
from cli.budget_report import GPUS
from cli.sizes import published_sizes

_MIB = 1024 * 1024
_TALKER_POSITIONS = 4096  # of an answer: its prompt, and 2,000 frames
_THINKER_CONTEXT = 32_768
BANDWIDTH_GB_PER_S = {"80 GB (H100)": 3350.0, "141 GB (H200)": 4800.0}  # NVIDIA's data sheets, SXM
NAMES = {"h100": "80 GB (H100)", "h200": "141 GB (H200)"}


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, with a stage to itself.

    Attributes:
        bytes_per_ms: gigabytes that a step reads in a millisecond.
        thinker_tokens: of contexts that a thinker holds, running or cached.
        talker_streams: that a talker has slots for.
    """

    name: str
    bytes_per_ms: float
    thinker_tokens: int
    talker_streams: int

    @classmethod
    def named(cls, name: str, costs: Costs) -> "Gpu":
        """`name`: see NAMES."""
        title, sizes = NAMES[name], published_sizes()
        memory = GPUS[title] * _MIB
        apart = Layout((0,), dict.fromkeys(("talker", "code2wav"), (1,)))
        tokens = share_out(sizes, Gpus.alike(memory, 2), Demand(context_tokens=_THINKER_CONTEXT), apart).context_tokens
        usable, streams = Gpus.alike(memory).usable(0), 1
        while _talker_bytes(2 * streams) <= usable:
            streams *= 2
        return cls(title, BANDWIDTH_GB_PER_S[title] * costs.bandwidth_share / 1000, tokens, streams)


def _talker_bytes(streams: int) -> int:
    shares = other_shares(published_sizes(), Demand(streams=streams, talker_positions=_TALKER_POSITIONS), Layout())
    return next(share.total for share in shares if share.stage == "talker")


def expected_share(used: int, experts: int, rows: float) -> float:
    """Of `experts` of which each of `rows` uses `used`, independently: the expected share that any uses."""
    return 1 - (1 - used / experts) ** rows


@dataclass(frozen=True)
class Steps:
    """Step times in seconds, from `costs` and the bandwidth of `gpu`."""

    costs: Costs
    gpu: Gpu

    def thinker(self, running: int, tokens: float) -> float:
        """One token of each of `running` answers, whose contexts have `tokens` in all."""
        costs = self.costs
        experts = costs.thinker_experts_gb * expected_share(8, 128, running)
        read = costs.thinker_dense_gb + experts + costs.context_gb * tokens
        return (costs.thinker_launch_ms + read / self.gpu.bytes_per_ms) / 1000

    def thinker_prefill(self, positions: float, running: int, tokens: float) -> float:
        """A step with a part of a prompt beside the answers. A long part uses all experts."""
        return self.thinker(running, tokens) + positions * self.costs.prefill_ms / 1000

    def talker(self, running: int, positions: float) -> float:
        """One frame of each of `running` answers, which have `positions` in all."""
        costs = self.costs
        experts = costs.talker_experts_gb * expected_share(6, 128, running)
        read = costs.talker_dense_gb + experts + costs.talker_context_gb * positions
        return (costs.talker_launch_ms + read / self.gpu.bytes_per_ms) / 1000

    def talker_prefill(self, positions: float, running: int, tokens: float) -> float:
        """A step of prompts, without frames."""
        return self.costs.talker_prefill_ms / 1000

    def decoder(self, frames: int) -> float:
        costs = self.costs
        return (costs.decoder_launch_ms + costs.decoder_frame_gb * frames / self.gpu.bytes_per_ms) / 1000
