"""Mutual TLS on real connections: who is let in, files that are wrong, files that change."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from cli.certificates import Authority
from cli.main import app
from gateway.pipeline.config import TalkerStage
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.stage import Stage
from gateway.settings import GatewaySettings
from quartet.v1 import server_info_pb2, server_info_pb2_grpc, stream_pb2_grpc
from services.common.rpc import probe, tls
from services.common.rpc.channels import SERVER_OPTIONS, Channels
from services.common.stream.consumer import StreamConsumer
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.talker.config import TalkerSettings
from tests.support.network.certificates import credentials, flags, issue, make, serial, shown

SERVING = health_pb2.HealthCheckResponse.SERVING


class Info(server_info_pb2_grpc.ServerInfoServiceServicer):
    async def GetServerInfo(self, request, context):
        return server_info_pb2.GetServerInfoResponse(stage="talker")

    async def GetLoad(self, request, context):
        return server_info_pb2.GetLoadResponse(serving=True)


@contextlib.asynccontextmanager
async def serving(server_credentials: grpc.ServerCredentials) -> AsyncIterator[tuple[str, StreamHub]]:
    """Address and streams of a server that says it is a talker, and SERVING."""
    server, servicer, hub = grpc.aio.server(options=SERVER_OPTIONS), health.aio.HealthServicer(), StreamHub()  # pyright: ignore[reportAttributeAccessIssue]
    for service in ("", KINDS["talker"].service):
        await servicer.set(service, SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(Info(), server)
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "talker"), server)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_credentials)}"
    await server.start()
    try:
        yield address, hub
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def calling(who: tls.Credentials | None) -> AsyncIterator[Channels]:
    """Channels of a process with these credentials."""
    channels = Channels(who)
    try:
        yield channels
    finally:
        await channels.close_all()


async def ask(channels: Channels, address: str, server_name: str = "") -> str:
    """What a health check by one of `channels` comes to: SERVING, or why there is no connection."""
    stub = health_pb2_grpc.HealthStub(channels.channel(address, server_name))
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)  # pyright: ignore[reportAttributeAccessIssue]
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_only_who_has_a_certificate_of_the_ca_is_let_in(tmp_path: Path):
    ours, others = make(tmp_path / "ours", "talker", "gateway"), make(tmp_path / "others", "gateway")
    async with serving(credentials(ours, "talker").for_server()) as (address, _):
        async with calling(credentials(ours, "gateway")) as channels:
            assert await ask(channels, address) == "SERVING"
        async with calling(None) as channels:
            assert (await ask(channels, address)).startswith("UNAVAILABLE")  # in the clear

        # a stranger that trusts our CA: the server must be the one that refuses
        stranger = others / "gateway"
        (stranger / "ca.crt").write_bytes((ours / "ca.crt").read_bytes())
        async with calling(credentials(others, "gateway")) as channels:
            assert (await ask(channels, address)).startswith("UNAVAILABLE")

        authorities = (ours / "ca.crt").read_bytes()
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authorities)) as nobody:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health_pb2_grpc.HealthStub(nobody).Check(health_pb2.HealthCheckRequest(), timeout=60)  # pyright: ignore[reportAttributeAccessIssue]
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_ca_is_refused(tmp_path: Path):
    ours, others = make(tmp_path / "ours", "gateway"), make(tmp_path / "others", "talker")
    # it would let us in: we must be the ones that refuse
    (others / "talker/ca.crt").write_bytes((ours / "ca.crt").read_bytes())
    server = credentials(others, "talker").for_server()
    async with serving(server) as (address, _), calling(credentials(ours, "gateway")) as channels:
        assert "CERTIFICATE_VERIFY_FAILED" in await ask(channels, address)


async def test_an_expired_certificate_is_refused_by_peers(tmp_path: Path):
    directory = make(tmp_path, "talker", "gateway")
    issue(directory, "talker", -timedelta(minutes=1))
    home = directory / "talker"
    pair = (home / "tls.key").read_bytes(), (home / "tls.crt").read_bytes()
    # not by our Credentials, which would not have begun with it: it is one that expired since
    server = grpc.ssl_server_credentials([pair], (home / "ca.crt").read_bytes(), True)
    async with serving(server) as (address, _), calling(credentials(directory, "gateway")) as channels:
        assert "CERTIFICATE_VERIFY_FAILED" in await ask(channels, address)


async def test_the_name_is_the_one_by_which_the_stage_is_known(tmp_path: Path):
    directory = make(tmp_path, "talker", "gateway")
    talker = Authority.load(directory / "ca.crt", directory / "ca.key").issue(["talker"], timedelta(days=1))
    (directory / "talker/tls.crt").write_bytes(talker[0])
    (directory / "talker/tls.key").write_bytes(talker[1])
    async with serving(credentials(directory, "talker").for_server()) as (address, _):
        async with calling(credentials(directory, "gateway")) as channels:
            assert "Verification Check failed" in await ask(channels, address)  # 127.0.0.1 is not in the certificate
            assert await ask(channels, address, "talker") == "SERVING"
            assert "Verification Check failed" in await ask(channels, address, "thinker")
        async with calling(credentials(directory, "gateway", server_name="talker")) as channels:
            assert await ask(channels, address, "thinker") == "SERVING"  # the setting goes first


async def test_replicas_found_by_name_show_a_certificate_for_that_name(tmp_path: Path):
    """The gateway connects to IP addresses, and so does the stage that it sends to one of them."""
    directory = make(tmp_path, "gateway", "talker")
    authority = Authority.load(directory / "ca.crt", directory / "ca.key")
    certificate, key = authority.issue(["talker.test"], timedelta(days=1))
    (directory / "talker/tls.crt").write_bytes(certificate)
    (directory / "talker/tls.key").write_bytes(key)

    async def resolve(host: str) -> list[str]:
        assert host == "talker.test"
        return ["127.0.0.1"]

    server = credentials(directory, "talker").for_server()
    async with serving(server) as (address, hub), calling(credentials(directory, "gateway")) as channels:
        port = address.rpartition(":")[2]
        config = TalkerStage(kind="talker", address=f"dns:///talker.test:{port}", source="x")
        stage = Stage("talker", config, resolve, channels=channels)
        watching = asyncio.create_task(stage.watch(10, 0.05, 60))
        async with asyncio.timeout(60):
            while not stage.serving:
                await asyncio.sleep(0.01)
        (replica,) = stage.replicas.values()
        assert replica.address == address
        source = replica.source("frames")
        with hub.open("frames", ["codes"]) as stream:
            stream.start(0)
            stream.finish(0)
            async with StreamConsumer(channels).subscribe(source, "r", []) as messages:
                received = [type(message).__name__ async for message in messages]
        assert received == ["StreamHeader", "StreamEnd"]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

        literal = Stage("talker", TalkerStage(kind="talker", address=address, source="x"), channels=channels)
        await literal.check(60)
        assert not literal.serving
        assert "Verification Check failed" in literal.state  # what /ready says


@contextlib.asynccontextmanager
async def far_away(address: str, delay_s: float) -> AsyncIterator[str]:
    """Address of a way to `address` on which everything takes `delay_s` longer in each direction."""
    host, _, port = address.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        tasks.update({asyncio.create_task(carry(reader, there[1])), asyncio.create_task(carry(there[0], writer))})

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stage_that_is_far_away_is_reached_at_the_first_attempt(tmp_path: Path, real_options):
    """TLS goes to and fro more often than gRPC alone before a connection stands."""
    directory, said = make(tmp_path, "talker", "gateway"), ""
    async with serving(credentials(directory, "talker").for_server()) as (address, _), far_away(address, 0.15) as slow:
        for _ in range(20):  # first attempts: one in which this machine stands still says nothing
            async with calling(credentials(directory, "gateway")) as channels:
                said = await ask(channels, slow)
            if said == "SERVING":
                break
    assert said == "SERVING"


async def test_new_files_are_used_without_a_failed_call(tmp_path: Path, monkeypatch):
    """Server and client change their certificates under load; a stream from before goes on."""
    monkeypatch.setattr(tls, "CHECK_INTERVAL_S", 0.0)
    directory = make(tmp_path, "talker", "gateway")
    server = credentials(directory, "talker").for_server()
    async with serving(server) as (address, _), calling(credentials(directory, "gateway")) as channels:
        before = channels.channel(address)
        stream = health_pb2_grpc.HealthStub(before).Watch(health_pb2.HealthCheckRequest())  # pyright: ignore[reportAttributeAccessIssue]
        assert (await stream.read()).status == SERVING
        first = serial(directory, "talker")
        assert await asyncio.to_thread(shown, address, directory, "gateway") == first

        making = asyncio.create_task(asyncio.to_thread(make, directory, "talker", "gateway"))
        calls_after = 100
        while calls_after:
            assert await ask(channels, address) == "SERVING"
            calls_after -= making.done()
        assert channels.channel(address) is not before
        assert await asyncio.to_thread(shown, address, directory, "gateway") == serial(directory, "talker") != first
        assert not stream.done()
        stream.cancel()


async def test_a_wrong_new_file_is_logged_once_and_not_used(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tls, "CHECK_INTERVAL_S", 0.0)
    directory = make(tmp_path, "talker", "gateway")
    used = credentials(directory, "talker")
    async with serving(used.for_server()) as (address, _), calling(credentials(directory, "gateway")) as channels:
        before = used.identity
        with structlog.testing.capture_logs() as logs:
            issue(directory, "talker", -timedelta(minutes=1))
            for _ in range(3):
                assert used.identity is before
            assert await ask(channels, address) == "SERVING"
        [line] = [line for line in logs if line["log_level"] == "error"]
        assert "expired at" in line["error"]
        make(directory, "talker")
        assert used.identity is not before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda home: (home / "tls.key").unlink(), "--tls-key: {home}/tls.key: No such file"),
        (lambda home: (home / "tls.crt").write_text("hello"), "--tls-cert: {home}/tls.crt holds no certificate in PEM"),
        (lambda home: (home / "ca.crt").write_text(""), "--tls-ca: {home}/ca.crt holds no certificate in PEM"),
        (lambda home: (home / "tls.key").write_text("hello"), "--tls-key: {home}/tls.key holds no private key in PEM"),
        (
            lambda home: (home / "tls.key").write_bytes((home.parent / "gateway/tls.key").read_bytes()),
            "--tls-key: {home}/tls.key is not the key of the first certificate in {home}/tls.crt",
        ),
        (lambda home: issue(home.parent, "talker", -timedelta(minutes=1)), "--tls-cert: {home}/tls.crt expired at 20"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_at_the_start(tmp_path: Path, spoil, message):
    home = make(tmp_path, "talker", "gateway") / "talker"
    spoil(home)
    with pytest.raises(tls.TlsError) as error:
        credentials(tmp_path, "talker")
    assert message.format(home=home) in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tls-cert=tls.crt"], "missing: --tls-key, --tls-ca"),
        (["--tls-server-name=talker"], "--tls-server-name is of no use without"),
    ],
)
def test_flags_that_lack_others_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        GatewaySettings.load(["--pipeline=p", *given])
    assert message in f"{refused.value}{capsys.readouterr().err}"


async def test_the_health_command_asks_by_tls(tmp_path: Path, monkeypatch, capsys):
    directory, patient = make(tmp_path, "talker", "gateway"), ["--timeout", "60"]
    async with serving(credentials(directory, "talker").for_server()) as (address, _):
        assert await asyncio.to_thread(probe.main, [*patient, "--address", address]) == 1
        assert await asyncio.to_thread(probe.main, [*patient, "--address", address, *flags(directory, "talker")]) == 0
        for name, file in (("CERT", "tls.crt"), ("KEY", "tls.key"), ("CA", "ca.crt")):
            monkeypatch.setenv(f"QUARTET_TLS_{name}", str(directory / "talker" / file))
        assert await asyncio.to_thread(probe.main, [*patient, "--address", address]) == 0
        capsys.readouterr()
        assert await asyncio.to_thread(probe.main, [*patient, "--address", address, "--tls-server-name", "dit"]) == 1
        assert "UNAVAILABLE" in capsys.readouterr().err


def test_the_ca_is_kept_and_keys_are_for_their_owner_alone(tmp_path: Path):
    for word in ("made", "kept"):
        done = CliRunner().invoke(app, ["tls", str(tmp_path), "--host", "thinker.example.com", "--days", "3"])
        assert done.exit_code == 0
        assert done.stdout.startswith(f"{word} the CA")
    for file in (tmp_path / "ca.key", tmp_path / "dit/tls.key"):
        assert file.stat().st_mode & 0o777 == 0o600
    identity = credentials(tmp_path, "thinker").identity
    assert set(identity.names) == {"thinker", "localhost", "127.0.0.1", "::1", "thinker.example.com"}
    assert 2 < (identity.expires_at - time.time()) / 86400 < 3
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", str(tmp_path / "ca.crt"), str(tmp_path / "dit/tls.crt")]
    with contextlib.suppress(FileNotFoundError):  # a machine may be without openssl's command
        checked = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_settings_for_every_process(monkeypatch: pytest.MonkeyPatch):
    """QUARTET_TLS_* are for all; a process's own variable goes before them, a flag before both."""
    environment = {"QUARTET_TLS_CERT": "/all", "QUARTET_TLS_KEY": "/all", "QUARTET_TLS_CA": "/all"}
    for name, value in (environment | {"QUARTET_TALKER_TLS_KEY": "/talker"}).items():
        monkeypatch.setenv(name, value)
    gateway = GatewaySettings.load(["--pipeline", "p"])
    talker = TalkerSettings.load(["--model", "m", "--tls-ca", "/flag"])
    read = [[str(of.tls_cert), str(of.tls_key), str(of.tls_ca)] for of in (gateway, talker)]
    assert read == [["/all", "/all", "/all"], ["/all", "/talker", "/flag"]]
