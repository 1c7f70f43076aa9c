"""Two ways to load a system: a fixed number of requests under way (closed loop), or arrivals at a rate (open loop)."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

PROMPTS = (
    "Tell me about the sea.",
    "Why is the sky blue in the morning?",
    "Name three things that swim.",
    "What does a train sound like?",
    "Describe a quiet street at night.",
    "How do bees find their way home?",
    "Say something kind to a friend.",
    "What is the best way to learn to sing?",
)

Answer = TypeVar("Answer")
Send = Callable[[str], Awaitable[Answer]]  # sends a prompt, returns when its answer is complete


async def closed_loop(send: Send[Answer], concurrency: int, requests: int) -> list[Answer]:
    """Runs `concurrency` workers, each of which sends its next request when its last is complete, `requests` in all.

    Request i has prompt i modulo the number of prompts.

    Returns:
        The answers in the order of their requests.
    """
    numbers = iter(range(requests))
    answers: dict[int, Answer] = {}

    async def work() -> None:
        for number in numbers:  # one iterator for all workers: each number is sent once
            answers[number] = await send(PROMPTS[number % len(PROMPTS)])

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[number] for number in range(requests)]


async def open_loop(send: Send[Answer], arrivals_s: Sequence[float]) -> list[Answer]:
    """Sends request i at `arrivals_s[i]` seconds from now, however many are still under way.

    Returns:
        The answers in the order of their requests.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def arrive(number: int, at_s: float) -> Answer:
        await asyncio.sleep(began + at_s - loop.time())
        return await send(PROMPTS[number % len(PROMPTS)])

    return await asyncio.gather(*(arrive(number, at_s) for number, at_s in enumerate(arrivals_s)))


def poisson_arrivals(rate_per_s: float, requests: int, seed: int) -> list[float]:
    """Seconds from the start at which `requests` requests of a Poisson process arrive; the first at 0."""
    times = random.Random(seed)
    return list(itertools.accumulate((times.expovariate(rate_per_s) for _ in range(requests - 1)), initial=0.0))


def line_arrivals(done_s: Sequence[float], concurrency: int, began_s: float) -> list[float]:
    """When the requests of a closed loop were sent to a server that takes one at a time, in order.

    Args:
        done_s: when each request was complete.
        concurrency: workers of the loop: `concurrency` requests are sent at `began_s`, then one at every end.
    """
    return [began_s if number < concurrency else done_s[number - concurrency] for number in range(len(done_s))]
