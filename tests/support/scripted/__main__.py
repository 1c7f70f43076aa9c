"""Scripted stages in a process of their own, until their parent closes standard input: one that speaks for any gateway.

Prints their addresses as JSON. Arguments: the least and the most seconds that the thinker thinks, and that a dit, which
makes videos, waits before it begins.
"""

import asyncio
import json
import random
import sys

from tests.support.clients.voices import IMITATOR
from tests.support.scripted.stages import scripted_stages
from tests.support.systems.video import VIDEO_INFO, scripted_dit


async def main(least_s: float, most_s: float) -> None:
    async with scripted_stages() as stages, scripted_dit(VIDEO_INFO) as dit:
        stages.infos["talker"].info.talker.CopyFrom(IMITATOR)
        stages.scripts["thinker"].takes_s = lambda: random.uniform(least_s, most_s)
        dit.script.takes_s = stages.scripts["thinker"].takes_s
        print(json.dumps(stages.addresses | {"dit": dit.address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
