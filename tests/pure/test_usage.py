"""Limits of keys over several gateways, with a PostgreSQL server that all of them use."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Self

import pytest
import pytest_asyncio
from sqlalchemy import func, select, text
from structlog.testing import capture_logs

from gateway.access import elsewhere
from gateway.access.api_key import ApiKey
from gateway.access.api_keys import ApiKeys, new_key
from gateway.access.key_usage import KeyUsage
from gateway.access.others import SILENT_S
from gateway.access.own_usage import OwnUsage
from gateway.access.shared import SharedState
from gateway.access.usage import Usage
from gateway.access.usage_store import FORGOTTEN_S
from gateway.access.usage_tables import gateways, usage
from gateway.errors import ApiError
from gateway.store import clock
from gateway.store.postgres import PostgresDatabase
from tests.pure.test_api_keys import ASK, bearer, entry, write
from tests.support.systems.gateway import running
from tests.support.systems.postgres import own_server

CHAT = "/v1/chat/completions"
BEGIN_S = 1_700_000_000.0


class Time:
    """What the database's clock says; each gateway's has another zero."""

    at_s = 0.0


class OneOfSeveral:
    """A gateway's counts and reports, without HTTP."""

    def __init__(self, database: PostgresDatabase, folder: Path, time: Time, zero_s: float) -> None:
        folder.mkdir(exist_ok=True)
        self.file, self._now = folder / "counts.sqlite", lambda: zero_s + time.at_s
        self.shared = SharedState(self.file, now=self._now)
        self.keys = ApiKeys(folder.parent / "keys.yaml", self.shared)
        self.usage = Usage(database, self.shared, self.keys)

    def key(self, name: str) -> ApiKey:
        return next(key for key in self.keys if key.name == name)

    def begin(self, name: str) -> ExitStack:
        """A request that runs until it is closed. Raises ApiError."""
        with ExitStack() as stack:
            stack.enter_context(self.key(name).request())
            return stack.pop_all()

    def admits(self, name: str) -> bool:
        try:
            self.begin(name).close()
        except ApiError as refused:
            if refused.status != 429:
                raise
            return False
        return True

    def admitted_of(self, name: str, tries: int) -> int:
        return sum(self.admits(name) for _ in range(tries))


class Several:
    """Gateways of one database, whose file of keys they share."""

    def __init__(self, url: str, folder: Path, time: Time) -> None:
        self.time, self._url, self._folder = time, url, folder
        self.databases = list[PostgresDatabase]()
        write(
            folder / "keys.yaml",
            entry("places", new_key(), max_concurrent_requests=3),
            entry("rate", new_key(), requests_per_minute=6),
            entry("sessions", new_key(), max_realtime_sessions=1),
            entry("free", new_key()),
        )

    def start(self, name: str, zero_s: float = 0.0) -> OneOfSeveral:
        self.databases.append(PostgresDatabase(self._url))
        return OneOfSeveral(self.databases[-1], self._folder / name, self.time, zero_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_) -> None:
        for database in self.databases:
            await database.shutdown()

    async def rows(self) -> list[tuple]:
        """(key, transaction that wrote it) of all gateways."""
        database = self.databases[0]

        def read() -> list[tuple]:
            with database.transaction(writes=False) as connection:
                found = select(usage.c.key_name, text("usage.xmin::text")).order_by(usage.c.key_name)
                return [tuple(row) for row in connection.execute(found)]

        return await database.run(read)

    async def gateways(self) -> int:
        database = self.databases[0]

        def count() -> int:
            with database.transaction(writes=False) as connection:
                return connection.execute(select(func.count()).select_from(gateways)).scalar_one()

        return await database.run(count)


async def report(*gateways: OneOfSeveral) -> None:
    for gateway in gateways:
        await gateway.usage.report()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "now", lambda connection: BEGIN_S + time.at_s)
    return time


@pytest_asyncio.fixture
async def several(postgres_url: str, tmp_path: Path, time: Time) -> AsyncIterator[Several]:
    async with Several(postgres_url, tmp_path, time) as several:
        yield several


