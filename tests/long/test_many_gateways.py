"""Three gateways with one database, round robin: clients go on while gateways are killed or stand still. The round is
nginx's where that is installed.

What is checked at the end: every response in the background has ended exactly once, and each gateway says the same of
it; nothing of one key was seen by the other.
"""

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from gateway.store.clock import LEASE_S
from tests.support.clients.voices import SAMPLE, keys
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH
from tests.support.systems.gateways import Gateways, gateways, has_nginx
from tests.support.systems.stack import stopped

TEXT = "".join(PIECES)
OWNERS = ("alice", "bob")
ENDED = ("completed", "failed", "cancelled", "incomplete")
GUARD_S = 120.0
pytestmark = pytest.mark.timeout(1800)


@dataclass
class Clients:
    """What clients of the gateways at `urls` did and saw: each request goes to the next one.

    Attributes:
        requests: by how they ended.
        jobs: (owner, first end that was seen) of each response in the background.
        kept: (owner, path) of what stays.
    """

    urls: Sequence[str]
    requests: Counter[str] = field(default_factory=Counter)
    jobs: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)

    async def __aenter__(self) -> "Clients":
        self._http, self._next = httpx.AsyncClient(timeout=GUARD_S, verify=False), itertools.cycle(self.urls)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, owner: str, method: str, path: str, **sent: Any) -> Any:
        """The body of the answer. A gateway that is killed ends a request, and the client sends it again, as OpenAI's
        does."""
        key, may_be = sent.pop("key", owner), sent.pop("may_be", None)
        answer: httpx.Response | None = None
        for _ in range(100):
            try:
                answer = await self._http.request(
                    method, next(self._next) + path, headers={"authorization": f"Bearer {key}"}, **sent
                )
            except httpx.TransportError:
                self.requests["broken off"] += 1
                await asyncio.sleep(0.1)
                continue
            self.requests[str(answer.status_code)] += 1
            if answer.status_code in (502, 503, 504):
                await asyncio.sleep(0.1)
                continue
            if answer.status_code == may_be or (answer.status_code in (404, 409) and method in ("DELETE", "POST")):
                return None  # the try before did it, and its answer was lost
            assert answer.status_code == 200, f"{method} {path}: {answer.status_code} {answer.text}"
            return answer.json() if "json" in answer.headers["content-type"] else answer.content
        raise AssertionError(f"{method} {path}: no gateway answers: {answer and answer.text}")

    async def chain(self, owner: str) -> None:
        """Responses that build on each other, at any gateway."""
        made = await self.ask(owner, "POST", "/v1/responses", json={"model": "scripted", "input": "hi"})
        more = {"model": "scripted", "input": "more", "previous_response_id": made["id"]}
        second = await self.ask(owner, "POST", "/v1/responses", json=more)
        found = await self.ask(owner, "GET", f"/v1/responses/{second['id']}")
        assert found["output"][0]["content"][0]["text"] == TEXT
        self.kept.append((owner, f"/v1/responses/{second['id']}"))

    async def background(self, owner: str) -> None:
        body = {"model": "scripted", "input": "hi", "background": True}
        made = await self.ask(owner, "POST", "/v1/responses", json=body)
        self.jobs[made["id"]] = (owner, None)
        while (now := await self.ask(owner, "GET", f"/v1/responses/{made['id']}"))["status"] not in ENDED:
            await asyncio.sleep(0.2)
        self.jobs[made["id"]] = (owner, now["status"])
        self.kept.append((owner, f"/v1/responses/{made['id']}"))

    async def conversation(self, owner: str) -> None:
        made = await self.ask(owner, "POST", "/v1/conversations", json={"metadata": {"of": owner}})
        path = f"/v1/conversations/{made['id']}"
        said = {"type": "message", "role": "user", "content": "earlier"}
        await self.ask(owner, "POST", f"{path}/items", json={"items": [said]})
        body = {"model": "scripted", "input": "hi", "conversation": made["id"]}
        await self.ask(owner, "POST", "/v1/responses", json=body)
        items = (await self.ask(owner, "GET", f"{path}/items"))["data"]
        assert len(items) >= 3, items  # a request that was sent twice may have been answered twice
        self.kept.append((owner, path))

    async def voice(self, owner: str) -> None:
        name = f"voice{random.randrange(10**9)}"
        form = {"name": (None, name), "consent": (None, "cons_1"), "audio_sample": ("sample", SAMPLE)}
        await self.ask(owner, "POST", "/v1/audio/voices", files=form)
        listed = (await self.ask(owner, "GET", "/v1/audio/voices"))["voices"]
        (voice_id,) = [voice["id"] for voice in listed if voice["name"] == name]
        body = {"model": "scripted", "input": "Good morning.", "voice": voice_id, "response_format": "pcm"}
        assert await self.ask(owner, "POST", "/v1/audio/speech", json=body)
        await self.ask(owner, "DELETE", f"/v1/audio/voices/{voice_id}")

    async def secret(self, owner: str) -> None:
        made = await self.ask(owner, "POST", "/v1/realtime/client_secrets", json={})
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        answer = await self.ask(owner, "POST", "/v1/chat/completions", json=chat, key=made["value"])
        assert answer["choices"][0]["message"]["content"] == TEXT

    async def spoken(self, owner: str) -> None:
        """Two turns, the second of which refers to the sound of the first."""
        user = {"role": "user", "content": "hi"}
        chat = {"model": "scripted", "modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
        first = await self.ask(owner, "POST", "/v1/chat/completions", json=chat | {"messages": [user]})
        audio_id = first["choices"][0]["message"]["audio"]["id"]
        await asyncio.sleep(0.5)  # it is in the database a moment later
        turns = [user, {"role": "assistant", "audio": {"id": audio_id}}, user]
        answered = await self.ask(owner, "POST", "/v1/chat/completions", json=chat | {"messages": turns}, may_be=400)
        if answered is None:  # its gateway was killed before it had stored it
            self.requests["audio ids lost"] += 1

    async def file(self, owner: str) -> None:
        form = {"purpose": (None, "user_data"), "file": ("a.txt", owner.encode() * 1000)}
        made = await self.ask(owner, "POST", "/v1/files", files=form)
        assert await self.ask(owner, "GET", f"/v1/files/{made['id']}/content") == owner.encode() * 1000
        self.kept.append((owner, f"/v1/files/{made['id']}"))

    async def look_at_others(self) -> None:
        """Nothing of another key is ever seen."""
        for owner, path in random.sample(self.kept, min(3, len(self.kept))):
            (other,) = set(OWNERS) - {owner}
            try:
                answer = await self._http.get(next(self._next) + path, headers={"authorization": f"Bearer {other}"})
            except httpx.TransportError:
                continue
            assert answer.status_code in (404, 502, 503, 504), path

    @property
    def flows(self) -> list[Callable[[str], Coroutine[Any, Any, None]]]:
        flows = [self.chain, self.conversation, self.voice, self.secret, self.spoken, self.file]
        return [*flows, self.background, self.background]


@asynccontextmanager
async def three(folder: Path, database_url: str, least_s: float, most_s: float) -> AsyncIterator[Gateways]:
    """Their thinker thinks from `least_s` to `most_s` before it writes."""
    (folder / "signing.key").write_bytes(random.randbytes(32))
    shared = {
        "database_url": database_url,
        "api_keys_file": keys(folder),
        "signing_key_file": folder / "signing.key",
        "files_dir": folder / "files",
    }
    command = [sys.executable, "-m", "tests.support.scripted", str(least_s), str(most_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stages:
        assert stages.stdout is not None
        addresses = json.loads(stages.stdout.readline())
        async with gateways(3, SPEECH, addresses, folder, **shared) as started:
            yield started


@pytest.mark.parametrize(
    ("requests", "kills"),
    [
        pytest.param(100, 3, marks=pytest.mark.long),
        pytest.param(1000, 30, marks=pytest.mark.weekly),
    ],
)
async def test_clients_go_on_while_gateways_are_killed(
    tmp_path: Path, postgres_url: str, requests: int, kills: int
) -> None:
    """Answers take up to 2 s: a gateway is killed in the middle of many."""
    async with three(tmp_path, postgres_url, 0.0, 2.0) as started:
        with started.behind_nginx() if has_nginx() else nullcontext(started.urls) as urls:
            async with Clients(urls) as clients:
                await _use_and_kill(clients, started, requests, kills)
                ends = Counter(end for _, end in clients.jobs.values())
                print(dict(clients.requests), dict(ends))
                assert ends["completed"] > ends["failed"]
                await _check_ends(started, clients, postgres_url)


async def _use_and_kill(clients: Clients, started: Gateways, requests: int, kills: int) -> None:
    async def use() -> None:
        while clients.requests.total() < requests or not killing.done():
            await random.choice(clients.flows)(random.choice(OWNERS))
            await clients.look_at_others()

    async def kill() -> None:
        for number in range(kills):
            while clients.requests.total() < requests * number // kills:
                await asyncio.sleep(0.05)
            victim = random.randrange(3)
            await started.kill(victim)
            await started.start(victim)

    killing = asyncio.create_task(kill())
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(use())
    await killing


@pytest.mark.long
async def test_a_gateway_that_stands_still_ends_nothing_twice(tmp_path: Path, postgres_url: str) -> None:
    """SIGSTOP past its lease: another one fails its responses, and it changes nothing when it goes on."""
    body = {"model": "scripted", "input": "hi", "background": True}
    async with (
        three(tmp_path, postgres_url, LEASE_S / 2, LEASE_S / 2) as started,
        Clients(started.urls[:1]) as clients,
        Clients(started.urls[1:2]) as others,
    ):
        for owner in OWNERS:
            made = await clients.ask(owner, "POST", "/v1/responses", json=body)
            clients.jobs[made["id"]] = (owner, None)
        with stopped(started.pid(0)):
            for name, (owner, _) in clients.jobs.items():
                while (now := await others.ask(owner, "GET", f"/v1/responses/{name}"))["status"] not in ENDED:
                    await asyncio.sleep(0.5)
                assert now["status"] == "failed"
                clients.jobs[name] = (owner, "failed")
        await clients.ask("alice", "POST", "/v1/responses", json={"model": "scripted", "input": "still there?"})
        await _check_ends(started, clients, postgres_url)


@pytest.mark.long
async def test_a_batch_ends_whole_though_its_gateways_are_killed(tmp_path: Path, postgres_url: str) -> None:
    """Whichever works on it is killed, twice; each line has one result."""
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": chat}
    lines = [line | {"custom_id": str(number)} for number in range(400)]
    async with three(tmp_path, postgres_url, 0.2, 0.4) as started, Clients(started.urls) as clients:
        form = {"purpose": (None, "batch"), "file": ("lines.jsonl", "\n".join(map(json.dumps, lines)).encode())}
        file = await clients.ask("alice", "POST", "/v1/files", files=form)
        body = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        path = f"/v1/batches/{(await clients.ask('alice', 'POST', '/v1/batches', json=body))['id']}"
        done, began = 0, ""
        for _ in range(2):
            while (latest := max(_began(started.log(number)) for number in range(3))) <= began:
                await asyncio.sleep(0.1)  # until a gateway works on it that was not killed
            began = latest
            while (now := await clients.ask("alice", "GET", path))["request_counts"]["completed"] <= done:
                await asyncio.sleep(0.1)
            done = now["request_counts"]["completed"]
            holder = max(range(3), key=lambda number: _began(started.log(number)))
            await started.kill(holder)
            await started.start(holder)
        assert done < 400, "it ended before the second was killed"
        async with asyncio.timeout(600):
            while (batch := await clients.ask("alice", "GET", path))["status"] not in ENDED:
                await asyncio.sleep(0.5)
        assert (batch["status"], batch["request_counts"]["total"]) == ("completed", 400)
        assert (batch["request_counts"], batch["error_file_id"]) == (
            {"total": 400, "completed": 400, "failed": 0},
            None,
        )
        content = await clients.ask("alice", "GET", f"/v1/files/{batch['output_file_id']}/content")
        results = [json.loads(each) for each in content.splitlines()]
        assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in results} == {TEXT}


def _began(log: str) -> str:
    """When a gateway began to work on a batch for the last time; "": never."""
    lines = [json.loads(line) for line in log.splitlines() if '"working on a batch"' in line]
    return max((line["timestamp"] for line in lines), default="")


async def _check_ends(started: Gateways, clients: Clients, postgres_url: str) -> None:
    """Each response has one end, which all gateways tell, and one last event."""
    for url in started.urls:
        async with Clients([url]) as gateway:
            for name, (owner, end) in clients.jobs.items():
                found = await gateway.ask(owner, "GET", f"/v1/responses/{name}")
                assert found["status"] == end, name
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as database:
        told = await (await database.execute("SELECT thread, body FROM events")).fetchall()
        lasts = Counter(name for name, body in told if any(f'"type":"response.{end}"' in body for end in ENDED))
        assert set(lasts.values()) <= {1}
        async with asyncio.timeout(GUARD_S):  # of those whose gateway was killed before the client knew their ids, too
            held = "SELECT count(*) FROM threads WHERE holder IS NOT NULL"
            while (await (await database.execute(held)).fetchone()) != (0,):
                await asyncio.sleep(1.0)
