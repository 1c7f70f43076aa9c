"""The process of all hostile clients."""

import collections
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.hostile.at_random import attacks, costly, sockets
from tests.hostile.at_random.attacker import Attacker, Target
from tests.hostile.test_requests import operations_of

KINDS: dict[Callable[[Attacker], str], float] = attacks.KINDS | sockets.KINDS
_LONGEST_OUTCOME = 400
Counts = dict[str, dict[str, int]]  # how often, by kind and outcome


def run(target: Target, keys: list[str], clients: int, seed: int, minutes: float, file: Path) -> None:
    """`clients` at a time, which share `keys`; writes the counts to `file`, again and again."""
    # on machines of their own, they would take no time of the servers'
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    document = httpx.get(f"{target.url}/openapi.json", timeout=60).json()
    target.operations = operations_of(document)
    for make in (*costly.SOUNDS.values(), *costly.PICTURES.values()):
        make()
    target.end_s = time.monotonic() + 60 * minutes
    counts, lock = collections.defaultdict[str, collections.Counter[str]](collections.Counter), threading.Lock()

    def attack(number: int) -> None:
        key = number % len(keys)
        client = Attacker(target, keys[key], f"127.0.1.{key + 1}", random.Random(f"{seed}/{number}"))
        while time.monotonic() < target.end_s:
            (kind,) = client.draw.choices(list(KINDS), list(KINDS.values()))
            try:
                outcome = kind(client)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            with lock:
                counts[kind.__name__][outcome[:_LONGEST_OUTCOME]] += 1

    threads = [threading.Thread(target=attack, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < target.end_s + 60:
        time.sleep(1)
        with lock:
            file.write_text(json.dumps(counts))
