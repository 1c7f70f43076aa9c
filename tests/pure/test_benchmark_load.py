"""The benchmark's own bookkeeping: what a listener hears, who is sent when, and what a stream's bytes add up to."""

import asyncio
import base64
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.conversations.microphone import Came
from benchmarks.conversations.transports import Heard, problem_of
from benchmarks.peers.chat import in_line
from benchmarks.systems.processes import Groups, system_pids
from benchmarks.traffic import client
from benchmarks.traffic.answer import Answer
from benchmarks.traffic.client import Exchange, Gateway, Wish
from benchmarks.traffic.figures import figures
from benchmarks.traffic.load import PROMPTS, closed_loop, line_arrivals, open_loop, poisson_arrivals
from benchmarks.traffic.player import playback_gaps_ms

RATE_HZ = 24000
FRAME_SAMPLES = 1920
FRAME_S = FRAME_SAMPLES / RATE_HZ


class TestPlayer:
    def test_chunks_that_come_in_time_leave_no_gap(self):
        assert playback_gaps_ms([(500, 80), (579, 80), (590, 80), (740, 80)]) == []

    def test_a_late_chunk_is_a_gap_and_delays_what_follows(self):
        # 0-80 plays, silent until 200, then 200-280 and, though it came at 210, 280-360: nothing to hear at 300
        assert playback_gaps_ms([(0, 80), (200, 80), (210, 80), (300, 80)]) == [120]

    def test_audio_in_reserve_covers_a_late_chunk(self):
        assert playback_gaps_ms([(0, 80), (1, 800), (881, 80)]) == [1]

    def test_the_wait_for_the_first_chunk_is_no_gap(self):
        assert playback_gaps_ms([(9000, 80)]) == []
        assert playback_gaps_ms([]) == []


class TestCrowd:
    def test_zeros_between_the_pieces_of_an_answer_are_a_gap(self):
        def delta(at_s: float, sample: int) -> Came:
            sound = base64.b64encode(sample.to_bytes(2, "little") * 2400).decode()
            return Came(at_s, "session.output_audio.delta", json.dumps({"type": "x", "delta": sound}))

        deltas = [delta(1.0, 7), delta(1.1, 0), delta(1.2, 0), delta(1.3, 7), delta(1.4, 0)]
        heard = Heard(deltas, deltas[-1])
        assert heard.pieces() == [(1.0, pytest.approx(0.1)), (1.3, pytest.approx(0.1))]
        gaps = playback_gaps_ms((at_s * 1000, plays_s * 1000) for at_s, plays_s in heard.pieces())
        assert gaps == [pytest.approx(200)]
        assert problem_of(heard) is None

    @pytest.mark.parametrize(
        ("event", "problem"),
        [
            ({"type": "error", "error": {"code": "queue_full", "message": "later"}}, "queue_full: later"),
            ({"type": "response.done", "response": {"status": "failed", "status_details": 1}}, "failed: 1"),
            ({"type": "response.done", "response": {"status": "completed"}}, "an answer without sound"),
        ],
    )
    def test_an_answer_that_is_none_says_why(self, event, problem):
        assert problem_of(Heard([], Came(0.0, event["type"], json.dumps(event)))) == problem


