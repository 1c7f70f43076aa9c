"""Qwen2.5-Omni's token2wav: equal to transformers' whole, and window by window, whatever shares its steps."""

import asyncio
import itertools
import json
import queue
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel

from quartet.v1 import code2wav_pb2, server_info_pb2
from services.code2wav.__main__ import info_of
from services.code2wav.config import Code2WavSettings
from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, default_dtype, load_decoder
from services.code2wav.servicer import check_codes, frames_of
from services.code2wav.stream import DecodeEnd, Event, Samples
from services.code2wav.windows import WindowSettings
from services.common.errors import InvalidInput
from services.common.rpc.digest import config_digest
from services.common.stream.tensors import to_message
from services.families.qwen2_5_omni import code2wav as family
from services.families.qwen2_5_omni.code2wav import Token2Wav
from services.families.qwen2_5_omni.tiny.token2wav import randomize, token2wav_config, voices
from services.families.qwen2_5_omni.token2wav import pieces
from services.families.qwen2_5_omni.token2wav.pieces import PiecedVocoder
from services.families.qwen3_omni import code2wav as codec_family
from tests.support.clock import until
from tests.support.stage.replay import ReplayedOps

GUARD_S = 60.0
CODEBOOK, SAMPLES = 160, 480
SIZES, PAST, FUTURE = (24, 12, 36), 24, 12
WINDOWS = WindowSettings("windowed", SIZES)


