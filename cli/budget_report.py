"""A budget as a table, as settings of a .env file, as flags of `quartet up`; what fits on which GPUs."""

from collections.abc import Iterator, Sequence

from cli.budget import GIB, MIB, Budget, Demand, Gpus
from cli.layouts import best_of
from cli.sizes import BudgetError
from services.sizes import Sizes

# The table of docs/gpus.md: memory as nvidia-smi gives it, MiB.
MOST_GPUS = 8
GPUS = {
    "24 GB (RTX 4090)": 24_564,
    "48 GB (L40S)": 46_068,
    "80 GB (H100)": 81_559,
    "96 GB (RTX PRO 6000)": 97_887,
    "141 GB (H200)": 143_771,
}


def lines(budget: Budget) -> Iterator[str]:
    yield from share_lines(budget)
    yield ""
    yield "# for .env"
    if budget.layout.used == [0]:
        # .env.example has no short names for settings of these
        prefixes = {name: "QUARTET_" if name.startswith(("DIT_", "ALIGNER_")) else "" for name in budget.settings}
        yield from (f"{prefixes[name]}{name}={value}" for name, value in budget.settings.items())
    else:
        for stage, settings in settings_by_stage(budget).items():
            yield from (f"QUARTET_{stage}_{name}".upper() + f"={value}" for name, value in settings.items())
        yield ""
        yield "# for quartet up"
        yield from up_flags(budget)


def share_lines(budget: Budget) -> Iterator[str]:
    yield f"{'stage':<10}{'GPU':<6}{'weights':>9}{'working':>9}{'requests':>10}{'total':>8}  GiB"
    for share in budget.shares:
        parts = (share.weights, share.working, share.requests, share.total)
        weights, working, requests, total = (f"{part / GIB:.1f}" for part in parts)
        gpus = f"{share.gpus[0]}" if len(share.gpus) == 1 else f"{share.gpus[0]}-{share.gpus[-1]}"
        yield f"{share.stage:<10}{gpus:<6}{weights:>9}{working:>9}{requests:>10}{total:>8}  {share.note}"
    rooms = {gpu: (budget.free_bytes(gpu), budget.gpus.memory[gpu]) for gpu in budget.layout.used}
    for gpu, (free, memory) in rooms.items():
        if rooms.get(gpu - 1) != (free, memory):  # of a split thinker's GPUs one stands for those like it
            yield f"{'free':<10}{gpu:<6}{free / GIB:>36.1f}  of {memory / GIB:.1f}"


def settings_by_stage(budget: Budget) -> dict[str, dict[str, str]]:
    """By stage, its settings by name: those of .env, and its GPU."""
    by_stage: dict[str, dict[str, str]] = {}
    for share in budget.shares:
        prefix = f"{share.stage.upper()}_"
        place = {"device": f"cuda:{share.gpus[0]}"} if len(share.gpus) == 1 else {}
        if share.stage == "thinker":
            place["tensor_parallel_size"] = str(len(share.gpus))
        own = {
            name.removeprefix(prefix).lower(): value
            for name, value in budget.settings.items()
            if name.startswith(prefix)
        }
        by_stage[share.stage] = place | own
    return by_stage


def up_flags(budget: Budget) -> Iterator[str]:
    """Yields flags of `quartet up`."""
    for stage, settings in settings_by_stage(budget).items():
        for name, value in settings.items():
            yield f"--{stage}-arg={flag(name, value)}"


def flag(setting: str, value: str) -> str:
    """A stage's flag for a setting."""
    return f"--{setting.replace('_', '-')}={value}"


def table(sizes: Sizes, loads: Sequence[Demand]) -> Iterator[str]:
    """Yields the table of docs/gpus.md: layouts, and the thinker's KV caches in thousands of tokens, of the
    first of these loads that fits."""
    yield "| GPUs | " + " | ".join(str(gpus) for gpus in range(1, MOST_GPUS + 1)) + " |"
    yield "|---" * (MOST_GPUS + 1) + "|"
    for name, memory_mib in GPUS.items():
        cells = [_cell(sizes, memory_mib * MIB, gpus, loads) for gpus in range(1, MOST_GPUS + 1)]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(sizes: Sizes, gpu_bytes: int, gpus: int, loads: Sequence[Demand]) -> str:
    try:
        budget = best_of(sizes, Gpus.alike(gpu_bytes, gpus), loads)
    except BudgetError:
        return "-"
    return f"{budget.layout}: {budget.context_tokens // 1000}" if budget.context_tokens else f"{budget.layout}"