class TestLoops:
    async def test_a_closed_loop_keeps_as_many_under_way_as_it_has_workers(self):
        async with _server(answer_s=0.02, answer_from=3) as server:
            exchanges = await _with_gateway(server, lambda send: closed_loop(send, 3, 10))
            assert server.most_at_once == 3
            # Three connections race: requests that are sent together may arrive in any order.
            assert sorted(server.prompts) == sorted(exchange.prompt for exchange in exchanges)
            assert [exchange.prompt for exchange in exchanges] == [PROMPTS[i % len(PROMPTS)] for i in range(10)]
            for worker_free, exchange in zip(sorted(e.done_s for e in exchanges), exchanges[3:], strict=False):
                assert exchange.sent_s >= worker_free

    async def test_an_open_loop_sends_on_time_though_none_is_answered(self):
        async with _server(answer_from=4) as server:
            arrivals_s, began_s = [0.0, 0.02, 0.05, 0.06], []

            async def load(send) -> list[Exchange]:
                began_s.append(time.perf_counter())
                return await open_loop(send, arrivals_s)

            exchanges = await _with_gateway(server, load)
            assert server.most_at_once == 4  # all were sent before the first was answered
            for exchange, should_s in zip(exchanges, arrivals_s, strict=True):
                assert exchange.sent_s - began_s[0] > should_s - 0.001

    def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process(self):
        arrivals_s = poisson_arrivals(4.0, 20_001, seed=1)
        gaps_s = [after - before for before, after in itertools.pairwise(arrivals_s)]
        mean_s = sum(gaps_s) / len(gaps_s)
        deviation_s = (sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s)) ** 0.5
        assert arrivals_s[0] == 0.0
        assert mean_s == pytest.approx(0.25, rel=0.03)
        assert deviation_s == pytest.approx(mean_s, rel=0.05)  # of an exponential distribution they are equal
        assert arrivals_s == poisson_arrivals(4.0, 20_001, seed=1) != poisson_arrivals(4.0, 20_001, seed=2)

    def test_a_line_of_two_workers_before_a_server_for_one(self):
        assert line_arrivals([1.0, 2.0, 4.0, 5.0], 2, began_s=0.5) == [0.5, 0.5, 1.0, 2.0]
        answers = [Answer("", done_s - 1, done_s, audio=[(done_s, 1)]) for done_s in (1.0, 2.0, 3.0, 4.0)]
        assert [(each.sent_s, each.done_s) for each in in_line(answers, 2)] == [(1.0, 3.0), (2.0, 4.0)]


class TestStreams:
    async def test_a_stream_adds_up_to_an_answer(self, monkeypatch: pytest.MonkeyPatch):
        made: list[Exchange] = []
        monkeypatch.setattr(client, "Exchange", lambda *fields: made.append(Exchange(*fields)) or made[-1])

        def heard() -> int:
            return b"".join(piece for _, piece in made[0].pieces).count(b'"audio"')

        async with _server(frames=3, frame_every_s=0.05, heard=heard) as server:
            (exchange,) = await _with_gateway(server, lambda send: closed_loop(send, 1, 1))
        answer = exchange.answer()
        assert answer.error is None
        assert answer.said == ("so it is", 3 * FRAME_SAMPLES)
        assert answer.frames == 3
        assert answer.tokens == 5
        assert answer.timings["talker"]["total_ms"] == 7.0
        assert len(answer.text_s) == 2
        first_s, _, third_s = (came_s for came_s, _ in answer.audio)
        assert third_s - first_s > 0.08
        assert server.bodies[0]["quartet"]["talker"] == {"temperature": 0.0, "max_frames": 60}

    def test_an_event_in_two_pieces_counts_when_it_is_complete(self):
        data = base64.b64encode(bytes(20)).decode()
        event = b"data: " + json.dumps({"choices": [{"delta": {"audio": {"data": data}}}]}).encode() + b"\n\n"
        exchange = Exchange("", 0.0, 3.0, 200, [(1.0, event[:30]), (2.0, event[30:] + b"data: [DONE]\n\n")])
        assert exchange.answer().audio == [(2.0, 10)]

    async def test_refused_and_broken_streams_are_errors(self):
        async with _server(status=429) as server:
            (refused,) = await _with_gateway(server, lambda send: closed_loop(send, 1, 1))
        assert "429" in (refused.answer().error or "")
        async with _server(break_off=True) as server:
            (broken,) = await _with_gateway(server, lambda send: closed_loop(send, 1, 1))
        assert broken.answer().error
        with pytest.raises(ValueError, match="none of 1 requests"):
            figures([broken.answer()], RATE_HZ)


