"""How a stage's replicas come, go, and are refused."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.pipeline import stage
from gateway.pipeline.addresses import resolve_host
from gateway.pipeline.config import ThinkerStage, load_pipeline
from gateway.pipeline.dit import generate
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2
from services.common.errors import Unavailable
from tests.support.clock import until
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, SPEECH
from tests.support.systems.routing import INTERVAL_S, KINDS, TIME_S, Routed, routed

NAME = "thinker.example"


class NameServer:
    """Answers of a name server, to be changed by tests."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.fails, self.asked = list(addresses), False, 0

    async def __call__(self, host: str) -> list[str]:
        assert host == NAME
        self.asked += 1
        if self.fails or not self.addresses:
            raise OSError("no such name")
        return self.addresses


async def _at(host: str, port: int = 0) -> ScriptedStages:
    """A thinker at another address of this machine."""
    group = ScriptedStages(["thinker"])
    group.addresses["thinker"] = f"{host}:{port}"
    await group.start("thinker")
    return group


@asynccontextmanager
async def named():
    """Two thinkers at one port, and a name that has the first one's address."""
    first = await _at("127.0.0.1")
    port = int(first.addresses["thinker"].rpartition(":")[2])
    second = await _at("127.0.0.2", port)
    names = NameServer("127.0.0.1")
    async with AsyncExitStack() as stack:
        for group in (first, second):
            stack.push_async_callback(group.servers["thinker"].stop, None)
        others = await stack.enter_async_context(scripted_stages("talker", "code2wav"))
        pipeline = load_pipeline(SPEECH, {"thinker": f"dns:///{NAME}:{port}"} | others.addresses)
        stages = await stack.enter_async_context(Pipeline(pipeline, INTERVAL_S, HEALTH_TIMEOUT_S, 0.1, resolver=names))
        await until(lambda: stages.ready)
        yield Routed([first, second], stages), names


async def _ask_several(system: Routed, count: int = 12) -> list[int]:
    """How many of several requests each thinker got."""
    before = system.asked("thinker")
    await asyncio.gather(*(system.ask(f"{i}", speech=False) for i in range(count)))
    return [after - b for after, b in zip(system.asked("thinker"), before, strict=True)]


async def test_a_new_replica_takes_traffic_once_it_is_ready():
    async with named() as (system, names):
        assert await _ask_several(system) == [12, 0]
        system.groups[1].set_serving("thinker", False)
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        await until(lambda: len(system.stages.by_name["thinker"].replicas) == 2)
        await asyncio.sleep(4 * INTERVAL_S)
        assert await _ask_several(system) == [12, 0]
        system.groups[1].set_serving("thinker", True)
        await until(lambda: all(r.serving for r in system.stages.by_name["thinker"].replicas.values()))
        assert min(await _ask_several(system)) > 0


async def test_a_replica_that_is_gone_from_the_name_gets_none_and_finishes_what_it_has():
    async with named() as (system, names):
        system.hold({"thinker": 2})
        asking = asyncio.create_task(system.ask(speech=False))
        assert await system.holder("thinker") is system.groups[0]
        names.addresses = ["127.0.0.2"]
        await until(lambda: [a.split(":")[0] for a in system.stages.by_name["thinker"].replicas] == ["127.0.0.2"])
        await until(lambda: system.stages.ready)
        system.release()
        assert await asking
        assert await _ask_several(system) == [0, 12]
        names.addresses = ["127.0.0.1", "127.0.0.2"]  # and back
        await until(lambda: sum(r.serving for r in system.stages.by_name["thinker"].replicas.values()) == 2)
        assert min(await _ask_several(system)) > 0


async def test_replicas_stay_when_the_name_server_fails():
    async with named() as (system, names):
        names.fails, asked = True, names.asked
        await until(lambda: names.asked > asked + 3)
        assert await _ask_several(system) == [12, 0]
        names.fails, names.addresses = False, ["127.0.0.2"]
        await until(lambda: "127.0.0.2" in next(iter(system.stages.by_name["thinker"].replicas)))


async def test_a_name_that_never_resolves_is_named():
    names = NameServer()
    stage = Stage("thinker", ThinkerStage(kind="thinker", address=f"{NAME}:1"), names)
    watch = asyncio.create_task(stage.watch(0.05, INTERVAL_S, HEALTH_TIMEOUT_S))
    async with asyncio.timeout(60):
        await stage.settled.wait()
    assert "no such name" in stage.state
    assert NAME in stage.state
    with pytest.raises(Unavailable, match="not serving"):
        stage.choose()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_the_systems_own_resolver():
    assert "127.0.0.1" in await resolve_host("localhost")
    with pytest.raises(socket.gaierror):
        await resolve_host("no-such-host.invalid")


def _identify(group: ScriptedStages, **facts: str) -> None:
    for kind in KINDS:
        for name, value in facts.items():
            setattr(group.infos[kind].info, name, value)


async def _restart(system: Routed, group: ScriptedStages, kind: str) -> None:
    replica = system.stages.by_name[kind].replicas[group.addresses[kind]]
    await group.servers[kind].stop(None)
    await until(lambda: not replica.healthy)  # else the gateway would not ask what it is now
    await group.start(kind)


@pytest.mark.parametrize(("field", "says"), [("config_digest", "config digest is other"), ("model", "model 'other'")])
async def test_a_replica_of_another_config_is_refused(field, says):
    async with routed(3) as system:
        stranger = system.groups[2]
        address = stranger.addresses["talker"]
        setattr(stranger.infos["talker"].info, field, "other")
        await _restart(system, stranger, "talker")
        replica = system.stages.by_name["talker"].replicas[address]
        await until(lambda: replica.healthy)
        await until(lambda: not replica.serving)
        assert "refused" in replica.state
        assert says in replica.state
        (listed,) = [r for r in system.stages.by_name["talker"].describe_replicas() if r["address"] == address]
        assert listed["state"] == replica.state
        assert system.stages.ready
        for i in range(6):
            await system.ask(f"{i}")
        assert system.asked("talker")[2] == 0