async def test_places_are_those_of_all_gateways(several: Several) -> None:
    a, b, c = several.start("a", 100.0), several.start("b", 5000.5), several.start("c", 70.7)
    running = [a.begin("places"), a.begin("places"), b.begin("places")]
    await report(a, b, c)
    of_another_worker = ApiKey(c.key("places").entry, SharedState(c.file, 1, now=c.shared.now))
    for key in (c.key("places"), of_another_worker):
        with pytest.raises(ApiError, match="has 3 requests in progress; it may have 3") as refused, key.request():
            pass
        assert refused.value.retry_after_s == 2
        assert key.one_more() is None
    assert a.admits("places")  # what b has was not known when a reported
    await report(a, b, c)
    assert not a.admits("places")
    running.pop(0).close()
    assert a.admits("places")
    assert not b.admits("places")  # it does not know yet
    await report(a, b, c)
    with b.begin("places"):
        assert not b.admits("places")
    for place in running:
        place.close()
    await report(a, b, c)
    assert await several.rows() == []
    with c.begin("places"), c.begin("places"), c.begin("places"):
        assert not c.admits("places")


async def test_a_rate_is_that_of_all_gateways(several: Several) -> None:
    a, b, c = several.start("a", 100.0), several.start("b", 5000.5), several.start("c", 70.7)
    assert a.admitted_of("rate", 2) == 2
    several.time.at_s += 10
    assert b.admitted_of("rate", 2) == 2
    await report(a, b, c)
    assert c.admitted_of("rate", 6) == 2
    await report(a, b, c, a)
    for after_s, more in ((49.9, 0), (2.2, 2), (7.8, 0), (2.3, 4)):  # at 59.9, 62.1, 69.9, 72.2 s
        several.time.at_s += after_s
        await report(a, b, c)
        assert sum(each.admitted_of("rate", 6) for each in (a,)) == more
    await report(a, b, c)
    with pytest.raises(ApiError) as refused:
        c.begin("rate")
    assert refused.value.retry_after_s is not None
    assert 49 <= refused.value.retry_after_s <= 52  # the two of 10 s ago


async def test_before_a_report_each_admits_as_if_it_were_alone(several: Several) -> None:
    three = several.start("a"), several.start("b", 7.7), several.start("c", 900.0)
    assert [each.admitted_of("rate", 9) for each in three] == [6, 6, 6]
    await report(*three, *three)
    several.time.at_s += 59
    await report(*three, *three)
    assert [each.admitted_of("rate", 9) for each in three] == [0, 0, 0]


async def test_what_was_too_much_is_of_the_minutes_that_follow(several: Several) -> None:
    """A client that asks all gateways at once, again and again: 18 at first, and 6 a minute on average."""
    three = several.start("a"), several.start("b", 7.7), several.start("c", 900.0)
    admitted = []
    for _ in range(20):
        admitted.append(sum(each.admitted_of("rate", 9) for each in three))
        for _ in range(20):
            several.time.at_s += 3.1
            await report(*three)
    assert max(admitted) == 18
    assert 115 <= sum(admitted) <= 20 * (6 + 2) + 12


async def test_what_a_higher_limit_admitted_is_not_too_much(several: Several) -> None:
    a, b = several.start("a"), several.start("b")
    assert (a.admitted_of("rate", 3), b.admitted_of("rate", 3)) == (3, 3)
    await report(a, b, a)
    for each in (a, b):
        each.key("rate").entry = each.key("rate").entry.model_copy(update={"requests_per_minute": 2})
    await report(a, b, a, b)
    several.time.at_s += 62.1
    await report(a, b)
    assert a.admitted_of("rate", 3) == 2


async def test_what_is_owed_is_owed_at_all_gateways(several: Several) -> None:
    a, b = several.start("a", 100.0), several.start("b", 5000.5)
    assert a.admits("rate")
    a.key("rate").owe(11.5 * 60)  # eleven more: five of this minute, and six of the next
    await report(a, b)
    for at_s, admits in ((0, False), (59, False), (63, False), (119, False), (122.1, True)):
        several.time.at_s = at_s
        await report(a, b)
        assert b.admits("rate") is admits, at_s


