"""A whole system with mutual TLS and API keys: it speaks, lets nobody else in, and changes certificates under load."""

import asyncio
import concurrent.futures

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.access.api_keys import new_key
from services.common.rpc import channels
from tests.support.deployment.health_command import healthy
from tests.support.network.certificates import credentials, make, serial, shown
from tests.support.systems.stack import ANSWER_GUARD_S, IDENTITY, Stack, until

pytestmark = pytest.mark.e2e

LONG = 300  # tokens and frames: seconds of work, more than a stage takes to notice a new file
SPEECH = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "modalities": ["text", "audio"],
    "audio": {"format": "pcm16"},
    "stream": True,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(stack: Stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0, timeout=60) as opened:
        yield opened


def speak(client: openai.OpenAI, max_tokens: int, max_frames: int) -> int:
    """Characters of speech, in base64, of an answer that came to its end."""
    quartet = {"talker": {"temperature": 1, "seed": 3, "max_frames": max_frames}}
    more = {"extra_body": {"quartet": quartet, "ignore_eos": True}, "max_tokens": max_tokens}
    model = client.models.list().data[0].id
    size, finished = 0, False
    for chunk in client.chat.completions.create(model=model, **SPEECH, **more):
        audio = getattr(chunk.choices[0].delta, "audio", None)
        size += len(audio.data or "") if audio else 0
        finished = finished or chunk.choices[0].finish_reason is not None
    assert finished
    return size


def test_it_speaks(client):
    assert speak(client, max_tokens=8, max_frames=8) > 0


async def test_nobody_reaches_a_stage_without_a_certificate_of_the_ca(stack, tmp_path):
    make(tmp_path, "stranger")
    for address in stack.addresses.values():
        for identity in (None, credentials(tmp_path, "stranger").identity):
            async with channels.new_channel(address, identity) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await check(health_pb2.HealthCheckRequest(), timeout=ANSWER_GUARD_S)
                assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_the_images_health_command_needs_no_certificate(stack):
    for process in stack.state["processes"].values():
        port = int(process["metrics_address"].rpartition(":")[2])
        for path in ("/health", "/ready"):
            until(lambda port=port, path=path: healthy(port, path) == (0, ""), f"{path} within the command's 5 s")


def test_without_the_key_nobody_is_answered(stack):
    with (
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key=new_key(), max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


async def test_certificates_change_without_a_failed_request(stack, client):
    """Long answers that began before the change, short ones meanwhile, and new certificates everywhere."""
    directory = stack.access.certificates
    before = serial(directory, IDENTITY)

    async def changed_everywhere() -> bool:
        """Opens connections to look: a stage reads its files when one comes, at most once a second."""
        addresses = stack.addresses.values()
        serials = [await asyncio.to_thread(shown, address, directory, IDENTITY) for address in addresses]
        assert set(serials) <= {before, serial(directory, IDENTITY)}
        return before not in serials and "TLS files read again" in stack.log("gateway")

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        long = [threads.submit(speak, client, LONG, LONG)]
        await asyncio.to_thread(speak, client, 8, 8)  # when it has ended the long one has begun
        make(directory, IDENTITY)
        is_changed = False
        while not is_changed:  # while short ones are answered, the first before anybody has looked
            both = [threads.submit(speak, client, 8, 8) for _ in range(2)]
            assert all(await asyncio.gather(*map(asyncio.wrap_future, both)))
            is_changed = await changed_everywhere()
            if long[-1].done():  # a fast machine
                long.append(threads.submit(speak, client, LONG, LONG))
        assert await asyncio.to_thread(speak, client, 8, 8) > 0
        assert all(await asyncio.gather(*map(asyncio.wrap_future, long)))
    assert serial(directory, IDENTITY) != before
    assert stack.ready()
    until(lambda: set(stack.in_flight().values()) == {0}, "a stage counts a request out just after its last word")
