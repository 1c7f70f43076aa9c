"""Which replica of a stage a request goes to, and what becomes of it when that one is lost."""

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gateway.pipeline import balance
from gateway.pipeline.balance import power_of_two, prompt_key, rendezvous
from gateway.pipeline.events import Event, Finished, PromptRead, TextDelta
from gateway.pipeline.route import Lease
from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc, talker_pb2, talker_pb2_grpc, thinker_pb2, thinker_pb2_grpc
from services.common.errors import QueueFull, StageError, StageLost, Unavailable
from tests.support.clock import until
from tests.support.systems.gateway import running
from tests.support.systems.routing import KINDS, LONG_S, Routed, job, routed

LOST_BEFORE_OUTPUT = {"thinker": 1, "talker": 0, "code2wav": 0}  # the prompt is read, no text is written


def candidate(address: str, load: int = 0) -> Any:
    """A replica to choose."""
    return SimpleNamespace(address=address, load=load, last_chosen=0)


def test_a_key_keeps_its_replica_when_others_come_and_go():
    replicas = [candidate(f"10.0.0.{i}:50051") for i in range(5)]
    keys = [bytes([i]) for i in range(200)]
    before = {key: rendezvous(key, replicas) for key in keys}
    assert {replica.address for replica in before.values()} == {replica.address for replica in replicas}
    for key in keys:
        fewer = rendezvous(key, replicas[:-1])
        assert fewer is before[key] or before[key] is replicas[-1]


def test_a_key_leaves_a_replica_that_is_much_more_loaded(monkeypatch):
    replicas = [candidate("a:1"), candidate("b:1"), candidate("c:1")]
    first: Any = rendezvous(b"k", replicas)
    first.load = 1
    assert rendezvous(b"k", replicas) is first
    first.load = 2
    second = rendezvous(b"k", replicas)
    assert second is not first
    monkeypatch.setattr(balance, "_MAX_IMBALANCE", 3)
    assert rendezvous(b"k", replicas) is first


def test_the_less_loaded_of_two_and_of_equals_the_one_idle_for_longer():
    a, b = candidate("a:1", 3), candidate("b:1", 2)
    assert power_of_two([a, b]) is b
    a.load, b.last_chosen = 2, 1
    assert power_of_two([a, b]) is a
    many = [candidate(f"{i}:1", i) for i in range(8)]
    assert all(power_of_two(many) is not many[-1] for _ in range(100))


def _conversation(*turns: tuple[str, str]) -> thinker_pb2.GenerateStart:
    start = thinker_pb2.GenerateStart()
    for role, text in turns:
        start.messages.add(role=role).content.add(text=text)
    return start


def test_all_turns_of_a_conversation_have_one_key():
    first = [("system", "Be kind."), ("user", "Hello")]
    key = prompt_key(_conversation(*first), [])
    assert prompt_key(_conversation(*first, ("assistant", "Hi"), ("user", "And now?")), []) == key
    assert prompt_key(_conversation(("system", "Be brief."), first[1]), []) != key
    assert prompt_key(_conversation(first[0], ("user", "Hallo")), []) != key
    tools = _conversation(*first)
    tools.tools.add(name="lamp")
    assert prompt_key(tools, []) != key


def test_files_are_part_of_the_key_however_they_are_sent():
    keys = set()
    for file in (b"a" * 100_000, b"b" * 100_000):
        late, inline = _conversation(("user", "See:")), _conversation(("user", "See:"))
        late.messages[0].content.add().media.size_bytes = len(file)
        inline.messages[0].content.add().media.data = file
        keys.add(prompt_key(inline, []))
        assert prompt_key(late, [file]) in keys
    assert len(keys) == 2


async def _occupy(system: Routed, group: int, calls: int) -> list:
    """Requests of another gateway, at one replica of each stage."""
    opened = []
    for kind in KINDS:
        replica = system.stages.by_name[kind].replicas[system.groups[group].addresses[kind]]
        for i in range(calls):
            if kind == "thinker":
                start = thinker_pb2.GenerateRequest(start=thinker_pb2.GenerateStart(request_id=f"other-{i}"))
                call = thinker_pb2_grpc.ThinkerServiceStub(replica.channel).Generate(iter([start]))
            elif kind == "talker":
                call = talker_pb2_grpc.TalkerServiceStub(replica.channel).Speak([talker_pb2.SpeakRequest(start={})])
            else:
                call = code2wav_pb2_grpc.Code2WavServiceStub(replica.channel).Decode(code2wav_pb2.DecodeRequest())
            opened.append(call)
    await until(lambda: all(system.running(kind)[group] == calls for kind in KINDS))
    return opened


