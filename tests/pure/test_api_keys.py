"""API keys over HTTP: who is let in, limits of each key, a file that changes, and what happens without keys."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog
from prometheus_client import REGISTRY

from cli.plan import PIPELINE
from gateway.access.api_keys import digest, new_key, read_key_file
from gateway.access.client_secrets import ClientSecrets
from gateway.http.middleware import OPEN_PATHS, RequireKey
from gateway.settings import GatewaySettings
from gateway.yaml_source import YamlError
from tests.support.systems.gateway import Running, running
from tests.support.systems.video import MODEL as VIDEO_MODEL
from tests.support.systems.video import VIDEO_INFO, gateway_before, scripted_dit

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
ALICE, BOB = new_key(), new_key()


def entry(name: str, key: str, **limits: int) -> str:
    members = {"name": name, "sha256": f'"{digest(key)}"', **limits}
    return "  - " + "\n    ".join(f"{field}: {value}" for field, value in members.items()) + "\n"


def write(file: Path, *entries: str) -> Path:
    return replace(file, "keys:\n" + "".join(entries))


def replace(file: Path, text: str) -> Path:
    """At once: who looks at it meanwhile sees all of the old text or of the new one."""
    new = file.with_suffix(".new")
    new.write_text(text)
    return new.replace(file)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(gateway: Running, key: str, **members) -> httpx.Response:
    return await gateway.chat(ASK | members, headers=bearer(key))


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.yaml", entry("alice", ALICE), entry("bob", BOB))


async def test_each_key_is_let_in_and_no_other(key_file: Path):
    before = {name: counted("quartet_gateway_key_requests_total", key=name) for name in ("alice", "bob")}
    async with running(api_keys_file=key_file) as gateway:
        answers = await asyncio.gather(chat(gateway, ALICE), chat(gateway, BOB))
        assert [answer.status_code for answer in answers] == [200, 200]
        for headers in ({}, bearer(new_key()), bearer(ALICE[:-1]), {"authorization": f"Basic {ALICE}"}, bearer("\xff")):
            encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            for path in ("/v1/models", "/v1/models/scripted", "/v1/nothing", "/HEALTH", "/health/"):
                refused = await gateway.http.get(path, headers=encoded)
                assert refused.status_code == 401
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.headers["x-request-id"]
        assert gateway.scripts["thinker"].ended == ["done", "done"]
        for path in OPEN_PATHS:
            assert (await gateway.http.get(path)).status_code == 200
    for name, was in before.items():
        assert counted("quartet_gateway_key_requests_total", key=name) == was + 1


async def test_openais_client_knows_the_errors(tmp_path: Path):
    file = write(tmp_path / "keys.yaml", entry("alice", ALICE, requests_per_minute=1))
    async with running(api_keys_file=file) as gateway:
        options = {"base_url": f"{gateway.url}/v1", "max_retries": 0}
        async with openai.AsyncOpenAI(api_key=BOB, **options) as stranger:
            with pytest.raises(openai.AuthenticationError, match="not known here"):
                await stranger.models.list()
        async with openai.AsyncOpenAI(api_key=ALICE, **options) as alice:
            await alice.chat.completions.create(**ASK)
            with pytest.raises(openai.RateLimitError) as refused:
                await alice.chat.completions.create(**ASK)
            assert refused.value.code == "rate_limit_exceeded"
            assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
            await alice.models.list()  # looking is not counted


async def test_a_request_has_its_keys_name_in_the_log_and_never_the_key(key_file: Path):
    with structlog.testing.capture_logs() as logs:
        async with running(api_keys_file=key_file) as gateway:
            await chat(gateway, ALICE)
            await chat(gateway, "sk-wrong")
    lines = [line for line in logs if line["event"] == "request" and line["log_level"] == "info"]
    assert [(line["status"], line.get("key"), line.get("code")) for line in lines] == [
        (200, "alice", None),
        (401, None, "invalid_api_key"),
    ]
    for secret in (ALICE, "sk-wrong", digest(ALICE)):
        assert secret not in str(logs)


async def test_places_of_a_key(tmp_path: Path):
    """A stream holds its place until it ends, or until its client is gone; other keys are not held up."""
    file = write(tmp_path / "keys.yaml", entry("alice", ALICE, max_concurrent_requests=1), entry("bob", BOB))
    running_now = {"name": "quartet_gateway_key_running_requests", "key": "alice"}
    async with running(api_keys_file=file) as gateway:
        thinker = gateway.scripts["thinker"]
        thinker.hold, thinker.after = True, 2
        streaming = asyncio.create_task(chat(gateway, ALICE, stream=True))
        await thinker.holding.wait()
        assert counted(**running_now) == 1
        refused = await chat(gateway, ALICE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "'alice' has 1 requests in progress" in error["message"]
        assert ALICE not in error["message"]
        assert counted("quartet_gateway_key_refused_total", key="alice", limit="concurrency") >= 1

        holding = asyncio.create_task(chat(gateway, BOB))
        await gateway.until(lambda: thinker.running == 2)

        streaming.cancel()  # the client goes
        await gateway.until(lambda: counted(**running_now) == 0)
        thinker.hold = False
        assert (await chat(gateway, ALICE)).status_code == 200
        thinker.release.set()
        assert (await holding).status_code == 200


async def test_a_refused_request_takes_nothing_of_the_rate(tmp_path: Path):
    file = write(tmp_path / "keys.yaml", entry("alice", ALICE, max_concurrent_requests=1, requests_per_minute=2))
    async with running(api_keys_file=file) as gateway:
        thinker = gateway.scripts["thinker"]
        thinker.hold = True
        first = asyncio.create_task(chat(gateway, ALICE))
        await thinker.holding.wait()
        for _ in range(3):
            assert "at a time" in (await chat(gateway, ALICE)).json()["error"]["message"]
        thinker.release.set()
        assert (await first).status_code == 200
        assert (await chat(gateway, ALICE)).status_code == 200
        assert "a minute" in (await chat(gateway, ALICE)).json()["error"]["message"]


async def test_a_video_counts_until_it_ends(tmp_path: Path):
    file = write(tmp_path / "keys.yaml", entry("alice", ALICE, max_concurrent_requests=1))
    body = {"model": VIDEO_MODEL, "prompt": "a boat"}
    async with (
        scripted_dit(VIDEO_INFO) as stage,
        gateway_before(
            stage, tmp_path / "jobs", api_keys_file=file, max_running_videos=1, max_queued_videos=0
        ) as client,
    ):
        client.http.headers.update(bearer(ALICE))
        stage.script.hold = True
        video = (await client.http.post("/v1/videos", json=body)).json()["id"]
        assert (await client.http.post("/v1/videos", json=body)).json()["error"]["code"] == "rate_limit_exceeded"
        assert (await client.video(video))["id"] == video  # looking takes no place
        await client.http.delete(f"/v1/videos/{video}")

        stage.script.hold = False
        video = (await client.http.post("/v1/videos", json=body)).json()["id"]
        await client.reaches(video, "completed")
        await client.until(lambda: counted("quartet_gateway_key_running_requests", key="alice") == 0)

        # one that the gateway refuses holds no place
        assert (await client.http.post("/v1/videos", json=body | {"num_frames": 9999})).status_code == 400
        assert counted("quartet_gateway_key_running_requests", key="alice") == 0


async def test_a_key_sees_its_own_videos_only(key_file: Path, tmp_path: Path):
    body = {"model": VIDEO_MODEL, "prompt": "a boat"}
    async with scripted_dit(VIDEO_INFO) as stage:
        async with gateway_before(stage, tmp_path / "jobs", api_keys_file=key_file) as client:
            made = {}
            for key in (ALICE, BOB):
                client.http.headers.update(bearer(key))
                made[key] = (await client.http.post("/v1/videos", json=body)).json()["id"]
                await client.reaches(made[key], "completed")
            for key, other in ((ALICE, BOB), (BOB, ALICE)):
                client.http.headers.update(bearer(key))
                listed = (await client.http.get("/v1/videos")).json()["data"]
                assert [video["id"] for video in listed] == [made[key]]
                path = f"/v1/videos/{made[other]}"
                for refused in (
                    await client.http.get(path),
                    await client.http.get(f"{path}/content"),
                    await client.http.delete(path),
                ):
                    assert refused.status_code == 404
                assert (await client.http.get("/v1/videos", params={"after": made[other]})).status_code == 400
                assert (await client.http.get(f"/v1/videos/{made[key]}/content")).status_code == 200
        async with gateway_before(stage, tmp_path / "jobs") as client:  # without keys: the operator alone
            assert len((await client.http.get("/v1/videos")).json()["data"]) == 2
            await client.http.post("/v1/videos", json=body)
        async with gateway_before(stage, tmp_path / "jobs", api_keys_file=key_file) as client:
            client.http.headers.update(bearer(ALICE))
            listed = (await client.http.get("/v1/videos")).json()["data"]
            assert [video["id"] for video in listed] == [made[ALICE]]  # nobody's is not everybody's


async def test_a_changed_file_counts_within_seconds(key_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.access.api_keys.CHECK_INTERVAL_S", 0.02)
    carol = new_key()
    async with running(api_keys_file=key_file) as gateway:
        thinker = gateway.scripts["thinker"]
        thinker.hold = True
        answering = asyncio.create_task(chat(gateway, BOB))
        await thinker.holding.wait()

        write(key_file, entry("alice", ALICE), entry("carol", carol))
        await until_status(gateway, carol, 200)
        assert await status(gateway, BOB) == 401
        assert await status(gateway, ALICE) == 200
        assert (await answering).status_code == 401  # of a key that is gone: what it began ends
        thinker.release.set()
        page = (await gateway.http.get("/metrics")).text
        assert 'key="alice"' in page
        assert 'key="bob"' not in page

        with structlog.testing.capture_logs() as logs:
            replace(key_file, "keys:\n  - name: alice\n    sha: x\n")
            await gateway.until(lambda: any(line["log_level"] == "error" for line in logs))
        [line] = [line for line in logs if line["log_level"] == "error"]
        assert line["error"].startswith(f"{key_file}:3: keys.0.sha: unknown")
        assert await status(gateway, carol) == 200

        for empty, rest in (("keys: []\n", carol), ("keys:\n", ALICE)):  # after the last entry was removed
            replace(key_file, empty)
            await until_status(gateway, rest, 401)
            write(key_file, entry("alice", ALICE))
            await until_status(gateway, ALICE, 200)


async def status(gateway: Running, key: str) -> int:
    return (await gateway.http.get("/v1/models", headers=bearer(key))).status_code


async def until_status(gateway: Running, key: str, wanted: int) -> None:
    async with asyncio.timeout(60):
        while await status(gateway, key) != wanted:
            await asyncio.sleep(0.05)


async def test_a_websocket_needs_a_key_too():
    """There is none yet: one that is added is not open by default."""
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope)

    class NoKeys:
        def find(self, presented):
            return None

    async def receive():
        raise AssertionError("nothing is read")

    async def send(message):
        sent.append(message)

    keys: Any = NoKeys()
    await RequireKey(app, keys, ClientSecrets())(
        {"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send
    )
    assert (reached, sent) == ([], [{"type": "websocket.close", "code": 1008}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: must be a mapping with the key `keys`"),
        ("keys: {}", ":1: keys: "),
        ("keys:\n  - name: a b\n    sha256: x", ":2: keys.0.name: must be 1 to 64 letters"),
        ("keys:\n  - name: a\n    sha256: sk-quartet-secret", ":3: keys.0.sha256: must be 64 hexadecimal digits"),
        ("keys:\n  - name: a\n    sha256: 12", ":3: keys.0.sha256: must be 64 hexadecimal digits"),
        (f"keys:\n{entry('a', ALICE)}{entry('b', ALICE)}", ":5: keys.1.sha256: is that of keys.0 too"),
        (f"keys:\n{entry('a', ALICE)}{entry('a', BOB)}", ":4: keys.1.name: is that of keys.0 too"),
        (f"keys:\n{entry('a', ALICE, requests_per_minute=0)}", ":4: keys.0.requests_per_minute: "),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(YamlError) as error:
        read_key_file(file)
    assert f"{file}{message}" in str(error.value)
    assert "secret" not in str(error.value)


# What a user of compose can set; test_compose_files.py checks that it is read.
COMPOSE_FIXES = ("deploy/docker/keys.yaml in COMPOSE_FILE", "QUARTET_BIND=127.0.0.1", "QUARTET_ALLOW_ANONYMOUS=true")


@pytest.mark.parametrize(
    "flag", ["--host=0.0.0.0", "--host=::", "--host=", "--host=10.0.0.1", "--published-host=0.0.0.0"]
)
def test_without_keys_others_are_not_let_near(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        GatewaySettings.load([f"--pipeline={PIPELINE}", flag])
    told = f"{refused.value}{capsys.readouterr().err}"
    for fix in ("--api-keys-file", "--host 127.0.0.1", "--allow-anonymous=true", *COMPOSE_FIXES):
        assert fix in told


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (["--host=127.0.0.2"], {}),
        (["--host=0.0.0.0"], {"QUARTET_GATEWAY_ALLOW_ANONYMOUS": "true"}),
        (["--host=0.0.0.0", "--published-host=127.0.0.1"], {}),
        (["--host=0.0.0.0", "--api-keys-file=keys.yaml"], {}),
    ],
)
def test_what_lets_a_gateway_start(flags: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert GatewaySettings.load([f"--pipeline={PIPELINE}", *flags]).host == flags[0].removeprefix("--host=")
