"""Attacks of the stages of a running system, beside somebody who is honest."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from services.common.rpc.channels import new_channel
from tests.hostile import services
from tests.hostile.calls import TYPED, answer, honest, rise
from tests.hostile.messages import attacks, methods
from tests.support.systems.stack import Stack

AT_ONCE = 8
MAX_RISE_MIB = 256  # of AT_ONCE messages of up to 16 MiB, and what they are read into
MAX_WAIT_S = 30.0  # of an honest call, on a machine that does much else
MAX_TEXT = 1000  # characters of a status
OWN = {"thinker": "ThinkerService", "talker": "TalkerService", "code2wav": "Code2WavService", "dit": "DitService"}


@asynccontextmanager
async def channel_to(stack: Stack, stage: str) -> AsyncIterator[grpc.aio.Channel]:
    identity = stack.access.credentials.identity if stack.access else None
    channel = new_channel(stack.addresses[stage], identity)
    try:
        yield channel
    finally:
        await channel.close()


@asynccontextmanager
async def bystander(stack: Stack, stage: str) -> AsyncIterator[None]:
    """Somebody asks the stage again and again in the block, and is answered."""
    waits: list[tuple[str, float]] = []
    name = {"thinker": "quartet.v1.ThinkerService/Generate"}.get(stage, "quartet.v1.ServerInfoService/GetServerInfo")

    async def ask(channel: grpc.aio.Channel) -> None:
        while True:
            began = time.monotonic()
            status, _ = await answer(channel, name, [honest(name)])
            waits.append((status, time.monotonic() - began))
            await asyncio.sleep(0.05)

    async with channel_to(stack, stage) as channel:
        asking = asyncio.create_task(ask(channel))
        try:
            yield
            end = len(waits) + 1
            async with asyncio.timeout(MAX_WAIT_S):
                while len(waits) < end:
                    await asyncio.sleep(0.02)
        finally:
            asking.cancel()
    assert {status for status, _ in waits} == {"OK"}
    assert max(wait_s for _, wait_s in waits) < MAX_WAIT_S


def rpcs(stage: str) -> list[str]:
    """The stage's own; what all stages have is attacked in tests/hostile/test_stages.py."""
    return [name for name in services.RPCS if name.startswith(f"quartet.v1.{OWN[stage]}/")]


async def attack(stack: Stack, stage: str, name: str, chosen: list[tuple[str, bytes]]) -> list[tuple[str, str, str]]:
    """(What, status, text) of each attack that is not answered as it should be."""
    found, limit = [], asyncio.Semaphore(AT_ONCE)

    async def one(channel: grpc.aio.Channel, what: str, data: bytes) -> None:
        async with limit:
            status, text = await answer(channel, name, [honest(name) + data])
            if status not in TYPED or len(text) > MAX_TEXT:
                found.append((what, status, text[:MAX_TEXT]))

    async with channel_to(stack, stage) as channel, asyncio.TaskGroup() as group:
        for what, data in chosen:
            group.create_task(one(channel, what, data))
    return found


async def attacked(stack: Stack, stage: str, part: slice) -> None:
    pid = stack.pid(stage)
    async with bystander(stack, stage):
        for name in rpcs(stage):
            chosen = list(attacks(methods()[name].input_type))[part] or [("nothing", b"")]
            with rise(pid) as cost:
                found = await attack(stack, stage, name, chosen)
            assert not found, (name, found)
            print(name, len(chosen), f"{cost.mib:.0f} MiB")
            assert cost.mib < MAX_RISE_MIB, name
    assert stack.pid(stage) == pid
