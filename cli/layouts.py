"""Which GPUs the stages of a model are on: what is possible, best first, and the first that fits."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from cli.budget import OTHERS, Budget, Demand, Gpus, Layout, other_shares, share_out
from cli.sizes import BudgetError, TooLittleMemory
from services.sizes import Sizes


class LayoutError(BudgetError):
    """No layout is as it is set."""


def layouts(
    sizes: Sizes, gpus: Gpus, demand: Demand, ranks: int | None = None, pinned: Mapping[str, int] | None = None
) -> Iterator[Layout]:
    """Layouts, best first: each stage on a GPU of its own, then the fewest GPUs for the thinker.

    Args:
        ranks: GPUs that the thinker must be split over; None: as many as it needs.
        pinned: stages that must be on one GPU, and its index.

    Raises:
        LayoutError: the dit's ranks need more GPUs.
    """
    pinned, count = pinned or {}, len(gpus.memory)
    if demand.dit_gpus > count:
        raise LayoutError(f"dit: context_parallel needs {demand.dit_gpus} GPUs, of which there are {count}")
    others = [stage for stage in OTHERS if stage in sizes.weights or stage in demand.fixed]
    if "thinker" not in sizes.weights:
        for places in _places(others, gpus.roomiest, sizes, gpus, demand, pinned) if others else ():
            yield Layout((), places)
        return
    splits = [1 << n for n in range(count.bit_length()) if sizes.heads % (1 << n) == 0]
    if "thinker" in pinned:
        splits = [1]
    for apart, split in product((True, False), splits):
        thinker = tuple(range(split))  # vLLM takes the first ones
        if split == 1:
            free = [gpu for gpu in gpus.roomiest if not apart or gpu not in pinned.values()]
            thinker = (pinned.get("thinker", (free or gpus.roomiest)[0]),)
        rest = [gpu for gpu in gpus.roomiest if gpu not in thinker] if apart else [thinker[0]]
        if ranks in (None, split) and rest and (others or not apart):
            for places in _places(others, rest, sizes, gpus, demand, pinned):
                yield Layout(thinker, places)


def _places(
    others: Sequence[str], rest: Sequence[int], sizes: Sizes, gpus: Gpus, demand: Demand, pinned: Mapping[str, int]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """GPUs of `rest` for the stages that are not set to one.

    First one each, as far as they go, then the last; then the stage that takes most on the GPU with most room left.
    """
    fixed: dict[str, tuple[int, ...]] = {stage: (pinned[stage],) for stage in others if stage in pinned}
    if demand.dit_gpus > 1:
        fixed["dit"] = tuple(range(demand.dit_gpus))
    chosen = [stage for stage in others if stage not in fixed]
    yield {stage: (rest[min(i, len(rest) - 1)],) for i, stage in enumerate(chosen)} | fixed
    if len(rest) == 1:
        return
    needs = {share.stage: share.total for share in other_shares(sizes, demand, Layout((), dict.fromkeys(others, (0,))))}
    left = {gpu: gpus.usable(gpu) - sum(needs[stage] for stage, on in fixed.items() if gpu in on) for gpu in rest}
    places = dict(fixed)
    for stage in sorted(chosen, key=lambda stage: -needs[stage]):
        roomiest = max(left, key=lambda gpu: left[gpu])
        left[roomiest] -= needs[stage]
        places[stage] = (roomiest,)
    yield places


def best(
    sizes: Sizes, gpus: Gpus, demand: Demand, ranks: int | None = None, pinned: Mapping[str, int] | None = None
) -> Budget:
    """The first layout's budget that fits. Raises TooLittleMemory; LayoutError: none is possible."""
    errors = []
    for layout in layouts(sizes, gpus, demand, ranks, pinned):
        try:
            return share_out(sizes, gpus, demand, layout)
        except TooLittleMemory as error:
            errors.append(error)
    if not errors:
        raise LayoutError(
            f"--tensor-parallel-size {ranks}: must be a power of two that divides {sizes.heads} attention heads, at "
            f"most the {len(gpus.memory)} GPUs that there are, and 1 with a --device of the thinker"
        )
    raise min(errors, key=lambda error: error.short_bytes)


def best_of(
    sizes: Sizes,
    gpus: Gpus,
    loads: Sequence[Demand],
    ranks: int | None = None,
    pinned: Mapping[str, int] | None = None,
) -> Budget:
    """As `best`, of the first of these loads that fits; of the last if none does."""
    *others, last = loads
    for demand in others:
        try:
            return best(sizes, gpus, demand, ranks, pinned)
        except TooLittleMemory:
            continue
    return best(sizes, gpus, last, ranks, pinned)