class Reference:
    """transformers' model and its voices, written as a checkpoint into `folder`."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        config = Qwen2_5OmniToken2WavConfig(**token2wav_config(CODEBOOK, 64))
        self.folder = folder
        self.model: Any = Qwen2_5OmniToken2WavModel(config).eval()
        randomize(self.model)
        self.voices = voices({"Ethan": 7, "Chelsie": 5})
        torch.save(self.voices, folder / "spk_dict.pt")
        tensors = {f"token2wav.{name}": tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        whole = {"model_type": "qwen2_5_omni", "dtype": "bfloat16", "talker_config": {}}
        whole |= {"token2wav_config": config.to_dict()}
        (folder / "config.json").write_text(json.dumps(whole))

    def decoder(self, windows: WindowSettings, dtype: str = "auto") -> Token2Wav:
        """Ours, on the same weights."""
        decoder = load_decoder(str(self.folder), dtype, "cpu", windows)
        assert isinstance(decoder, Token2Wav)
        return decoder

    @torch.inference_mode()
    def whole(self, codes: torch.Tensor, voice: str, seed: int) -> torch.Tensor:
        """What `generate` makes of codes (frames,): (samples,)."""
        torch.manual_seed(seed)
        parts = self.voices[voice]
        return self.model(codes[None], parts["cond"], parts["ref_mel"])

    @torch.inference_mode()
    def windowed(self, codes: torch.Tensor, voice: str, seed: int) -> torch.Tensor:
        """`sample` window by window, each with its slice of the noise of all; then BigVGAN once."""
        dit, parts, mels = self.model.code2wav_dit_model, self.voices[voice], []
        noise = torch.randn(1, 2 * len(codes), 80, generator=torch.Generator().manual_seed(seed))
        start, sizes = 0, list(SIZES)
        while start < len(codes):
            end = start + (sizes.pop(0) if len(sizes) > 1 else sizes[0])
            last = end + FUTURE > len(codes)
            end, stop = (len(codes), len(codes)) if last else (end, end + FUTURE)
            first = max(0, start - PAST)
            slice_of_noise = noise[:, 2 * first : 2 * stop]
            with mock.patch("torch.randn", lambda *args, kept=slice_of_noise, **kwargs: kept.clone()):
                mel = dit.sample(parts["cond"], parts["ref_mel"], codes[None, first:stop])
            mels.append(mel[..., 2 * (start - first) : 2 * (end - first)])
            start = end
        return self.model.code2wav_bigvgan_model(torch.cat(mels, dim=2)).reshape(-1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return Reference(tmp_path_factory.mktemp("token2wav"))


@pytest.fixture(scope="module")
def windowed(reference) -> Token2Wav:
    return reference.decoder(WINDOWS)


def random_codes(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(CODEBOOK, (frames,), generator=torch.Generator().manual_seed(seed))


def decode(decoder: Decoder, codes: torch.Tensor, voice: str = "", seed: int = 0, split: int = 1000) -> torch.Tensor:
    """All samples of one stream alone."""
    states = decoder.new_states(1)
    slot = states.acquire(voice, seed)
    assert slot == 0
    pieces = [decoder.step(part[None, :, None], states.batch([0]))[0] for part in codes.split(split)]
    return torch.cat([*pieces, *decoder.flush(states.batch([0]))])


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_whole_is_what_generate_makes_with_each_voice_and_seed(reference):
    decoder, codes = reference.decoder(WindowSettings("whole")), random_codes(31)
    assert decoder.spec.voices == ("Chelsie", "Ethan")
    sounds = []
    for voice, seed in (("Chelsie", 3), ("Ethan", 3), ("Ethan", 2**63 + 5)):
        expected = reference.whole(codes, voice, seed)
        sounds.append(decode(decoder, codes, voice, seed, split=7))
        assert difference(sounds[-1], expected) < 1e-4
        assert 0.03 < expected.std() < 0.3
    assert difference(decode(decoder, codes, "", 3), sounds[0]) == 0  # the default voice
    for one, other in itertools.pairwise(sounds):
        assert (one - other).std() > 0.1 * one.std()


@pytest.mark.parametrize("frames", [1, 36, 97])
def test_windowed_is_the_reference_called_window_by_window(reference, windowed, frames):
    codes = random_codes(frames, frames)
    expected = reference.windowed(codes, "Ethan", 11)
    assert len(expected) == frames * SAMPLES
    assert difference(decode(windowed, codes, "Ethan", 11, split=5), expected) < 1e-4
    if frames == 97:
        assert difference(reference.whole(codes, "Ethan", 11), expected) > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_bigvgan_by_carry_is_bigvgan_whole_for_any_split(reference, windowed, seed):
    rng = random.Random(seed)
    mels = [-4 + 2 * torch.randn(frames, 80) for frames in (1, 33, rng.randint(70, 120))]
    vocoder = windowed.vocoder
    sounds, pieces = [vocoder.new_state() for _ in mels], [[] for _ in mels]
    left = dict(enumerate(mels))
    with torch.inference_mode():
        while left:
            chosen = rng.sample(sorted(left), rng.randint(1, len(left)))
            parts = []
            for i in chosen:
                count = rng.choice([0, 1, 2, 9, 40])
                parts.append((sounds[i], left[i][:count], count >= len(left[i])))
                left[i] = left[i][count:]
            for i, samples, (_, _, last) in zip(chosen, vocoder.sound(parts), parts, strict=True):
                pieces[i].append(samples)
                if last:
                    del left[i]
        for mel, piece in zip(mels, pieces, strict=True):
            expected = reference.model.code2wav_bigvgan_model(mel.T[None]).reshape(-1)
            assert difference(torch.cat(piece), expected) < 1e-5


def test_samples_lag_as_little_as_the_field_of_bigvgan_allows(windowed):
    frames, vocoder = 80, windowed.vocoder
    mel = torch.full((frames, 80), -4.0)
    with torch.inference_mode():
        (samples,) = vocoder.sound([(vocoder.new_state(), mel, False)])
    assert frames - 34 <= len(samples) / 240 < frames - 33
    assert windowed.spec.lookahead_frames == FUTURE + 17


def collect(events: "queue.Queue[Event]") -> torch.Tensor:
    """The samples of a stream, once it has finished."""
    pieces = [torch.zeros(0)]
    while isinstance(event := events.get(timeout=GUARD_S), Samples):
        pieces.append(event.samples)
    assert isinstance(event, DecodeEnd), event
    assert event.samples == sum(map(len, pieces)) == event.frames * SAMPLES
    return torch.cat(pieces)


@pytest.mark.long
async def test_eight_streams_mixed_are_each_what_the_reference_makes_alone(reference):
    """By captured steps of an engine of five slots, frames in random pieces; two more are cancelled on the way."""
    rng = random.Random(4)
    engine = DecodeEngine(reference.decoder(WINDOWS), 5, max_frames_per_step=16, capturer=ReplayedOps())
    asked, left, results = {}, {}, []
    for i, frames in enumerate([0, 5, 36, 37, 12, 49, 24, 61, 90, 100]):
        codes, voice, events = random_codes(frames, i), rng.choice(["", "Chelsie", "Ethan"]), queue.Queue()
        stream = engine.open(events.put, voice=voice, seed=i)
        asked[stream], left[stream] = i, codes
        results.append((codes, voice, events))
    while left:
        stream = rng.choice(list(left))
        count = rng.randint(1, 30)
        engine.put(stream, left[stream][:count, None])
        left[stream] = left[stream][count:]
        if asked[stream] >= 8 and len(left[stream]) < 50:
            engine.cancel(stream)
            del left[stream]
        elif not len(left[stream]):
            engine.finish(stream)
            del left[stream]
    sounds = [collect(events) for _, _, events in results[:8]]
    await until(lambda: engine._states.free_slots == 5)
    engine.stop()
    assert not len(sounds[0])
    for seed, ((codes, voice, _), samples) in enumerate(zip(results[:8], sounds, strict=True)):
        if len(codes):
            assert difference(samples, reference.windowed(codes, voice or "Chelsie", seed)) < 1e-4


async def test_a_stream_cancelled_within_a_window_frees_its_slot_after_it(windowed):
    engine = DecodeEngine(windowed, 1, max_frames_per_step=16)
    began, evaluations = queue.Queue(), windowed.flow.evaluations
    stream = engine.open(began.put)
    engine.put(stream, random_codes(36)[:, None])
    await until(lambda: stream.in_step or windowed.flow.evaluations > evaluations)
    engine.cancel(stream)
    await until(lambda: engine._states.free_slots == 1)
    events: queue.Queue[Event] = queue.Queue()
    other = engine.open(events.put, seed=2)
    engine.put(other, random_codes(5)[:, None])
    engine.finish(other)
    assert difference(collect(events), decode(windowed, random_codes(5), "", 2)) < 1e-5
    engine.stop()


async def test_a_lone_stream_whose_codes_come_one_by_one_is_heard_once_its_window_is_there(windowed):
    """The engine waits for nothing but them: each may be the one that completes a window."""
    engine = DecodeEngine(windowed, 1, max_frames_per_step=16)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stream = engine.open(events.put)
    for code in random_codes(36):
        engine.put(stream, code[None, None])
    assert len((await asyncio.to_thread(events.get, timeout=60)).samples)
    engine.stop()


def test_windows_of_a_batch_share_evaluations_and_change_nothing(windowed):
    codes = [random_codes(48, i) for i in range(2)]
    alone = [decode(windowed, each, "", i) for i, each in enumerate(codes)]
    states = windowed.new_states(2)
    slots = [slot for i in range(2) if (slot := states.acquire("", i)) is not None]
    before = windowed.flow.evaluations
    pieces = [
        windowed.step(torch.stack(codes)[:, :36, None], states.batch(slots)),
        windowed.step(torch.stack(codes)[:, 36:, None], states.batch(slots)),
        windowed.flush(states.batch(slots)),
    ]
    assert windowed.flow.evaluations - before == 3 * 36
    for expected, *parts in zip(alone, *pieces, strict=True):
        assert difference(torch.cat(parts), expected) < 1e-5


def test_captured_steps_give_what_eager_ones_give(reference, windowed):
    captured, capturer, codes = reference.decoder(WINDOWS), ReplayedOps(), random_codes(40)
    assert captured.captured_step(capturer, captured.new_states(1), 48) == captured.step
    # The flow's of 1, 2, 3, 4, 6 and 8 blocks; BigVGAN's of 1, 2, 4 and 8 pieces, and of one at an edge.
    assert capturer.captures == 6 + 5
    expected = decode(windowed, codes, "Ethan", 3)
    for _ in range(2):
        assert difference(decode(captured, codes, "Ethan", 3), expected) < 1e-5


@torch.inference_mode()
def test_bigvgan_by_captured_pieces_is_bigvgan_whole(windowed, monkeypatch):
    """Of streams that begin and end at any time, in any slots, whose memory holds anything."""
    monkeypatch.setattr(pieces, "MOST_PIECES", 4)
    rng, vocoder, capturer, piece = random.Random(3), windowed.vocoder, ReplayedOps(), 16
    pieced = PiecedVocoder(vocoder, capturer, 3, piece)
    pieced._memory.fill_(float("nan"))
    waiting = [-4 + 2 * torch.randn(frames, 80) for frames in (1, 0, 15, 16, 17, 33, 64, 120, 150)]
    mels, slots = dict(enumerate(waiting)), list(range(3))
    states, left, sounds = {}, dict(mels), {i: [torch.zeros(0)] for i in mels}
    while left:
        for i in left:
            if i not in states and slots:
                states[i] = vocoder.new_state()
                states[i].slot = slots.pop(rng.randrange(len(slots)))
        begun = sorted(states.keys() & left.keys())
        chosen, parts = rng.sample(begun, rng.randint(1, len(begun))), []
        for i in chosen:
            count = rng.choice([0, 1, 2, 4, 9]) * piece
            last = count >= len(left[i])
            parts.append((states[i], left[i][:count], last))
            left[i] = left[i][count:]
        for i, samples, (state, _, last) in zip(chosen, pieced.sound(parts), parts, strict=True):
            sounds[i].append(samples)
            if last:
                del left[i]
                slots.append(state.slot)
    for i, mel in mels.items():
        if len(mel):
            (expected,) = vocoder.sound([(vocoder.new_state(), mel, True)])
            assert difference(torch.cat(sounds[i]), expected) < 1e-5
        else:
            assert not len(torch.cat(sounds[i]))


def test_bfloat16_is_of_the_transformer_alone_and_differs_by_its_rounding(reference, windowed):
    half = reference.decoder(WINDOWS, "bfloat16")
    assert (half.dtype, half.vocoder.conv_pre.weight.dtype) == (torch.bfloat16, torch.float32)
    made: dict[str, torch.dtype] = {}
    layer: Any = half.dit.transformer_blocks[1]
    for name, part in {"layer": layer, "attention": layer.attn, "feed forward": layer.ff}.items():
        part.register_forward_hook(lambda _, inputs, output, name=name: made.update({name: output.dtype}))
    codes = random_codes(12)
    wide, narrow = decode(windowed, codes), decode(half, codes)
    assert 0 < (wide - narrow).std() < 0.1 * wide.std()
    assert made == {"layer": torch.float32, "attention": torch.bfloat16, "feed forward": torch.bfloat16}


def test_bfloat16_is_the_default_on_a_gpu_and_float32_on_a_cpu(windowed):
    assert windowed.dtype == default_dtype(family, "cpu") == torch.float32
    assert default_dtype(family, "cuda") == torch.bfloat16
    assert default_dtype(codec_family, "cuda") is None


async def test_codes_that_have_no_embedding_and_too_many_frames_are_refused(reference, windowed):
    with pytest.raises(InvalidInput, match="code 162 of frame 1, group 0, must be 0 to 161"):
        check_codes(windowed.spec, torch.tensor([[161], [CODEBOOK + 2]]), "codes")
    spec = reference.decoder(WindowSettings("whole")).spec
    assert (windowed.spec.max_frames, spec.max_frames) == (0, 16384)
    request = code2wav_pb2.DecodeRequest(codes=to_message(torch.zeros(spec.max_frames + 1, 1, dtype=torch.int64)))
    with pytest.raises(InvalidInput, match="16385 frames are more than the 16384"):
        async for _ in frames_of(spec, mock.Mock(), request, lambda prompt: None):
            pass


def test_replicas_with_other_windows_have_another_digest(reference, windowed):
    settings = Code2WavSettings(model=str(reference.folder))
    other = reference.decoder(WindowSettings(frames=(*SIZES, 24)))
    whole = reference.decoder(WindowSettings("whole"))
    infos = [info_of(decoder.spec) for decoder in (windowed, other, whole)]
    responses = [server_info_pb2.GetServerInfoResponse(stage="code2wav", code2wav=info) for info in infos]
    assert len({config_digest(response, settings) for response in responses}) == 3
    info = infos[0]
    assert (tuple(info.window_frames), info.window_past_frames, info.window_future_frames) == (SIZES, PAST, FUTURE)
    assert (list(info.voices), info.lookahead_frames) == (["Chelsie", "Ethan"], 29)
    assert infos[2].decodes_whole


@pytest.mark.parametrize(
    ("windows", "error"),
    [
        (WindowSettings(frames=(24, 20)), "--window-frames: 24, 20 must be multiples of 12"),
        (WindowSettings("whole", frames=(24,)), "--decoding whole has no windows"),
        (WindowSettings(frames=(12 * 2000,)), "a window has 24036 frames, more than the 16384"),
    ],
)
def test_windows_that_the_model_cannot_have_are_refused(reference, windows, error):
    with pytest.raises(ValueError, match=error):
        reference.decoder(windows)


def test_a_decoder_that_does_not_look_ahead_refuses_windows(tiny_checkpoint):
    with pytest.raises(ValueError, match="--decoding and --window-"):
        load_decoder(str(tiny_checkpoint), device="cpu", windows=WindowSettings("whole"))
