"""The thinker's process, driven over gRPC."""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from quartet.v1 import media_pb2, server_info_pb2, server_info_pb2_grpc, stream_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.errors import ContextTooLong, InvalidInput, StageError, Unavailable
from services.common.rpc.status import from_rpc_error
from services.common.sampling_limits import BACKGROUND_PRIORITY
from services.common.stream.rows import Chunk
from services.thinker.environment import SCRATCH_PREFIX
from services.thinker.family import load_checkpoint
from services.thinker.plugin import SCRATCH_DIR
from tests.support.samples.media import mp4, png, wav
from tests.support.stage.streaming import subscribe
from tests.support.systems.hub import Hub
from tests.support.systems.hub import serving as hub_serving
from tests.support.systems.stack import free_port

# long: they start a thinker of their own; tests/system asks the shared one
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
START_TIMEOUT_S = 300
GUARD_S = 120


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: list[thinker_pb2.GenerateDelta] = field(default_factory=list)
    prompt_tokens: list[thinker_pb2.TokenLogprob] = field(default_factory=list)
    prompt: thinker_pb2.PromptInfo = field(default_factory=thinker_pb2.PromptInfo)
    summary: thinker_pb2.GenerateSummary = field(default_factory=thinker_pb2.GenerateSummary)


class Client:
    def __init__(self, address: str, process: subprocess.Popen[bytes]) -> None:
        self.address = address
        self.process = process
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = thinker_pb2_grpc.ThinkerServiceStub(self.channel)
        self.count = 0

    def start(self, *parts: Any, **fields: Any) -> thinker_pb2.GenerateStart:
        """A request of one user turn; `sampling` is greedy unless said otherwise."""
        self.count += 1
        content = [part if isinstance(part, thinker_pb2.ContentPart) else text(part) for part in parts or ("hello",)]
        fields.setdefault("messages", [thinker_pb2.ChatMessage(role="user", content=content)])
        fields["sampling"] = thinker_pb2.SamplingParameters(**({"temperature": 0} | fields.get("sampling", {})))
        return thinker_pb2.GenerateStart(request_id=f"request-{self.count}", **fields)

    async def generate(self, start: thinker_pb2.GenerateStart, chunks: tuple[bytes, ...] = ()) -> Answer:
        async def requests() -> AsyncIterator[thinker_pb2.GenerateRequest]:
            yield thinker_pb2.GenerateRequest(start=start)
            for chunk in chunks:
                yield thinker_pb2.GenerateRequest(media=media_pb2.MediaChunk(data=chunk))

        answer = Answer()
        try:
            async for response in self.stub.Generate(requests()):
                if response.WhichOneof("message") == "prompt":
                    answer.prompt = response.prompt
                elif response.WhichOneof("message") == "summary":
                    answer.summary = response.summary
                elif response.WhichOneof("message") == "prompt_logprobs":
                    assert not answer.deltas
                    answer.prompt_tokens += response.prompt_logprobs.tokens
                else:
                    answer.deltas.append(response.delta)
                    answer.text += response.delta.text
                    answer.token_ids += response.delta.token_ids
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return answer

    async def load(self) -> server_info_pb2.GetLoadResponse:
        info = server_info_pb2_grpc.ServerInfoServiceStub(self.channel)
        return await info.GetLoad(server_info_pb2.GetLoadRequest())


def text(value: str) -> thinker_pb2.ContentPart:
    return thinker_pb2.ContentPart(text=value)


def media(kind: int, data: bytes, **fields: Any) -> thinker_pb2.ContentPart:
    return thinker_pb2.ContentPart(media=media_pb2.Media(kind=kind, data=data, **fields))  # pyright: ignore