async def test_what_is_given_back_counts_nowhere(several: Several) -> None:
    a, b = several.start("a"), several.start("b", 33.3)
    assert a.admitted_of("rate", 6) == 6
    await report(a, b)
    assert not b.admits("rate")
    several.time.at_s += 1
    a.key("rate").refund()
    await report(a, b)
    assert b.admitted_of("rate", 6) == 1


async def test_sessions_of_an_entry_are_those_of_all_gateways(several: Several) -> None:
    a, b = several.start("a"), several.start("b")
    with a.key("sessions").session(8), a.key("free").session(2), a.key("free").session(2):
        await report(a, b)
        with pytest.raises(ApiError, match="'sessions' has 1 sessions"), b.key("sessions").session(8):
            pass
        with b.key("free").session(2):  # what a gateway has for a key that has no limit
            pass
    await report(a, b)
    with b.key("sessions").session(8):
        pass


async def test_a_gateway_that_is_gone_runs_nothing_and_what_it_admitted_counts_on(several: Several) -> None:
    a, b = several.start("a"), several.start("b", 55.5)
    gone = [a.begin("places") for _ in range(3)]
    assert a.admitted_of("rate", 6) == 6
    await report(a)
    several.time.at_s += SILENT_S - 0.1
    await report(b)
    assert (b.admits("places"), b.admits("rate")) == (False, False)
    several.time.at_s += 0.2
    await report(b)
    assert (b.admits("places"), b.admits("rate")) == (True, False)
    several.time.at_s = 62.1
    await report(b)
    assert b.admits("rate")
    several.time.at_s = FORGOTTEN_S + 0.1
    await report(b)
    assert await several.gateways() == 1
    assert len(gone) == 3


async def test_a_gateway_that_was_away_for_minutes_is_there_again(several: Several) -> None:
    a, b = several.start("a"), several.start("b")
    running = [a.begin("places") for _ in range(3)]
    await report(a, b)
    several.time.at_s += FORGOTTEN_S + 1
    await report(b)
    assert b.admits("places")
    await report(a, b)  # nothing has changed at a
    assert not b.admits("places")
    assert len(running) == 3


async def test_a_process_that_starts_anew_is_the_same_gateway(several: Several) -> None:
    a = several.start("a")
    assert a.admitted_of("rate", 5) == 5
    place = a.begin("places")
    await report(a)
    anew = several.start("a")  # its requests have ended with the process before
    await report(anew)
    assert [key for key, _ in await several.rows()] == ["rate"]
    assert anew.admitted_of("rate", 6) == 1
    with anew.begin("places"), anew.begin("places"), anew.begin("places"):
        pass
    assert place


async def test_only_what_changes_is_written(several: Several) -> None:
    a, b = several.start("a", 100.0), several.start("b", 9.9)
    assert a.admits("rate")
    with a.begin("places"):
        await report(a, b)
        before = await several.rows()
        assert [key for key, _ in before] == ["places", "rate"]
        for _ in range(5):
            several.time.at_s += 1.7
            await report(a, b)
        assert await several.rows() == before
        assert a.admits("rate")
        await report(a, b)
        places, rate = await several.rows()
        assert (places, rate[0]) == (before[0], "rate")
        assert rate != before[1]
    assert a.admits("free")  # without a limit nobody asks
    several.time.at_s += 62
    await report(a, b)
    assert await several.rows() == []


async def test_while_the_database_is_away_each_gateway_counts_alone(tmp_path: Path, time: Time) -> None:
    begun = "limits of API keys are counted without the other gateways"
    ended = "limits of API keys are counted with the other gateways again"
    with own_server() as server:
        async with Several(server.get_uri(), tmp_path, time) as several:
            a, b = several.start("a"), several.start("b", 12.3)
            with a.begin("places"), a.begin("places"), a.begin("places"), capture_logs() as logs:
                await report(a, b)
                assert (b.admits("places"), logs) == (False, [])
                server.stop()
                for _ in range(3):
                    time.at_s += 3
                    await report(a, b)
                assert not b.admits("places")  # it knew 9 s ago
                time.at_s += 2
                await report(a, b)
                assert (a.admits("places"), b.admits("places")) == (False, True)
                assert [(line["event"], line["log_level"]) for line in logs] == [(begun, "error")] * 2  # one of each
                assert all(line["error"].startswith("database_url postgresql") for line in logs)
                server.start()
                await report(a, b)
                assert [(line["event"], line["failed_s"]) for line in logs[2:]] == [(ended, 8.0)] * 2
                assert not b.admits("places")


