"""Three gateways with one database, round robin: clients go on while gateways are killed or stand still. The round is
nginx's where that is installed.

What is checked at the end: every response in the background, video and batch has ended exactly once, and each gateway
says the same of it; each finished video has its file, and nothing else has one; each line of a batch has one result;
nothing of one key was seen by the other.
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
from tests.support.systems.video import MODEL as VIDEO_MODEL

TEXT = "".join(PIECES)
OWNERS = ("alice", "bob")
ENDED = ("completed", "failed", "cancelled", "incomplete")
GUARD_S = 120.0
BATCH_LINES = 3
PIPELINE = SPEECH.with_name("qwen3-omni-dit.yaml")
pytestmark = pytest.mark.timeout(1800)


@dataclass
class Clients:
    """What clients of the gateways at `urls` did and saw: each request goes to the next one.

    Attributes:
        requests: by how they ended.
        flows_done: by name.
        jobs: (owner, first end that was seen) of each response in the background.
        videos: the same of each video.
        batches: owner of each.
        kept: (owner, path) of what stays.
    """

    urls: Sequence[str]
    requests: Counter[str] = field(default_factory=Counter)
    jobs: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    flows_done: Counter[str] = field(default_factory=Counter)
    videos: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)
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

    async def video(self, owner: str) -> None:
        """Its file comes from any gateway, whichever made it; so does a range of it."""
        made = await self.ask(owner, "POST", "/v1/videos", json={"model": VIDEO_MODEL, "prompt": "a boat"})
        path = f"/v1/videos/{made['id']}"
        self.videos[made["id"]] = (owner, None)
        while (now := await self.ask(owner, "GET", path))["status"] not in ENDED:
            await asyncio.sleep(0.2)
        self.videos[made["id"]] = (owner, now["status"])
        self.kept.append((owner, path))
        if now["status"] == "failed":
            assert now["error"]["code"] == "interrupted", now
            return
        content = await self.ask(owner, "GET", f"{path}/content")
        assert content[4:8] == b"ftyp"
        self.kept.append((owner, f"{path}/content"))

    async def batch(self, owner: str) -> None:
        """Nobody waits for it: gateways work on it while they are idle."""
        made = await self.ask(owner, "POST", "/v1/batches", json=await self.batch_of(owner, BATCH_LINES))
        self.batches[made["id"]] = owner
        self.kept.append((owner, f"/v1/batches/{made['id']}"))

    async def batch_of(self, owner: str, count: int) -> dict[str, Any]:
        """A request for a batch of so many chats."""
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        line = {"method": "POST", "url": "/v1/chat/completions", "body": chat}
        lines = [json.dumps(line | {"custom_id": str(number)}) for number in range(count)]
        form = {"purpose": (None, "batch"), "file": ("lines.jsonl", "\n".join(lines).encode())}
        file = await self.ask(owner, "POST", "/v1/files", files=form)
        return {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}

    async def check_batch(self, owner: str, path: str, count: int) -> None:
        """Waits for the end of a batch of `batch_of`: each line has one result, in their order."""
        async with asyncio.timeout(600):
            while (batch := await self.ask(owner, "GET", path))["status"] not in ENDED:
                await asyncio.sleep(0.5)
        assert (batch["status"], batch["error_file_id"]) == ("completed", None), batch
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        content = await self.ask(owner, "GET", f"/v1/files/{batch['output_file_id']}/content")
        results = [json.loads(each) for each in content.splitlines()]
        assert [each["custom_id"] for each in results] == list(map(str, range(count)))
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in results} == {TEXT}

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
        return [*flows, self.background, self.background, self.video, self.video, self.batch]


@asynccontextmanager
async def three(folder: Path, database_url: str, least_s: float, most_s: float) -> AsyncIterator[Gateways]:
    """Their thinker thinks from `least_s` to `most_s` before it writes, their dit before it makes a video."""
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
        async with gateways(3, PIPELINE, addresses, folder, **shared) as started:
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
                of_videos = Counter(end for _, end in clients.videos.values())
                print(dict(clients.requests), dict(clients.flows_done))
                print(f"responses {dict(ends)}, videos {dict(of_videos)}, batches {len(clients.batches)}")
                assert ends["completed"] > ends["failed"]
                assert of_videos["completed"] > of_videos["failed"]
                await _check_ends(started, clients, postgres_url)
                await _check_videos(started, clients, postgres_url, tmp_path / "files")
                for name, owner in clients.batches.items():
                    await clients.check_batch(owner, f"/v1/batches/{name}", BATCH_LINES)
                await _check_batches(started, clients)


async def _use_and_kill(clients: Clients, started: Gateways, requests: int, kills: int) -> None:
    async def use() -> None:
        while clients.requests.total() < requests or not killing.done():
            flow = random.choice(clients.flows)
            await flow(random.choice(OWNERS))
            clients.flows_done[flow.__name__] += 1
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
    async with three(tmp_path, postgres_url, 0.2, 0.4) as started, Clients(started.urls) as clients:
        body = await clients.batch_of("alice", 400)
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
        await clients.check_batch("alice", path, 400)


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


async def _check_videos(started: Gateways, clients: Clients, postgres_url: str, files: Path) -> None:
    """Each video has one end, which all gateways tell; those that are completed have a file, and no others."""
    for url in started.urls:
        async with Clients([url]) as gateway:
            for name, (owner, end) in clients.videos.items():
                found = await gateway.ask(owner, "GET", f"/v1/videos/{name}")
                assert found["status"] == end, name
                if end == "completed":
                    whole = await gateway.ask(owner, "GET", f"/v1/videos/{name}/content")
                    assert (whole[4:8], len(whole) > 1000) == (b"ftyp", True), name
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as database:
        async with asyncio.timeout(GUARD_S):
            held = "SELECT count(*) FROM videos WHERE holder IS NOT NULL"
            while (await (await database.execute(held)).fetchone()) != (0,):
                await asyncio.sleep(1.0)
        rows = await (await database.execute("SELECT id, status FROM videos")).fetchall()
    there = sorted(file.name for file in files.rglob("video_*") if "#" not in file.name)  # a copy that a kill cut short
    assert there == sorted(name for name, status in rows if status == "completed")
    logs = "".join(started.log(number) for number in range(len(started.urls))).splitlines()
    ends = Counter(json.loads(line)["request_id"] for line in logs if '"event":"video"' in line.replace(" ", ""))
    ends.update({name for line in logs if '"videos interrupted"' in line for name in json.loads(line)["videos"]})
    assert set(ends.values()) == {1}, ends.most_common(3)


async def _check_batches(started: Gateways, clients: Clients) -> None:
    """Each gateway says the same of each batch."""
    for name, owner in clients.batches.items():
        told = list[Any]()
        for url in started.urls:
            async with Clients([url]) as gateway:
                told.append(await gateway.ask(owner, "GET", f"/v1/batches/{name}"))
        assert told[0] == told[1] == told[2]