@contextlib.asynccontextmanager
async def serving(
    model: Path | str, environment: Mapping[str, str] | None = None, log: Path | None = None
) -> AsyncIterator[Client]:
    """A thinker's process, once it serves; with `environment` beside our own. `log` is where it writes."""
    address = f"127.0.0.1:{free_port()}"
    flags = f"--model {model} --port {address.rpartition(':')[2]} --dtype float32 --block-size 32"
    flags += f" --kv-cache-bytes {48 << 20} --max-running-requests 8 --max-context-tokens 1024 --max-audio-s 5"
    flags += " --prompt-logprobs=true"
    with log.open("wb") if log else contextlib.nullcontext() as output:
        command = [sys.executable, "-m", "services.thinker", *flags.split()]
        environment = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    client = Client(address, process)
    try:
        info = server_info_pb2_grpc.ServerInfoServiceStub(client.channel)
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                assert process.poll() is None, "the thinker ended before it served"
                try:
                    await info.GetServerInfo(server_info_pb2.GetServerInfoRequest())
                    break
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.2)
        yield client
    finally:
        await client.channel.close()
        process.terminate()
        await asyncio.to_thread(process.wait, GUARD_S)


@pytest.fixture(scope="module")
def hub(published_checkpoint: Path) -> Iterator[Hub]:
    with hub_serving("some/omni", published_checkpoint) as hub:
        yield hub


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `client`'s thinker wrote."""
    return tmp_path_factory.mktemp("thinker") / "log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(hub: Hub, log: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with serving(hub.model, hub.environment(tmp_path_factory.mktemp("hub")), log) as client:
        yield client


