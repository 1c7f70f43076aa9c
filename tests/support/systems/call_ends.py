"""Ways in which calls by WebRTC end."""

import asyncio

from tests.support.clients.caller import Caller
from tests.support.systems.calls import CallServer

NO_TURNS = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


async def ask(caller: Caller) -> None:
    """A question in writing, which is answered."""
    caller.send("session.update", session=NO_TURNS)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}
    caller.send("conversation.item.create", item=item)
    caller.send("response.create")


async def close(server: CallServer, caller: Caller) -> None:
    await caller.close()


async def hang_up(server: CallServer, caller: Caller) -> None:
    await server.gateway.http.post(f"{caller.location}/hangup")
    await caller.close()


async def vanish(server: CallServer, caller: Caller) -> None:
    transport = caller.connection.sctp.transport.transport  # pyright: ignore[reportOptionalMemberAccess]
    await transport._connection.close()  # of ICE: nothing is said
    call_id = caller.location.rpartition("/")[2]
    await server.gateway.until(lambda: call_id not in [each.id for each in server.calls])
    await caller.close()


async def close_channel(server: CallServer, caller: Caller) -> None:
    caller.channel.close()
    await asyncio.sleep(0.1)
    await caller.close()


async def talk_nonsense(server: CallServer, caller: Caller) -> None:
    for text in (
        "",
        "{",
        "[]",
        "null",
        '{"type": 3}',
        '{"type": "x"}',
        "[" * 5000,
        b"\x00\xff",
        '{"type":"session.update"}',
    ):
        caller.channel.send(text)
    for _ in range(8):
        await caller.until("error")
    await caller.close()


async def leave_amid_an_answer(server: CallServer, caller: Caller) -> None:
    await ask(caller)
    await caller.until("response.created")
    await caller.close()


ENDS = (close, hang_up, vanish, close_channel, talk_nonsense, leave_amid_an_answer)
