"""`quartet.v1.TalkerService` over a real gRPC server, input inline or pulled from another one's stream."""

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch

from quartet.v1 import stream_pb2, stream_pb2_grpc, talker_pb2, talker_pb2_grpc
from services.common.errors import InternalError, InvalidInput, QueueFull, StageError
from services.common.rpc.call import Admission
from services.common.rpc.status import from_rpc_error
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shared_memory import SharedMemoryTransport, aligned
from services.common.stream.tensors import to_message, to_torch
from services.families.qwen3_omni.talker_prompt import PromptSpec, is_media
from services.talker.engine import TalkerEngine
from services.talker.model import load_talker
from services.talker.runner import TalkerRunner
from services.talker.servicer import TalkerServicer
from tests.support.clock import until
from tests.support.references.qwen3_omni import Reference, ReferenceAnswer
from tests.support.samples.conversations import CONVERSATIONS, read_prompt_spec
from tests.support.stage.shm import arena_directory
from tests.support.stage.streaming import CONSUMER, reading, subscribe
from tests.support.stage.talker import requests

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_TOKENS, MAX_FRAMES = 8, 10
GUARD_S = 120.0


@dataclass
class Service:
    """A talker behind gRPC, whose hub also plays the thinker's."""

    admission: Admission
    address: str
    stub: talker_pb2_grpc.TalkerServiceStub
    engine: TalkerEngine
    hub: StreamHub
    answer: ReferenceAnswer
    prompt_spec: PromptSpec

    def rows(self) -> list[stream_pb2.Rows]:
        """What a thinker streams for the answer."""
        spec, answer = self.prompt_spec, self.answer
        prompt = torch.from_numpy(answer.prompt_ids)
        ids = torch.cat((prompt, torch.tensor(answer.token_ids))).int()
        rows = [_rows("token_ids", 0, ids), _rows("rope_positions", 0, answer.rope_positions.int())]
        states = answer.hidden_states[spec.state_layer]
        positions = torch.nonzero(is_media(prompt, spec)).flatten().tolist()
        return rows + [_rows(spec.states, position, states[position : position + 1]) for position in positions]

    def inline(self, **fields) -> talker_pb2.SpeakStart:
        header = stream_pb2.StreamHeader(prompt_positions=len(self.answer.prompt_ids))
        request = talker_pb2.SpeakStart(
            request_id=uuid.uuid4().hex,
            inline=talker_pb2.InlineThinkerOutput(header=header, rows=self.rows()),
            sampling=talker_pb2.TalkerSampling(temperature=0, max_frames=MAX_FRAMES),
        )
        request.MergeFrom(talker_pb2.SpeakStart(**fields))
        return request

    def sourced(self, stream_id: str, **fields) -> talker_pb2.SpeakStart:
        source = stream_pb2.StreamSource(address=self.address, stream_id=stream_id)
        sampling = talker_pb2.TalkerSampling(temperature=0, max_frames=MAX_FRAMES)
        return talker_pb2.SpeakStart(request_id=stream_id, source=source, sampling=sampling, **fields)

    async def speak(self, start: talker_pb2.SpeakStart) -> tuple[np.ndarray, talker_pb2.SpeakSummary]:
        parts, summary = [], None
        try:
            async with asyncio.timeout(GUARD_S):
                async for response in self.stub.Speak(requests(start)):
                    if response.HasField("frames"):
                        parts.append(to_torch(response.frames.tensor).numpy())
                    elif response.HasField("summary"):
                        summary = response.summary
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        assert summary is not None
        return np.concatenate(parts) if parts else np.zeros((0, 0), np.int32), summary


def _rows(name: str, first_position: int, tensor: torch.Tensor) -> stream_pb2.Rows:
    return stream_pb2.Rows(name=name, first_position=first_position, tensor=to_message(tensor))


def _put(stream: OutputStream, *rows: stream_pb2.Rows) -> None:
    stream.put([Rows(row.name, row.first_position, to_torch(row.tensor)) for row in rows])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_checkpoint: Path):
    family, model = load_talker(str(tiny_checkpoint), torch.device("cpu"), torch.float32)
    prompt_spec = read_prompt_spec(tiny_checkpoint)
    answer = Reference(tiny_checkpoint).answer(
        CONVERSATIONS["image and audio"], MAX_TOKENS, MAX_FRAMES, layers=(prompt_spec.state_layer,)
    )
    server, hub, admission = grpc.aio.server(), StreamHub(), Admission(max_running=2, max_queued=1)
    engine = TalkerEngine(TalkerRunner(model, slots=2, positions=1024))
    servicer = TalkerServicer(admission, hub, CONSUMER)
    servicer.engine, servicer.family = engine, family
    admission.open()
    talker_pb2_grpc.add_TalkerServiceServicer_to_server(servicer, server)
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "thinker"), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = talker_pb2_grpc.TalkerServiceStub(channel)
        yield Service(admission, address, stub, engine, hub, answer, prompt_spec)
    await server.stop(0.5)
    engine.stop()


