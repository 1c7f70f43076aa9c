"""Qwen3-TTS's codec and speaker encoder against the package qwen-tts on the same weights."""

import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import MimiConfig, MimiModel

from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, load_decoder
from services.code2wav.stream import DecodeEnd, Event, Samples
from services.families.qwen3_tts.tiny.weights import SIZES as TINY_SIZES
from services.families.qwen3_tts.tiny.weights import codec_config, speaker_encoder, write_codec
from services.families.qwen3_tts.voice_sample import CodecEncoder, load_sample_reader
from tests.support.references.qwen_tts import load_codec, load_speaker_encoder
from tests.support.samples.media import tone
from tests.support.stage.decode_engine import feed_in_pieces
from tests.support.systems.hub import serving

TOLERANCE = 1e-4
VECTOR_TOLERANCE = 1e-5
GUARD_S = 60.0
HIDDEN = 72
STREAMS = [(1, 0), (90, 0), (9, 1), (9, 9), (40, 20), (90, 33), (60, 16), (90, 89)]
"""(frames, how many of them are a prompt)"""
SIZES = ["tiny", "small"]
SECONDS = [1.0, 3.33, 7.0]
"""Of voice samples: whole frames, and a last one that is not full."""
_QUANTIZER = (
    *("input_proj.weight", "output_proj.weight"),
    *(f"layers.N.codebook.{name}" for name in ("cluster_usage", "embed_sum", "initialized")),
)
ENCODER_TENSORS = {
    "downsample.conv.weight",
    *(f"encoder.layers.N.{conv}.{name}" for conv in ("conv", "block.N.conv") for name in ("bias", "weight")),
    *(
        f"encoder_transformer.layers.N.{name}"
        for name in (
            *(f"{norm}_layernorm.{part}" for norm in ("input", "post_attention") for part in ("bias", "weight")),
            *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
            *("mlp.fcN.weight", "mlp_layer_scale.scale", "self_attn_layer_scale.scale"),
        )
    ),
    *(f"quantizer.{half}_residual_vector_quantizer.{name}" for half in ("semantic", "acoustic") for name in _QUANTIZER),
}
"""As published, less `encoder.`, with N for numbers."""


class Case:
    """A checkpoint without a talker, and the reference of its codec."""

    def __init__(self, folder: Path, size: str) -> None:
        torch.manual_seed(1)
        write_codec(folder, size)
        self.config, tensors = speaker_encoder(size, HIDDEN)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(
            json.dumps({"model_type": "qwen3_tts", "speaker_encoder_config": self.config})
        )
        self.folder, self.reference = folder, load_codec(folder / "speech_tokenizer")
        self.decoder = load_decoder(str(folder), device="cpu")

    def codes(self, frames: int, seed: int) -> torch.Tensor:
        spec, generator = self.decoder.spec, torch.Generator().manual_seed(seed)
        return torch.randint(spec.codebook_sizes[0], (frames, spec.num_code_groups), generator=generator)

    @torch.inference_mode()
    def whole(self, codes: torch.Tensor) -> torch.Tensor:
        """The reference's samples of (frames, groups) in one pass."""
        return self.reference.decoder(codes.T[None])[0, 0]