async def test_load_of_others_is_seen_and_evened_out():
    async with routed(2) as system:
        system.hold(dict.fromkeys(KINDS, 0))
        others = await _occupy(system, 0, 6)
        for kind in KINDS:
            await until(lambda kind=kind: max(r.load for r in system.stages.by_name[kind].replicas.values()) == 6)
        asking = [asyncio.create_task(system.ask("the same for all")) for _ in range(8)]
        await until(lambda: all(sum(system.running(kind)) == 14 for kind in KINDS))
        for kind in KINDS:
            fewer, more = sorted(system.running(kind))
            assert more <= (max(fewer + 2, 2 * fewer) if kind == "thinker" else fewer + 2)  # a prompt may be cached
        system.release()
        await asyncio.gather(*asking)
        for call in others:
            call.cancel()


async def test_queues_stay_within_two_of_each_other_under_a_skewed_load(monkeypatch):
    """Eight clients, most with one prompt; some requests take twenty times as long as the others."""
    widest = dict.fromkeys(KINDS, 0)
    original = Lease.__init__

    def recorded(lease, stage, replica):
        original(lease, stage, replica)
        loads = [other.load for other in stage.replicas.values()]
        # a request is never put on a replica that thereby gets further ahead
        if replica.load == max(loads):
            widest[stage.kind] = max(widest[stage.kind], replica.load - min(loads))

    monkeypatch.setattr(Lease, "__init__", recorded)
    dice = random.Random(0)
    async with routed(2) as system:
        for group in system.groups:
            for script in group.scripts.values():
                script.takes_s = lambda: 0.2 if dice.random() < 0.1 else 0.01

        async def client(number: int) -> None:
            for turn in range(12):
                await system.ask("popular" if dice.random() < 0.7 else f"{number}-{turn}")

        await asyncio.gather(*(client(number) for number in range(8)))
        assert all(count <= 2 for count in widest.values()), widest
        for kind in KINDS:
            assert sum(system.asked(kind)) == 96
            assert min(system.asked(kind)) >= 3  # of the first eight alone, which come at once


async def test_repeated_prompts_land_on_one_thinker_and_readers_on_that_one():
    async with routed(2) as system:
        conversations = itertools.count()  # each lands on either thinker: their ports are other ones every time
        while min(system.asked("thinker")) == 0:
            before, conversation = system.asked("thinker"), next(conversations)
            assert conversation < 60, "all on one thinker"
            for _ in range(3):
                await system.ask(f"conversation {conversation}")
            assert sorted(b - a for a, b in zip(before, system.asked("thinker"), strict=True)) == [0, 3]
        streams = {
            start.output_stream_id: group.addresses["thinker"]
            for group in system.groups
            for start in group.scripts["thinker"].requests
        }
        for group in system.groups:
            for request in group.scripts["talker"].requests:
                assert request.source.address == streams[request.source.stream_id]


async def test_a_conversation_stays_at_its_thinker_whatever_its_prompt_begins_with():
    async with routed(2, interval_s=LONG_S) as system:
        for conversation in range(4):
            before = system.asked("thinker")
            for turn in range(8):
                await system.ask(f"turn {turn}", speech=False, conversation_id=f"conversation {conversation}")
            assert sorted(b - a for a, b in zip(before, system.asked("thinker"), strict=True)) == [0, 8]


async def test_idle_replicas_are_used_in_turn():
    async with routed(2, interval_s=LONG_S) as system:  # no replica tells of a request that ends meanwhile
        for _ in range(6):
            await system.ask()
        assert system.asked("talker") == system.asked("code2wav") == [3, 3]