async def test_inline_input_gives_the_references_codes(service: Service) -> None:
    codes, summary = await service.speak(service.inline())
    np.testing.assert_array_equal(codes, service.answer.codes)
    assert summary.frames == len(codes)
    assert summary.timings.first_output_ms <= summary.timings.total_ms


async def test_a_streamed_answer_comes_back_on_the_output_stream(service: Service) -> None:
    prompt_positions = len(service.answer.prompt_ids)
    token_ids, *others = service.rows()
    ids = to_torch(token_ids.tensor)
    with service.hub.open("thought", ["token_ids", "rope_positions", others[-1].name]) as thinker:
        speaking = asyncio.create_task(service.speak(service.sourced("thought", output_stream_id="speech")))
        thinker.start(prompt_positions)
        _put(thinker, _rows("token_ids", 0, ids[:prompt_positions]), *others)
        for i in range(prompt_positions, len(ids)):
            await asyncio.sleep(0.01)
            _put(thinker, _rows("token_ids", i, ids[i : i + 1]))
        source = stream_pb2.StreamSource(address=service.address, stream_id="speech")
        frames, end = [], None
        async with asyncio.timeout(GUARD_S), subscribe(source, "speech", []) as messages:
            thinker.finish(len(ids))
            async for message in messages:
                if isinstance(message, Chunk):
                    frames += [rows.tensor.numpy() for rows in message.rows]
                elif isinstance(message, stream_pb2.StreamEnd):
                    end = message.end_position
        in_response, summary = await speaking
    np.testing.assert_array_equal(np.concatenate(frames), service.answer.codes)
    assert end == summary.frames == len(service.answer.codes)
    assert not len(in_response)
    assert summary.waited_for_text_ms > 0


async def test_frames_of_an_output_stream_come_back_too_if_wanted(service: Service) -> None:
    start = service.inline(output_stream_id="both", wants_frames=True)
    speaking = asyncio.create_task(service.speak(start))
    source = stream_pb2.StreamSource(address=service.address, stream_id="both")
    frames = []
    async with asyncio.timeout(GUARD_S), subscribe(source, "both", []) as messages:
        async for message in messages:
            if isinstance(message, Chunk):
                frames += [rows.tensor.numpy() for rows in message.rows]
    in_response, summary = await speaking
    np.testing.assert_array_equal(in_response, service.answer.codes)
    np.testing.assert_array_equal(np.concatenate(frames), service.answer.codes)
    assert summary.frames == len(in_response)


async def test_states_are_read_in_place_and_given_back_once_the_prompt_is_embedded(service: Service) -> None:
    prompt_positions = len(service.answer.prompt_ids)
    token_ids, *others = service.rows()
    ids = to_torch(token_ids.tensor)
    with arena_directory() as directory, contextlib.ExitStack() as stack:
        transport = SharedMemoryTransport(directory, 2**20, 1)
        service.hub.transports.append(transport)
        stack.callback(transport.arena.close)
        stack.callback(service.hub.transports.clear)
        stack.enter_context(reading(directory, "inline", "shared_memory"))
        thinker = stack.enter_context(service.hub.open("lent", ["token_ids", "rope_positions", others[-1].name]))
        speaking = asyncio.create_task(service.speak(service.sourced("lent")))
        thinker.start(prompt_positions)
        _put(thinker, _rows("token_ids", 0, ids[:prompt_positions]), *others)
        states_bytes = sum(aligned(len(row.tensor.inline)) for row in others[1:])
        assert states_bytes
        # Nothing can be spoken yet: the talker holds on to the states, and to nothing else.
        await until(lambda: not thinker.pending_positions and transport.arena.used_bytes == states_bytes)
        _put(thinker, _rows("token_ids", prompt_positions, ids[prompt_positions : prompt_positions + 1]))
        await until(lambda: not transport.arena.used_bytes)
        assert not speaking.done()  # it waits for more text
        _put(thinker, _rows("token_ids", prompt_positions + 1, ids[prompt_positions + 1 :]))
        thinker.finish(len(ids))
        codes, _ = await speaking
        np.testing.assert_array_equal(codes, service.answer.codes)
        await until(lambda: not transport.arena.used_bytes)


