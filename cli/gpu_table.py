"""The table of docs/gpus.md: what fits on one to eight GPUs of a kind."""

from collections.abc import Iterator

from cli.budget import MIB, Demand, best
from cli.sizes import BudgetError, Sizes

MOST_GPUS = 8
# Memory as nvidia-smi gives it, MiB.
GPUS = {
    "24 GB (RTX 4090)": 24_564,
    "48 GB (L40S)": 46_068,
    "80 GB (H100)": 81_559,
    "96 GB (RTX PRO 6000)": 97_887,
    "141 GB (H200)": 143_771,
}


def table(sizes: Sizes, demand: Demand) -> Iterator[str]:
    """Its lines, in Markdown. A cell has the layout, and how many thousand tokens the thinker's KV cache holds."""
    yield "| GPUs | " + " | ".join(str(gpus) for gpus in range(1, MOST_GPUS + 1)) + " |"
    yield "|---" * (MOST_GPUS + 1) + "|"
    for name, memory_mib in GPUS.items():
        cells = [_cell(sizes, memory_mib * MIB, gpus, demand) for gpus in range(1, MOST_GPUS + 1)]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(sizes: Sizes, gpu_bytes: int, gpus: int, demand: Demand) -> str:
    try:
        budget = best(sizes, gpu_bytes, gpus, demand)
    except BudgetError:
        return "-"
    return f"{budget.layout}: {budget.context_tokens // 1000}"