async def test_deltas_of_several_answers_come_by_a_stream(client: Client) -> None:
    def start(n: int, **fields: Any) -> thinker_pb2.GenerateStart:
        sampling = {"max_tokens": 8 + n, "ignore_eos": True}
        return client.start(f"hello {n}", sampling=sampling, **fields)

    expected = await asyncio.gather(*(client.generate(start(n)) for n in range(4)))
    messages = client.stub.StreamDeltas(thinker_pb2.StreamDeltasRequest(stream_id="deltas"))
    assert not (await messages.read()).deltas
    to = [thinker_pb2.DeltaDestination(stream_id="deltas", answer=n) for n in range(4)]
    work = asyncio.gather(*(client.generate(start(n, deltas_to=to[n])) for n in range(4)))
    streamed: dict[int, Answer] = {n: Answer() for n in range(4)}
    async with asyncio.timeout(GUARD_S):
        answers = await work
        while any(len(streamed[n].deltas) < answers[n].summary.streamed_deltas for n in range(4)):
            for told in (await messages.read()).deltas:
                streamed[told.answer].deltas.append(told.delta)
                streamed[told.answer].token_ids += told.delta.token_ids
                streamed[told.answer].text += told.delta.text
    for n in range(4):
        assert not answers[n].deltas
        assert answers[n].summary.completion_tokens == 8 + n
        assert (streamed[n].text, streamed[n].token_ids) == (expected[n].text, expected[n].token_ids)
    again = client.stub.StreamDeltas(thinker_pb2.StreamDeltasRequest(stream_id="deltas"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await again.read()
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidInput)
    assert "stream_id" in str(error)
    messages.cancel()


async def test_a_start_by_id_asks_the_hub_for_no_file_twice(client: Client, hub: Hub) -> None:
    """vLLM's two processes and the libraries under it included. A file is asked for by HEAD, then by GET."""
    info = await server_info_pb2_grpc.ServerInfoServiceStub(client.channel).GetServerInfo(
        server_info_pb2.GetServerInfoRequest()
    )
    assert info.model == hub.model
    assert info.thinker.kv_blocks * info.thinker.kv_block_tokens > info.thinker.max_context_tokens
    requests = hub.about_model(hub.log)
    assert ("GET", "tokenizer_config.json") in requests
    assert set(requests.values()) == {1}, requests


async def test_a_prompt_is_counted_and_nothing_is_written(client: Client) -> None:
    whole = await client.generate(client.start("hello", sampling={"max_tokens": 2}))
    counted = await client.generate(client.start("hello", count_only=True))
    assert counted.summary.prompt_tokens == whole.summary.prompt_tokens > 0
    assert (counted.token_ids, counted.text, counted.summary.completion_tokens) == ([], "", 0)
    with pytest.raises(InvalidInput) as refused:
        await client.generate(client.start("hello", count_only=True, output_stream_id="counted"))
    assert refused.value.field == "output_stream_id"


async def test_an_answer_is_streamed_token_by_token(client: Client) -> None:
    answer = await client.generate(client.start("hello", sampling={"max_tokens": 12, "ignore_eos": True}))
    assert len(answer.token_ids) == answer.summary.completion_tokens == 12
    assert answer.summary.finish_reason == thinker_pb2.FINISH_REASON_LENGTH
    timings = answer.summary.timings
    assert 0 < timings.prefill_ms < timings.first_output_ms <= timings.total_ms

    async def requests() -> AsyncIterator[thinker_pb2.GenerateRequest]:
        start = client.start("hello", sampling={"max_tokens": 900, "ignore_eos": True})
        yield thinker_pb2.GenerateRequest(start=start)

    # Steps are merged when the client is slow, on a busy machine many of them: but not so many as this answer has.
    deltas, call = 0, client.stub.Generate(requests())
    while deltas < 3:
        response = await call.read()
        assert not response.HasField("summary"), deltas
        deltas += response.HasField("delta")
    call.cancel()


async def test_media_are_counted_and_may_come_in_chunks(client: Client) -> None:
    sound = wav(1.2)
    parts = media(media_pb2.MEDIA_KIND_IMAGE, png()), media(media_pb2.MEDIA_KIND_AUDIO, sound), "what?"
    inline = await client.generate(client.start(*parts, sampling={"max_tokens": 6}))
    assert inline.prompt.image_tokens > 0
    assert inline.prompt.audio_tokens > 0
    late = media(media_pb2.MEDIA_KIND_AUDIO, b"", size_bytes=len(sound))
    start = client.start(parts[0], late, "what?", sampling={"max_tokens": 6})
    chunked = await client.generate(start, (sound[:1000], sound[1000:]))
    assert chunked.token_ids == inline.token_ids
    assert chunked.summary.cached_tokens > 0


async def test_the_output_stream_has_rows_for_the_tokens_that_are_spoken(client: Client) -> None:
    start = client.start("tell me", output_stream_id="stream-1", sampling={"max_tokens": 20})
    rows: dict[str, list[int]] = {}
    end = 0
    token_ids: list[int] = []

    async def pull() -> None:
        nonlocal end
        source = stream_pb2.StreamSource(address=client.address, stream_id="stream-1")
        async with subscribe(source, start.request_id, []) as messages:
            async for message in messages:
                if isinstance(message, stream_pb2.StreamEnd):
                    end = message.end_position
                if isinstance(message, Chunk):
                    for part in message.rows:
                        count = len(part.tensor)
                        rows.setdefault(part.name, []).extend(range(part.first_position, part.first_position + count))
                        if part.name == "token_ids":
                            token_ids.extend(part.tensor.tolist())

    answer, _ = await asyncio.gather(client.generate(start), pull())
    prompt_tokens, stopped = answer.prompt.prompt_tokens, answer.summary.finish_reason == 1
    spoken = answer.token_ids[:-1] if stopped else answer.token_ids
    assert end == prompt_tokens + len(spoken)
    assert token_ids[prompt_tokens:] == spoken
    fed = prompt_tokens + len(answer.token_ids) - 1
    for name, positions in rows.items():
        assert positions == list(range(end if name == "token_ids" else fed)), name
    assert len(rows) == 3


async def test_sampling_is_passed_on(client: Client) -> None:
    free = await client.generate(client.start("go on", sampling={"max_tokens": 16, "ignore_eos": True}))
    stop = free.text[4:6]
    stopped = await client.generate(
        client.start("go on", sampling={"max_tokens": 16, "ignore_eos": True, "stop": [stop]})
    )
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.summary.finish_reason == thinker_pb2.FINISH_REASON_STOP
    assert (stopped.summary.stop, free.summary.stop) == (stop, "")

    seeded = {"max_tokens": 16, "temperature": 1.5, "seed": 7, "ignore_eos": True}
    first, second = [await client.generate(client.start("go on", sampling=seeded)) for _ in range(2)]
    other = await client.generate(client.start("go on", sampling=seeded | {"seed": 8}))
    assert first.token_ids == second.token_ids != other.token_ids

    logged = await client.generate(client.start("go on", sampling={"max_tokens": 3, "top_logprobs": 2}))
    entries = [entry for delta in logged.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == logged.token_ids
    assert all(entry.top[0].token_id == entry.token_id and len(entry.top) >= 2 for entry in entries)


async def test_log_probabilities_of_a_prompt_are_those_that_it_was_written_with(client: Client) -> None:
    asked = client.start("go on " * 40, sampling={"max_tokens": 6, "top_logprobs": 2, "ignore_eos": True})
    written = await client.generate(asked)
    entries = [entry for delta in written.deltas for entry in delta.logprobs]
    before = (await client.stub.Tokenize(thinker_pb2.TokenizeRequest(messages=asked.messages))).token_ids
    ids = thinker_pb2.TokenIds(ids=[*before, *written.token_ids])
    sampling = {"max_tokens": 1, "prompt_logprobs": 2}
    read = await client.generate(client.start(messages=[], prompt={"token_ids": ids}, sampling=sampling))
    assert [token.token_id for token in read.prompt_tokens] == list(ids.ids)
    assert read.summary.cached_tokens == 0  # what the cache has was not computed, and has no probabilities
    first, *others = read.prompt_tokens
    assert math.isnan(first.logprob)
    assert not first.top
    assert all(token.logprob <= 0 and len(token.top) == 2 for token in others)
    for told, entry in zip(others[-len(entries) :], entries, strict=True):
        assert (told.token, told.rank, told.top[0].token_id) == (entry.token, 1, entry.token_id)
        assert told.logprob == pytest.approx(entry.logprob, abs=1e-3)


async def test_with_tools_the_answer_may_be_one_of_some_texts(client: Client) -> None:
    sampling = {"max_tokens": 60, "choice": {"texts": ["Rome", "Paris"]}}
    answer = await client.generate(client.start("where?", tools=[thinker_pb2.Tool(name="pick")], sampling=sampling))
    named = [piece.name for delta in answer.deltas for piece in delta.tool_calls if piece.name]
    assert answer.text in ("Rome", "Paris") or (answer.text.strip(), named[0]) == ("", "pick")


async def test_structure_and_forced_tool_calls(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 10}},
        "required": ["n"],
        "additionalProperties": False,
    }
    sampling = {"max_tokens": 60}
    answer = await client.generate(client.start("n?", sampling=sampling | {"json_schema": json.dumps(schema)}))
    assert 10 <= json.loads(answer.text)["n"] <= 99
    tool = thinker_pb2.Tool(name="pick", parameters_json=json.dumps(schema))
    choice = thinker_pb2.ToolChoice(mode=thinker_pb2.ToolChoice.MODE_FUNCTION, name="pick")
    called = await client.generate(client.start("n?", tools=[tool], tool_choice=choice, sampling=sampling))
    pieces = [piece for delta in called.deltas for piece in delta.tool_calls]
    assert called.text == ""
    assert (pieces[0].name, bool(pieces[0].id)) == ("pick", True)
    assert 10 <= json.loads("".join(piece.arguments_json for piece in pieces))["n"] <= 99
    assert called.summary.finish_reason == thinker_pb2.FINISH_REASON_TOOL_CALLS
    structured = sampling | {"json_schema": json.dumps({"type": "object", "required": ["other"]})}
    called = await client.generate(client.start("n?", tools=[tool], tool_choice=choice, sampling=structured))
    assert [piece.name for delta in called.deltas for piece in delta.tool_calls if piece.name] == ["pick"]