@pytest.fixture(scope="module", params=SIZES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def random_split(frames: int, most: int, rng: random.Random) -> list[int]:
    split = []
    while left := frames - sum(split):
        split.append(rng.randint(1, min(most, left)))
    return split


def decode(decoder: Decoder, codes: torch.Tensor, split: list[int]) -> torch.Tensor:
    states = decoder.new_states(1)
    batch = [states.acquire() or 0]
    return torch.cat([decoder.step(part[None], states.batch(batch))[0] for part in codes.split(split)])


def test_any_split_equals_one_whole_decode(case: Case) -> None:
    spec, frames = case.decoder.spec, 160
    assert (spec.sample_rate_hz, spec.samples_per_frame, spec.trimmed_samples) == (24_000, 1920, 0)
    codes = case.codes(frames, seed=1)
    expected = case.whole(codes)
    assert len(expected) == frames * spec.samples_per_frame
    assert expected.std() > 0.05  # silence would prove nothing
    assert (expected.abs() == 1).float().mean() < 0.01  # nor would clipped samples
    rng = random.Random(2)
    for split in ([frames], [1] * frames, random_split(frames, 8, rng), random_split(frames, 100, rng)):
        assert (decode(case.decoder, codes, split) - expected).abs().max() <= TOLERANCE, split


def test_streams_of_mixed_lengths_with_prompts_share_batches(case: Case) -> None:
    """Each hears what the reference makes of all its frames, less the samples of its prompt."""
    rng = random.Random(3)
    codes, prompts = [case.codes(frames, seed) for seed, (frames, _) in enumerate(STREAMS)], [n for _, n in STREAMS]
    engine = DecodeEngine(case.decoder, len(STREAMS), max_frames_per_step=16)
    computed = case.decoder.frames_computed
    queues: list[queue.Queue[Event]] = [queue.Queue() for _ in codes]
    try:
        streams = [engine.open(events.put) for events in queues]
        for stream, prompt in zip(streams, prompts, strict=True):
            engine.begin(stream, prompt)
        feed_in_pieces(engine, streams, codes, rng, 20)
        for part, prompt, events in zip(codes, prompts, queues, strict=True):
            _check(case, part, prompt, events)
    finally:
        engine.stop()
    assert case.decoder.frames_computed - computed == sum(len(part) for part in codes)


def _check(case: Case, codes: torch.Tensor, prompt: int, events: "queue.Queue[Event]") -> None:
    size, frames = case.decoder.spec.samples_per_frame, len(codes) - prompt
    expected = case.whole(codes)[prompt * size :]
    heard = []
    while isinstance(event := events.get(timeout=GUARD_S), Samples):
        assert event.first_sample == sum(len(piece) for piece in heard)
        heard.append(event.samples)
        assert sum(len(piece) for piece in heard) == event.frames * size
    assert isinstance(event, DecodeEnd)
    assert (event.frames, event.samples) == (frames, frames * size)
    sound = [piece for piece in heard if len(piece)]
    if sound:
        assert len(sound[0]) == size  # the first chunk is one frame, prompt or not
        assert (torch.cat(sound) - expected).abs().max() <= TOLERANCE


def test_a_prompt_is_decoded_in_full_steps(case: Case) -> None:
    engine = DecodeEngine(case.decoder, 1, max_frames_per_step=16)
    events: queue.Queue[Event] = queue.Queue()
    try:
        stream = engine.open(events.put)
        engine.begin(stream, 40)
        engine.put(stream, case.codes(41, seed=4))
        taken = []
        while not (event := _samples(events)).frames:  # while the stream is open: nothing waits for its end
            taken.append(event.taken)
        assert [*taken, event.taken] == [16, 16, 8, 1]
        assert len(event.samples) == case.decoder.spec.samples_per_frame
    finally:
        engine.stop()


def _samples(events: "queue.Queue[Event]") -> Samples:
    event = events.get(timeout=GUARD_S)
    assert isinstance(event, Samples)
    return event


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_voice_sample_is_heard_as_the_reference_hears_it(case: Case, seconds: float) -> None:
    sound = _speech(seconds)
    config = json.loads((case.folder / "config.json").read_text())
    reader = load_sample_reader(config, case.folder, torch.device("cpu"), torch.float32)
    assert reader.sample_rate_hz == 24_000
    voice = reader.read(sound)
    vector = load_speaker_encoder(case.folder)(sound.numpy())
    assert voice.vector.shape == (HIDDEN,)
    assert vector.std() > 0.1
    assert (voice.vector - vector).abs().max() <= VECTOR_TOLERANCE
    (frames,) = case.reference.encode(sound[None], torch.ones(1, len(sound), dtype=torch.int64)).audio_codes
    assert frames.shape == (-(-len(sound) // 1920), 16)
    assert len(frames.unique(dim=0)) > len(frames) // 2  # one frame again and again would prove nothing
    assert torch.equal(voice.frames, frames)


@pytest.mark.parametrize("size", SIZES)
def test_the_codecs_encoder_is_that_of_transformers_under_its_published_names(size: str) -> None:
    """transformers moved and renamed it in 5.21: what is loaded by name is to be found in any version."""
    torch.manual_seed(6)
    mimi: Any = MimiModel(MimiConfig(**codec_config(TINY_SIZES[size])["encoder_config"])).eval()
    encoder = CodecEncoder(mimi)
    assert {re.sub(r"\d+", "N", name) for name in encoder.state_dict()} == ENCODER_TENSORS
    with torch.inference_mode():
        for name, tensor in encoder.state_dict().items():
            if name.endswith("embed_sum"):
                tensor.normal_()  # transformers' are all zero, which every vector is nearest to
        expected = mimi.encode(sound := _speech(3.33)[None, None], num_quantizers=16).audio_codes
        assert len(expected.unique()) > 16
        assert torch.equal(encoder(sound, 16), expected)


def test_a_checkpoint_that_cannot_hear_samples_is_refused_by_what_it_lacks(case: Case, tmp_path: Path) -> None:
    folder = shutil.copytree(case.folder, tmp_path / "deaf")
    (folder / "model.safetensors").unlink()
    save_file({"talker.codec_head.weight": torch.zeros(1)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"speaker_encoder\.\* .*none of the tensors"):
        load_sample_reader(config, folder, torch.device("cpu"), torch.float32)


def _speech(seconds: float) -> torch.Tensor:
    """(samples,) float32: silence, then a voice's tone with overtones, and breath."""
    generator = torch.Generator().manual_seed(5)
    tones = [torch.from_numpy(tone(seconds, 24_000, 140.0 * n)).float() / 32768 / n for n in (1, 2, 3, 5)]
    sound = torch.stack(tones).sum(0)
    sound = (sound + 0.1 * torch.randn(len(sound), generator=generator) * sound.abs().sqrt()).clamp(-1, 1)
    sound[:4800] = 0
    return sound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_tts_tokenizer_25hz"}, "model_type 'qwen3_tts_tokenizer_25hz' is not"),
        ({"output_sample_rate": None}, "output_sample_rate is missing"),
        ({"decoder_config": {}}, "decoder_config.codebook_dim is missing"),
        (
            {"decoder_config": {"codebook_dim": 8, "latent_dim": 8, "upsample_rates": [2]}},
            "decoder_config.codebook_size",
        ),
        (None, "speech_tokenizer has no config.json"),
    ],
)
def test_a_codec_that_does_not_run_here_is_refused(tmp_path: Path, change: dict[str, Any] | None, message: str) -> None:
    (tmp_path / "speech_tokenizer").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_tts"}')
    if change is not None:
        config = {"model_type": "qwen3_tts_tokenizer_12hz", "output_sample_rate": 24_000, **change}
        (tmp_path / "speech_tokenizer/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_decoder(str(tmp_path))


READ_FROM_HUB = """
import json, sys
import torch
from services.code2wav.family import load_decoder
from services.common.engine.weights import Checkpoint
from services.families.qwen3_tts.voice_sample import load_sample_reader
decoder = load_decoder("some/tts", device="cpu")
folder = Checkpoint("some/tts").folder
config = json.loads((folder / "config.json").read_text())
reader = load_sample_reader(config, folder, torch.device("cpu"), torch.float32)
print(f"{decoder.spec.sample_rate_hz} Hz, {len(reader.read(torch.zeros(24_000)).frames)} frames")
"""


@pytest.mark.long  # a process that imports torch
def test_codec_and_speaker_encoder_are_fetched_from_the_hub(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    Case(checkpoint, "tiny")
    with serving("some/tts", checkpoint) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "hub")}
        command = [sys.executable, "-c", READ_FROM_HUB]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert "24000 Hz, 13 frames" in done.stdout
    fetched = {path for method, path in hub.log if method == "GET" and not path.startswith("/")}
    folder = "speech_tokenizer"
    assert fetched == {"config.json", "model.safetensors", f"{folder}/config.json", f"{folder}/model.safetensors"}