async def test_a_stage_changes_over_when_the_last_of_the_old_ones_has_left(monkeypatch):
    async with routed(2) as system:
        talker = system.stages.by_name["talker"]
        old, new = (talker.replicas[group.addresses["talker"]] for group in system.groups)
        _identify(system.groups[1], config_digest="new")
        await _restart(system, system.groups[1], "talker")
        await until(lambda: new.refusal is not None)
        # one that only restarts says what the others have to be ...
        monkeypatch.setattr(stage, "HOLD_S", 3600)
        await system.groups[0].servers["talker"].stop(None)
        await until(lambda: not old.healthy)
        await asyncio.sleep(4 * INTERVAL_S)
        assert not talker.serving
        assert "refused" in talker.state
        await system.groups[0].start("talker")
        await until(lambda: old.serving)
        assert new.refusal
        # ... one that stays away does not
        monkeypatch.setattr(stage, "HOLD_S", 0.3)
        await system.groups[0].servers["talker"].stop(None)
        await until(lambda: new.serving)
        assert talker.info
        assert talker.info.config_digest == "new"
        await system.groups[0].start("talker")
        await until(lambda: old.refusal is not None)


async def test_a_reader_of_another_checkpoint_is_refused_until_its_source_has_that_too():
    async with routed(1) as system:
        group = system.groups[0]
        _identify(group, checkpoint_digest="one")
        for kind in KINDS:
            await _restart(system, group, kind)
        await until(lambda: system.stages.ready)
        group.infos["talker"].info.checkpoint_digest = "two"
        await _restart(system, group, "talker")
        await until(lambda: "which it reads from" in system.stages.by_name["talker"].state)
        assert "stage thinker" in system.stages.by_name["talker"].state
        assert not system.stages.ready
        group.infos["thinker"].info.checkpoint_digest = "two"
        await _restart(system, group, "thinker")
        await until(lambda: system.stages.by_name["talker"].serving)


@asynccontextmanager
async def painters(file: str = "dit.yaml", kinds: tuple[str, ...] = ("dit",)):
    """Two dits and their stage."""
    async with AsyncExitStack() as stack:
        groups = [await stack.enter_async_context(scripted_stages(*kinds)) for _ in range(2)]
        for group in groups:
            group.infos["dit"].info.dit.needs_source = "encoder" in kinds
        addresses = {kind: [group.addresses[kind] for group in groups] for kind in kinds}
        pipeline = load_pipeline(SPEECH.with_name(file), addresses)
        stages = await stack.enter_async_context(Pipeline(pipeline, INTERVAL_S, HEALTH_TIMEOUT_S))
        await until(
            lambda: all(r["state"] == "SERVING" for kind in kinds for r in stages.by_name[kind].describe_replicas())
        )
        stage = stages.output("image")
        assert stage is not None
        yield Routed(groups, stages), stage


async def _paint(stage: Stage, heard: list[str], media: tuple[bytes, ...] = (b"picture",)) -> None:
    """The kinds of the responses, in `heard` as they come."""
    start = dit_pb2.DitStart(request_id="r", prompt="a fox", count=1)
    for _ in media:
        start.images.add()
    async for response in generate(stage, start, media, TIME_S):
        heard.append(response.WhichOneof("message"))


async def test_a_picture_is_begun_again_when_its_replica_is_lost_before_any_of_it():
    async with painters() as (system, stage):
        system.hold({"dit": 3})  # some steps are done
        heard: list[str] = []
        painting = asyncio.create_task(_paint(stage, heard))
        holder = await system.holder("dit")
        await until(lambda: "progress" in heard)
        await holder.servers["dit"].stop(None)
        await until(lambda: sum(system.asked("dit")) == 2)
        system.release()
        await painting
        assert heard.count("started") == 2
        assert heard[-1] == "summary"
        assert all(bytes(group.scripts["dit"].media) == b"picture" for group in system.groups)


async def test_a_picture_of_which_a_part_was_sent_is_not_begun_again():
    async with painters() as (system, stage):
        system.hold({"dit": 6})  # started, four steps, a piece
        heard: list[str] = []
        painting = asyncio.create_task(_paint(stage, heard))
        holder = await system.holder("dit")
        await until(lambda: "piece" in heard)
        await holder.servers["dit"].stop(None)
        with pytest.raises(Unavailable, match="the dit went away"):
            await painting
        assert sum(system.asked("dit")) == 1
        system.release()


@pytest.mark.parametrize("lost", ["dit", "encoder"])
async def test_a_dit_reads_from_the_encoder_that_serves_its_request(lost):
    async with painters("glm-image.yaml", ("dit", "encoder")) as (system, stage):
        system.hold({"dit": 2, "encoder": 0})
        heard: list[str] = []
        painting = asyncio.create_task(_paint(stage, heard, media=()))
        holders = {kind: await system.holder(kind) for kind in ("dit", "encoder")}
        await holders[lost].servers[lost].stop(None)
        await until(lambda: sum(system.asked("dit")) == sum(system.asked("encoder")) == 2)
        system.release()
        await painting
        assert heard[-1] == "summary"
        encoders = {
            start.output_stream_id: group.addresses["encoder"]
            for group in system.groups
            for start in group.scripts["encoder"].requests
        }
        assert len(encoders) == 2
        for group in system.groups:
            for start in group.scripts["dit"].requests:
                assert start.source.address == encoders[start.source.stream_id]