async def test_a_draining_replica_gets_none():
    async with routed(2) as system:
        drained = system.groups[0]
        for kind in KINDS:
            drained.set_serving(kind, False)
        replicas = [system.stages.by_name[kind].replicas[drained.addresses[kind]] for kind in KINDS]
        await until(lambda: not any(replica.serving for replica in replicas))
        for i in range(6):
            await system.ask(f"{i}")
        assert [system.asked(kind)[0] for kind in KINDS] == [0, 0, 0]
        assert system.stages.ready


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_meets_a_drain_goes_elsewhere(kind):
    """The gateway has not heard of the drain yet."""
    async with routed(3, interval_s=LONG_S) as system:
        system.hold(LOST_BEFORE_OUTPUT)
        for group in system.groups[:2]:
            group.set_serving(kind, False)
            group.scripts[kind].hold = False
            group.scripts[kind].after, group.scripts[kind].error = 0, Unavailable("the stage is draining")
        asking = [asyncio.create_task(system.ask(f"{i}")) for i in range(8)]
        await until(lambda: system.asked(kind)[2] == 8)
        assert sum(system.asked(kind)) > 8  # some had met a drain
        system.release()
        for answer in await asyncio.gather(*asking):
            assert isinstance(answer[-1], Finished)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_whose_replica_is_killed_before_output_is_tried_again_once(kind):
    async with routed(2) as system:
        system.hold(LOST_BEFORE_OUTPUT)
        asking = asyncio.create_task(system.ask())
        holders = {name: await system.holder(name) for name in KINDS}
        # at once dropped, and the whole request is begun anew
        await holders[kind].servers[kind].stop(grace=None)
        await until(lambda: sum(system.asked("code2wav")) == 2)
        system.release()
        events = await asking
        assert [type(event) for event in events].count(PromptRead) == 1
        assert "".join(event.delta.text for event in events if isinstance(event, TextDelta)) == "Hello, world"
        assert isinstance(events[-1], Finished)
        assert [sum(system.asked(name)) for name in KINDS] == [2, 2, 2]
        streams = {request.output_stream_id for group in system.groups for request in group.scripts["thinker"].requests}
        assert len(streams) == 2
        lost = system.stages.by_name[kind].replicas[holders[kind].addresses[kind]]
        assert not lost.serving
        for name in KINDS:
            await until(lambda name=name: sum(system.running(name)) == 0)
            assert all(replica.in_flight == 0 for replica in system.stages.by_name[name].replicas.values())


async def test_a_run_that_is_tried_again_leaves_its_jobs_messages_as_they_were():
    async with routed(2) as system:
        system.hold(LOST_BEFORE_OUTPUT)
        asked = job("Hello")
        before = {kind: start.SerializeToString(deterministic=True) for kind, start in asked.starts.items()}
        answering = asyncio.create_task(system.answer(asked))
        holders = {name: await system.holder(name) for name in KINDS}
        await holders["talker"].servers["talker"].stop(grace=None)
        await until(lambda: sum(system.asked("code2wav")) == 2)
        system.release()
        assert isinstance((await answering)[-1], Finished)
        after = {kind: start.SerializeToString(deterministic=True) for kind, start in asked.starts.items()}
        assert after == before


async def test_a_thinker_that_only_the_talker_found_lost_is_not_tried_again():
    """It is the one that has the prompt cached, and its call to the gateway goes on."""
    async with routed(2) as system:
        system.hold(LOST_BEFORE_OUTPUT)
        asking = asyncio.create_task(system.ask())
        talker = (await system.holder("talker")).scripts["talker"]
        await system.holder("thinker")
        talker.error = StageLost("thinker", "Socket closed")
        talker.release.set()
        await until(lambda: sum(system.asked("thinker")) == 2)
        system.release()
        assert isinstance((await asking)[-1], Finished)
        assert system.asked("thinker") == [1, 1]


async def test_media_go_to_the_second_replica_too():
    files = [random.Random(1).randbytes(700_000), b"small"]
    async with routed(2) as system:
        system.hold({"thinker": 1})
        asking = asyncio.create_task(system.ask(speech=False, media=files))
        holder = await system.holder("thinker")
        await holder.servers["thinker"].stop(grace=None)
        await until(lambda: sum(system.asked("thinker")) == 2)
        system.release()
        await asking
        for group in system.groups:
            assert bytes(group.scripts["thinker"].media) == b"".join(files)