async def test_an_empty_answer_has_no_frames(service: Service) -> None:
    request = service.inline()
    for rows in request.inline.rows:
        if rows.name == "token_ids":
            rows.tensor.CopyFrom(to_message(torch.from_numpy(service.answer.prompt_ids).int()))
    codes, summary = await service.speak(request)
    assert not len(codes)
    assert summary.end == talker_pb2.SPEECH_END_EMPTY


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("speaker", {"speaker": "nobody"}),
        ("sampling.top_p", {"sampling": talker_pb2.TalkerSampling(top_p=1.5)}),
        ("sampling.temperature", {"sampling": talker_pb2.TalkerSampling(temperature=-1)}),
        ("sampling.max_frames", {"sampling": talker_pb2.TalkerSampling(max_frames=0)}),
    ],
)
async def test_bad_fields_are_named(service: Service, field: str, change: dict) -> None:
    with pytest.raises(InvalidInput) as error:
        await service.speak(service.inline(**change))
    assert error.value.field == field


@pytest.mark.parametrize("positions", [2**62, -1, 0])
async def test_a_prompt_that_no_thinker_has_is_refused(service: Service, positions: int) -> None:
    request = service.inline()
    request.inline.header.prompt_positions = positions
    with pytest.raises(InvalidInput, match="prompt_positions"):
        await service.speak(request)


async def test_a_speaker_in_capitals_is_known(service: Service) -> None:
    speaker = service.engine.spec.speakers[0]
    codes, _ = await service.speak(service.inline(speaker=speaker.upper()))
    np.testing.assert_array_equal(codes, service.answer.codes)


async def test_ids_outside_the_vocabulary_are_refused(service: Service) -> None:
    request = service.inline()
    request.inline.rows.append(_rows("token_ids", 10**6, torch.tensor([2**30], dtype=torch.int32)))
    with pytest.raises(InvalidInput, match="token_ids"):
        await service.speak(request)


@pytest.mark.parametrize(
    ("name", "value"), [("rope_positions", 2**63 - 1), ("rope_positions", -1), ("hidden_states", torch.nan)]
)
async def test_rows_of_hostile_values_are_refused_and_hurt_nobody(service: Service, name: str, value: float) -> None:
    request = service.inline(sampling=talker_pb2.TalkerSampling(temperature=1, predictor_temperature=1))
    for rows in request.inline.rows:
        if rows.name.startswith(name):
            tensor = to_torch(rows.tensor).to(torch.float32 if name == "hidden_states" else torch.int64)
            tensor.flatten()[-1] = value
            rows.tensor.CopyFrom(to_message(tensor))
    with pytest.raises(InvalidInput, match=name):
        await service.speak(request)
    codes, _ = await service.speak(service.inline())
    np.testing.assert_array_equal(codes, service.answer.codes)


async def test_missing_rows_are_refused(service: Service) -> None:
    request = service.inline()
    del request.inline.rows[-1]
    with pytest.raises(InvalidInput, match="before all rows"):
        await service.speak(request)


async def test_a_failed_thinker_ends_the_call_and_its_output_with_that_error(service: Service) -> None:
    with service.hub.open("failing", ["token_ids", "rope_positions", service.rows()[-1].name]) as thinker:
        request = service.sourced("failing", output_stream_id="failing speech")
        speaking = asyncio.create_task(service.speak(request))
        thinker.start(len(service.answer.prompt_ids))
        ids = to_torch(service.rows()[0].tensor)
        _put(thinker, _rows("token_ids", 0, ids[: len(service.answer.prompt_ids) + 1]), *service.rows()[1:])
        await asyncio.sleep(0.2)
        thinker.fail(InternalError("the thinker broke"))
        with pytest.raises(StageError, match="the thinker broke"):
            await speaking
        source = stream_pb2.StreamSource(address=service.address, stream_id="failing speech")
        with pytest.raises(StageError, match="the thinker broke"):
            await _drain(source)
    await _all_free(service)


async def test_cancelled_calls_free_their_slots_and_excess_is_refused(service: Service) -> None:
    names, rows = [f"silent {i}" for i in range(3)], ["token_ids", "rope_positions", service.rows()[-1].name]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(service.hub.open(name, rows))
        calls = [service.stub.Speak(requests(service.sourced(name))) for name in names]
        await until(lambda: service.admission.in_flight == 3)
        with pytest.raises(QueueFull):
            await service.speak(service.inline())
        for call in calls:
            call.cancel()
        await _all_free(service)
    codes, _ = await service.speak(service.inline())
    np.testing.assert_array_equal(codes, service.answer.codes)


async def _all_free(service: Service) -> None:
    await until(lambda: len(service.engine._free) == 2 and not service.admission.in_flight)


async def _drain(source: stream_pb2.StreamSource) -> None:
    async with asyncio.timeout(GUARD_S), subscribe(source, "x", []) as messages:
        async for _ in messages:
            pass