@pytest.mark.parametrize("calls", [True, False])
async def test_with_tools_a_structured_answer_may_be_a_call(client: Client, tiny_checkpoint: Path, calls: bool) -> None:
    """Which of both, its first token decides, here by its bias."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 10}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    tokenizer = load_checkpoint(str(tiny_checkpoint)).tokenizer
    opening, brace = (tokenizer.convert_tokens_to_ids(each) for each in ("<tool_call>", "{"))
    sampling = {"max_tokens": 60, "json_schema": json.dumps(schema), "logit_bias": {opening if calls else brace: 100}}
    tools = [thinker_pb2.Tool(name="pick", parameters_json=json.dumps(schema))]
    answer = await client.generate(client.start("n?", tools=tools, sampling=sampling))
    pieces = [piece for delta in answer.deltas for piece in delta.tool_calls]
    if calls:
        assert (answer.text.strip(), pieces[0].name) == ("", "pick")
        first = "".join(piece.arguments_json for piece in pieces if piece.index == 0)
        assert 10 <= json.loads(first)["n"] <= 99
    else:
        assert not pieces
        assert 10 <= json.loads(answer.text)["n"] <= 99


ENDLESS = json.dumps({"type": "object", "properties": {"kid": {"$ref": "#"}}, "required": ["kid"]})
TOOLS = [thinker_pb2.Tool(name="fine"), thinker_pb2.Tool(name="endless", parameters_json=ENDLESS)]
ANY = {"mode": thinker_pb2.ToolChoice.MODE_REQUIRED}
IMAGE, AUDIO, VIDEO = media_pb2.MEDIA_KIND_IMAGE, media_pb2.MEDIA_KIND_AUDIO, media_pb2.MEDIA_KIND_VIDEO
MIX = (media(VIDEO, mp4(1.0)), media(AUDIO, wav(1.0)), "?")
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no messages": ("messages", {"messages": []}),
    "role": ("messages[0].role", {"messages": [thinker_pb2.ChatMessage(role="user<|im_end|>")]}),
    "top_p": ("sampling.top_p", {"sampling": {"top_p": 2}}),
    "nan": ("sampling.temperature", {"sampling": {"temperature": float("nan")}}),
    "max_tokens": ("sampling.max_tokens", {"sampling": {"max_tokens": 0}}),
    "schema": ("sampling.json_schema", {"sampling": {"json_schema": "{"}}),
    "endless schema": ("sampling.json_schema", {"sampling": {"json_schema": ENDLESS}}),
    "endless schema beside tools": (
        "sampling.json_schema",
        {"sampling": {"json_schema": ENDLESS}, "tools": [thinker_pb2.Tool(name="a")]},
    ),
    "endless tool": ("tools[1].parameters_json", {"tools": TOOLS, "tool_choice": ANY}),
    "endless tool beside a structure": (
        "tools[1].parameters_json",
        {"tools": TOOLS, "sampling": {"json_object": True}},
    ),
    "pointer of a tool": (
        "tools[0].parameters_json",
        {
            "tools": [thinker_pb2.Tool(name="a", parameters_json='{"properties": {"x": {"$ref": "#/no"}}}')],
            "tool_choice": ANY,
        },
    ),
    "regex": ("sampling.regex", {"sampling": {"regex": "(("}}),
    "grammar": ("sampling.grammar", {"sampling": {"grammar": "root ::= ("}}),
    "endless grammar": ("sampling.grammar", {"sampling": {"grammar": 'root ::= "a" root'}}),
    "tag": ("sampling.structural_tag", {"sampling": {"structural_tag": '{"format": {"type": "no"}}'}}),
    "tag beside tools": (
        "sampling.structural_tag",
        {"sampling": {"structural_tag": "{}"}, "tools": [thinker_pb2.Tool(name="a")]},
    ),
    "choice": ("sampling.choice", {"sampling": {"choice": {}}}),
    "cut": ("truncate_prompt_tokens", {"truncate_prompt_tokens": 1024}),
    "stop": ("sampling.stop", {"sampling": {"stop": [""]}}),
    "tool": ("tool_choice.name", {"tools": [thinker_pb2.Tool(name="a")], "tool_choice": {"mode": 4, "name": "b"}}),
    "long": ("messages", {"parts": ("word " * 3000,)}),
    "corrupt image": ("here", {"parts": (media(IMAGE, png()[:60], field="here"),)}),
    "1 x 1 image": ("messages[0].content[0]", {"parts": (media(IMAGE, png(1, 1)),)}),
    "long sound": ("messages[0].content[0]", {"parts": (media(AUDIO, wav(8.0)),)}),
    "no sound": ("messages[0].content[0]", {"parts": (media(AUDIO, wav(0.0)),)}),
    "narrow image": ("messages[0].content[0]", {"parts": (media(IMAGE, png(900, 4)),)}),
    "narrow video": ("messages[0].content[0]", {"parts": (media(VIDEO, mp4(1.0, size=(4096, 16))),)}),
    "sound of a video beside a sound": ("use_audio_in_video", {"parts": MIX, "use_audio_in_video": True}),
    "silent video beside another": (
        "messages[0].content[1]",
        {"parts": (media(VIDEO, mp4(1.0)), media(VIDEO, mp4(1.0, sound=False))), "use_audio_in_video": True},
    ),
}
INSIDES = (" at 0x", "Error", "libav", "PIL", "numpy", "Errno")


async def test_bad_input_is_refused_by_field_while_others_go_on(client: Client) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    expected = await client.generate(client.start("on and on", sampling=long))
    other = asyncio.create_task(client.generate(client.start("on and on", sampling=long)))
    for name, (where, fields) in BAD.items():
        parts = fields.get("parts", ())
        with pytest.raises(InvalidInput) as caught:
            await client.generate(client.start(*parts, **{k: v for k, v in fields.items() if k != "parts"}))
        assert caught.value.field == where, name
        assert not [word for word in INSIDES if word in str(caught.value)], str(caught.value)
        assert isinstance(caught.value, ContextTooLong) == (name == "long"), name
    assert (await other).token_ids == expected.token_ids


async def test_the_sound_of_a_video_beside_a_sound_is_sent_as_the_refusal_says(client: Client) -> None:
    with pytest.raises(InvalidInput, match="send each video's file again, as an audio part after it"):
        await client.generate(client.start(*MIX, use_audio_in_video=True))
    video, question, text = MIX
    silent = await client.generate(client.start(*MIX, count_only=True))
    heard = await client.generate(client.start(video, media(AUDIO, mp4(1.0)), question, text, count_only=True))
    assert heard.summary.prompt_tokens > silent.summary.prompt_tokens + 10


def processes_of(client: Client) -> list[psutil.Process]:
    """Of the thinker, those that it started."""
    return psutil.Process(client.process.pid).children(recursive=True)


def words_of(process: psutil.Process) -> str:
    """Its name and command; none if it has ended meanwhile."""
    try:
        return " ".join((process.name(), *process.cmdline()))
    except psutil.NoSuchProcess:
        return ""


async def test_a_cancelled_request_frees_its_place(client: Client) -> None:
    tasks = [
        asyncio.create_task(client.generate(client.start("go", sampling={"max_tokens": 900, "ignore_eos": True})))
        for _ in range(30)
    ]
    async with asyncio.timeout(GUARD_S):
        while not (await client.load()).queued:
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (load := await client.load()).running or load.queued:
            await asyncio.sleep(0.02)
    assert (await client.generate(client.start("hello", sampling={"max_tokens": 2}))).token_ids


async def test_a_schema_whose_client_has_left_delays_nobody(client: Client) -> None:
    slow = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}  # over a minute
    sampling = {"json_schema": json.dumps(slow)}
    tasks = [asyncio.create_task(client.generate(client.start("go", sampling=sampling))) for _ in range(8)]
    await asyncio.sleep(2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begun = time.monotonic()
    assert (await client.generate(client.start("go", sampling={"json_object": True, "max_tokens": 2}))).token_ids
    assert time.monotonic() - begun < 10
    async with asyncio.timeout(10):  # until the compiler that others are forked from is alone
        while len([child for child in processes_of(client) if "grammar_process" in words_of(child)]) != 1:
            await asyncio.sleep(0.05)


async def test_a_request_is_announced_unless_it_lets_others_go_first(client: Client) -> None:
    (directory,) = {child.environ().get(SCRATCH_DIR) for child in processes_of(client)} - {None}
    file, announced = Path(directory or "", "expected"), []
    for fields in ({"priority": BACKGROUND_PRIORITY}, {"count_only": True}, {}):
        before = file.read_bytes()
        await client.generate(client.start("hello", sampling={"max_tokens": 1}, **fields))
        announced.append(file.read_bytes() != before)
    assert announced == [False, False, True]


async def test_an_answer_in_the_background_comes_in_few_deltas(client: Client) -> None:
    sampling = {"max_tokens": 60, "ignore_eos": True, "top_logprobs": 2}
    expected = await client.generate(client.start("go", sampling=sampling))
    began_s = time.monotonic()
    answer = await client.generate(client.start("go", sampling=sampling, priority=BACKGROUND_PRIORITY))
    assert len(answer.deltas) <= 2 + (time.monotonic() - began_s) / 0.1
    assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
    counted = [len([each for delta in one.deltas for each in delta.logprobs]) for one in (answer, expected)]
    assert counted == [60, 60]
    assert answer.summary.completion_tokens == 60


async def test_no_socket_between_its_processes_is_open_to_others(client: Client) -> None:
    thinker = psutil.Process(client.process.pid)
    processes = (thinker, *thinker.children(recursive=True))
    sockets = {each.laddr for process in processes for each in process.net_connections("unix")}
    paths = [path for path in map(str, sockets) if path]
    assert len([path for path in paths if "/rows-" in path]) == 1
    for path in paths:
        assert path.startswith("/"), path  # not in the abstract namespace
        assert Path(path).parent.stat().st_mode & 0o077 == 0, path


async def test_every_line_of_the_log_is_json(client: Client, log: Path) -> None:
    """vLLM's too, of all its processes, and those of the libraries that it uses."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["stage"] for line in lines} == {"thinker"}
    events = {line["event"]: line for line in lines}
    memory, paths = events["memory of the KV cache"], events["execution paths"]
    assert memory["kv_bytes"] > memory["rows_bytes"] > 0
    assert {"step", "runner", "attention", "sampler"} <= set(paths)
    assert 0 < events["fetching"]["fetched_bytes"] <= events["fetching"]["all_bytes"]  # it was started by its hub id


async def test_a_start_that_is_interrupted_leaves_no_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.thinker", "--model", str(tiny_checkpoint)]
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    async with asyncio.timeout(START_TIMEOUT_S):
        while not list(tmp_path.glob(f"{SCRATCH_PREFIX}*")):
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, GUARD_S) == 0
    assert not list(tmp_path.glob(f"{SCRATCH_PREFIX}*"))


async def test_a_dead_engine_is_reported_at_once_and_ends_the_process(client: Client) -> None:
    """The last test of this module: the process that all share ends."""
    children = processes_of(client)
    engine = next(child for child in children if "EngineCore" in words_of(child))
    os.kill(engine.pid, signal.SIGSTOP)  # so that it does not end the request before
    running = asyncio.create_task(client.generate(client.start("go")))
    async with asyncio.timeout(GUARD_S):
        while not (await client.load()).running:
            await asyncio.sleep(0.02)
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(GUARD_S):  # else never
        with pytest.raises(StageError) as caught:
            await running
    assert isinstance(caught.value, Unavailable)
    assert await asyncio.to_thread(client.process.wait, GUARD_S) != 0
    _, alive = psutil.wait_procs(children, timeout=GUARD_S)
    assert not alive