class TestFigures:
    def test_figures_of_known_answers(self):
        answers = [_answer(sent_s=0.0, first_s=0.1, every_s=0.08), _answer(sent_s=1.0, first_s=1.3, every_s=0.2)]
        result = figures([*answers, Answer("", 0.0, 0.1, error="refused")], RATE_HZ)
        assert (result.requests, result.failed, result.silent) == (2, 1, 0)
        assert result.spreads["ttfa_ms"]["p50"] == pytest.approx(200)
        assert result.spreads["itl_ms"]["p50"] == pytest.approx(10)
        assert result.spreads["tpot_ms"]["p50"] == pytest.approx(5)
        # 5 frames each: the last at 0.1 + 4 * 0.08 and at 0.3 + 4 * 0.2 after it was sent
        assert result.spreads["rtf"]["p50"] == pytest.approx((0.42 + 1.1) / 2 / (5 * FRAME_S))
        assert result.spreads["longest_gap_ms"]["p99"] == pytest.approx(120, rel=0.02)
        assert result.gap_free_share == 0.5
        assert result.wall_s == pytest.approx(2.1)
        assert result.audio_s_per_s == pytest.approx(10 * FRAME_S / 2.1)
        assert result.stage_frames_per_s["talker"] == pytest.approx(5 / 0.25)

    def test_cpu_time_of_a_process_and_its_children(self, tmp_path: Path):
        burn = "import time\nwhile time.process_time() < 0.35: pass\n"
        parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\nprint(flush=True)\ninput()"
        process = subprocess.Popen(
            [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        try:
            state = {"url": "http://x", "processes": {"stage": {"pid": process.pid}}}
            (tmp_path / "state.json").write_text(json.dumps(state))
            processes = Groups(system_pids(tmp_path))
            assert process.stdout
            process.stdout.readline()
            assert processes.cpu_s()["stage"] >= 0.3
            assert processes.memory_bytes()["stage"] > 1024 * 1024
        finally:
            process.communicate(b"\n")


def _answer(sent_s: float, first_s: float, every_s: float) -> Answer:
    audio = [(first_s + i * every_s, FRAME_SAMPLES) for i in range(5)]
    timings: dict = {"talker": {"total_ms": 300.0, "waited_for_text_ms": 50.0}}
    text_s = [sent_s + 0.01, sent_s + 0.02]
    return Answer("", sent_s, audio[-1][0], "hi", text_s, audio, tokens=3, frames=5, timings=timings)


class _Server:
    """Speaks like the gateway, as far as the benchmark listens; every answer is the same."""

    def __init__(
        self,
        answer_s: float,
        answer_from: int,
        frames: int,
        frame_every_s: float,
        heard: Callable[[], float],
        status: int,
        break_off: bool,
    ) -> None:
        self.heard = heard
        self._answer_from, self._enough = answer_from, asyncio.Event()
        self.answer_s, self.frames, self.frame_every_s = answer_s, frames, frame_every_s
        self.status, self.break_off = status, break_off
        self.at_once = self.most_at_once = 0
        self.bodies: list[dict] = []
        self.url = ""

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.startswith(b"GET"):
                    facts = json.dumps({"data": [{"id": "m", "quartet": {"sample_rate_hz": RATE_HZ}}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(facts), facts))
                    continue
                self.bodies.append(json.loads(body))
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                if self.at_once >= self._answer_from:
                    self._enough.set()
                await self._enough.wait()
                await self._answer(writer)
                self.at_once -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % self.status)
        data = base64.b64encode(bytes(2 * FRAME_SAMPLES)).decode()
        deltas = [{"content": "so "}, {"content": "it is"}, *([{"audio": {"data": data}}] * self.frames)]
        await asyncio.sleep(self.answer_s)
        for number, delta in enumerate(deltas):
            self._send(writer, {"choices": [{"delta": delta}]})
            if "audio" in delta:
                while self.heard() < number - 1:  # two deltas are text
                    await asyncio.sleep(0.005)
                await asyncio.sleep(self.frame_every_s)
        if self.break_off:
            raise ConnectionError
        talker = {"total_ms": 7.0, "waited_for_text_ms": 1.0}
        self._send(writer, {"choices": [], "quartet": {"frames": self.frames, "timings": {"talker": talker}}})
        self._send(writer, {"choices": [], "usage": {"completion_tokens_details": {"text_tokens": 5}}})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _send(self, writer: asyncio.StreamWriter, chunk: dict) -> None:
        self._chunk(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@asynccontextmanager
async def _server(
    answer_s: float = 0.0,
    answer_from: int = 0,
    frames: int = 1,
    frame_every_s: float = 0.0,
    heard: Callable[[], float] = lambda: math.inf,
    status: int = 200,
    break_off: bool = False,
) -> AsyncIterator[_Server]:
    """`answer_from`: none is answered before so many are there. `heard`: frames that the client has; each waits for the
    one before."""
    server = _Server(answer_s, answer_from, frames, frame_every_s, heard, status, break_off)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


async def _with_gateway(server: _Server, run) -> list[Exchange]:
    gateway = Gateway(server.url, Wish(tokens=40, frames=60, temperature=0.0, seed=0))
    try:
        assert (await gateway.facts())["sample_rate_hz"] == RATE_HZ
        return await run(gateway.send)
    finally:
        await gateway.close()