async def test_it_reports_when_it_begins_and_when_it_ends(postgres_url: str, tmp_path: Path) -> None:
    """By the clocks of the database and of this machine."""
    async with Several(postgres_url, tmp_path, Time()) as several:
        a = several.start("a")
        a.shared.now = monotonic
        async with a.usage:
            assert a.admitted_of("rate", 4) == 4
        b = several.start("b")
        b.shared.now = lambda: monotonic() + 1e6
        async with b.usage:
            assert b.admitted_of("rate", 6) == 2


def test_requests_of_others_are_ranked_with_those_of_here() -> None:
    dice = random.Random(0)
    for _ in range(300):
        shared = SharedState()
        own = [float(dice.randrange(20)) for _ in range(dice.randrange(12))]
        others = {dice.randrange(20): dice.randrange(1, 4) for _ in range(dice.randrange(8))}
        with shared.change() as database:
            database.executemany("INSERT INTO admitted VALUES ('a', ?)", [(at_s,) for at_s in own])
            elsewhere.put(database, {"a": KeyUsage(0, 0, others)})
            found = elsewhere.admitted(database, "a", 3.0)
            together = sorted(
                [*own, *(at for at, count in others.items() if at > 3 for _ in range(count))], reverse=True
            )
            for rank in range(len(together) + 2):
                expected = together[rank] if rank < len(together) else None
                assert elsewhere.nth_newest(database, "a", rank, found) == expected


async def test_counting_the_last_seconds_again_is_counting_all(tmp_path: Path) -> None:
    dice, time = random.Random(1), Time()
    write(tmp_path / "keys.yaml", entry("rate", new_key(), requests_per_minute=40))
    shared = SharedState(now=lambda: time.at_s)
    keys = ApiKeys(tmp_path / "keys.yaml", shared)
    (key,), own = keys, OwnUsage(shared)
    for _ in range(300):
        time.at_s += dice.choice([0.1, 0.7, 1, 3, 20])
        for _ in range(dice.randrange(5)):
            with contextlib.suppress(ApiError), key.request():
                if dice.random() < 0.3:
                    key.refund()
        assert await own.read([key.entry]) == await OwnUsage(shared).read([key.entry])


async def test_two_gateways_serve_one_key(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access.usage.REPORT_S", 0.02)
    key = new_key()
    settings = {
        "api_keys_file": write(tmp_path / "keys.yaml", entry("alice", key, max_concurrent_requests=1)),
        "database_url": postgres_url,
        "jobs_dir": tmp_path / "jobs",
    }
    async with running(**settings) as first, running(**settings) as second:
        thinker = first.scripts["thinker"]
        thinker.hold = True
        chatting = asyncio.create_task(first.http.post(CHAT, json=ASK, headers=bearer(key)))
        await thinker.holding.wait()

        async def status() -> int:
            return (await second.http.post(CHAT, json=ASK, headers=bearer(key))).status_code

        async with asyncio.timeout(60):
            while await status() != 429:
                await asyncio.sleep(0.05)
            thinker.go_on()
            assert (await chatting).status_code == 200
            while await status() != 200:
                await asyncio.sleep(0.05)


async def test_what_was_written_late_is_read_later(several: Several) -> None:
    a, b = several.start("a"), several.start("b")
    await report(b)
    assert a.admitted_of("rate", 6) == 6
    await report(a)
    b.usage._others.since = BEGIN_S + 1  # as if a's transaction had taken longer
    await report(b, b)
    assert not b.admits("rate")