async def test_no_second_try():
    async with routed(3) as system:
        system.hold(LOST_BEFORE_OUTPUT)
        asking = asyncio.create_task(system.ask())
        for _ in range(2):
            holder = await system.holder("thinker")
            await holder.servers["thinker"].stop(grace=None)
            holder.scripts["thinker"].holding.clear()
        with pytest.raises(StageError) as failed:
            await asking
        assert isinstance(failed.value, Unavailable)
        system.release()
        assert isinstance((await system.ask())[-1], Finished)


@pytest.mark.parametrize("kind", KINDS)
async def test_after_output_a_loss_is_an_error_with_a_type(kind):
    async with routed(2) as system:
        system.hold({"thinker": 2, "talker": 1, "code2wav": 1})
        heard: list[Event] = []
        asking = asyncio.create_task(system.ask(heard=heard))
        holders = {name: await system.holder(name) for name in KINDS}
        await until(lambda: any(isinstance(event, TextDelta) for event in heard))
        await holders[kind].servers[kind].stop(grace=None)
        with pytest.raises(StageError) as failed:
            await asyncio.wait_for(asking, 60)  # long before its time is over
        assert failed.value.origin == kind
        assert isinstance(failed.value, Unavailable)
        assert [sum(system.asked(name)) for name in KINDS] == [1, 1, 1]
        system.release()
        for i in range(4):
            await system.ask(f"{i}")


async def test_a_full_queue_is_not_tried_elsewhere():
    async with routed(2) as system:
        for group in system.groups:
            group.scripts["thinker"].error = QueueFull("full")
        with pytest.raises(StageError) as failed:
            await system.ask()
        assert isinstance(failed.value, QueueFull)
        assert sum(system.asked("thinker")) == 1


async def test_the_only_replica_is_not_tried_again():
    async with routed(1) as system:
        system.hold(LOST_BEFORE_OUTPUT)
        asking = asyncio.create_task(system.ask())
        holder = await system.holder("thinker")
        await holder.servers["thinker"].stop(grace=None)
        with pytest.raises(StageError):
            await asyncio.wait_for(asking, 60)  # long before its time is over
        assert system.asked("thinker") == [1]
        system.release()
        await holder.start("thinker")
        await until(lambda: system.stages.ready)
        assert isinstance((await system.ask())[-1], Finished)


async def test_operators_see_replicas_and_choices():
    async with running() as gateway:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
        address = gateway.stages.addresses["thinker"]
        labels = {"replica": address, "stage": "thinker"}  # an earlier test's may have been at the same port
        before = REGISTRY.get_sample_value("quartet_gateway_replica_requests_total", labels) or 0
        assert (await gateway.chat(body)).status_code == 200
        (replica,) = (await gateway.http.get("/ready")).json()["replicas"]["thinker"]
        assert (replica["address"], replica["state"], replica["in_flight"]) == (address, "SERVING", 0)
        page = (await gateway.http.get("/metrics")).text
        assert f'quartet_gateway_replica_requests_total{{replica="{address}",stage="thinker"}} {before + 1}' in page
        assert 'quartet_gateway_replicas{replica_state="serving",stage="thinker"} 1.0' in page


async def test_a_replica_that_is_unplugged_is_dropped_without_a_request():
    async with routed(2) as system:
        await system.groups[0].servers["talker"].stop(grace=None)
        unplugged = system.stages.by_name["talker"].replicas[system.groups[0].addresses["talker"]]
        await until(lambda: not unplugged.serving)
        assert system.stages.ready
        assert "UNAVAILABLE" in system.stages.by_name["talker"].describe_replicas()[0]["state"]


def test_among_many_busy_replicas_a_key_keeps_its_own_up_to_twice_the_mean():
    """The least loaded of many is far below the mean by chance alone."""
    replicas = [candidate(f"10.0.0.{i}:50051", 8) for i in range(20)]
    first: Any = rendezvous(b"k", replicas)
    idle = next(replica for replica in replicas if replica is not first)
    idle.load = 0
    first.load = 14
    assert rendezvous(b"k", replicas) is first
    first.load = 16
    assert rendezvous(b"k", replicas) is not first


def test_one_key_alone_is_shared_by_two_replicas():
    """Although all but one of them may be idle."""
    replicas = [candidate("a:1"), candidate("b:1")]
    for _ in range(90):
        chosen: Any = rendezvous(b"k", replicas)
        chosen.load += 1
    assert max(replica.load for replica in replicas) <= 2 * min(replica.load for replica in replicas)
