"""The streaming decoder against one whole decode by transformers, for random splits, batches and reused slots."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from services.code2wav.causal import Carry, CausalDecoder, StateLayout
from services.code2wav.family import Decoder, DecoderStates, load_decoder
from services.code2wav.layers import CausalConv
from tests.support.references.code2wav import load_reference, whole_decode

# In float32 the reference's own eager and sdpa attention differ by 2e-5 from each other and from float64 on these
# checkpoints; in float64 what remains is that both norm and rotate in float32. A window wrong by one frame gives 0.3.
FLOAT32_TOLERANCE = 1e-4
FLOAT64_TOLERANCE = 1e-6
CHECKPOINTS = ["tiny_checkpoint", "small_checkpoint"]


def random_codes(decoder: Decoder, frames: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spec = decoder.spec
    return torch.randint(spec.codebook_sizes[0], (frames, spec.num_code_groups), generator=generator)


def decode(decoder: Decoder, states: DecoderStates, slot: int, codes: torch.Tensor, split: list[int]) -> torch.Tensor:
    pieces = [decoder.step(part[None], states.batch([slot]))[0] for part in codes.split(split)]
    return torch.cat(pieces)


def random_split(frames: int, most: int, rng: random.Random) -> list[int]:
    split = []
    while frames:
        split.append(rng.randint(1, min(most, frames)))
        frames -= split[-1]
    return split


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load_decoder(str(checkpoint), device="cpu")


@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"),
    [
        ("float32", "sdpa", FLOAT32_TOLERANCE),
        pytest.param("float32", "eager", FLOAT32_TOLERANCE, marks=pytest.mark.long),
        pytest.param("float64", "sdpa", FLOAT64_TOLERANCE, marks=pytest.mark.long),
    ],
)
def test_any_split_equals_one_whole_decode(checkpoint, dtype, attention, tolerance):
    decoder = load_decoder(str(checkpoint), dtype, "cpu")
    assert isinstance(decoder, CausalDecoder)
    frames = 4 * decoder.window_frames + 12
    codes = random_codes(decoder, frames, seed=1)
    expected = whole_decode(load_reference(checkpoint, attention).to(getattr(torch, dtype)), codes)
    assert len(expected) == frames * decoder.spec.samples_per_frame - decoder.spec.trimmed_samples
    assert expected.std() > 1e-3  # silence would prove nothing
    states = decoder.new_states(1)
    rng = random.Random(2)
    splits = [[frames], [1] * frames, random_split(frames, 8, rng), random_split(frames, 100, rng)]
    for split in splits:
        slot = states.acquire()
        assert slot is not None
        actual = decode(decoder, states, slot, codes, split)
        states.release(slot)
        assert actual.shape == expected.shape
        assert (actual - expected).abs().max() <= tolerance, split


def test_a_pointwise_convolution_takes_any_strides():
    layer = CausalConv(6, 5, 1, StateLayout())
    x = torch.randn(2, 7, 6).transpose(1, 2)
    torch.testing.assert_close(layer(x, Carry([])), layer.conv(x))


def test_every_step_gives_the_samples_that_are_determined(decoder):
    size, trim = decoder.spec.samples_per_frame, decoder.spec.trimmed_samples
    states = decoder.new_states(1)
    slot = states.acquire()
    for length in (1, 3, 2):
        before = max(0, states.frames[slot] * size - trim)
        (samples,) = decoder.step(random_codes(decoder, length, seed=length)[None], states.batch([slot]))
        assert before + len(samples) == states.frames[slot] * size - trim


def test_streams_at_different_positions_share_batches(checkpoint, decoder):
    """Five streams over three slots: each starts where another ended, in that one's slot."""
    reference = load_reference(checkpoint)
    rng = random.Random(3)
    waiting = {i: random_codes(decoder, rng.choice([1, 7, 40, 90, 160]), seed=i) for i in range(5)}
    expected = {i: whole_decode(reference, codes) for i, codes in waiting.items()}
    states = decoder.new_states(3)
    running: dict[int, tuple[int, torch.Tensor]] = {}
    actual: dict[int, list[torch.Tensor]] = {i: [] for i in waiting}
    while waiting or running:
        while waiting and states.free_slots:
            stream = next(iter(waiting))
            running[stream] = (states.acquire(), waiting.pop(stream))
        together = rng.sample(sorted(running), rng.randint(1, len(running)))
        count = rng.randint(1, min(6, *(len(running[i][1]) for i in together), 6))
        codes = torch.stack([running[i][1][:count] for i in together])
        samples = decoder.step(codes, states.batch([running[i][0] for i in together]))
        for i, piece in zip(together, samples, strict=True):
            actual[i].append(piece)
            slot, left = running[i][0], running[i][1][count:]
            running[i] = (slot, left)
            if not len(left):
                states.release(slot)
                del running[i]
    assert states.free_slots == 3
    for i, pieces in actual.items():
        assert (torch.cat(pieces) - expected[i]).abs().max() <= FLOAT32_TOLERANCE


@pytest.mark.parametrize(
    ("rates", "ratios", "window"), [((2, 3), (3,), 5), ((4,), (), 1), ((2, 2, 2), (2,), 3), ((5, 2), (1, 2), 200)]
)
def test_sizes_come_from_the_config(tiny_checkpoint, tmp_path, rates, ratios, window):
    """Other rates, windows, key-value heads; with small rates the left trim spans several frames."""
    whole = AutoConfig.from_pretrained(tiny_checkpoint)
    config = whole.code2wav_config
    config.upsample_rates, config.upsampling_ratios, config.sliding_window = rates, ratios, window
    config.num_key_value_heads, config.num_quantizers, config.codebook_size = 2, 3, 17
    config.attention_bias = True
    torch.manual_seed(4)
    config._attn_implementation = "sdpa"
    reference = Qwen3OmniMoeCode2Wav(config).double().eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.6 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.2)
    save_sharded(reference, tmp_path)
    whole.dtype = torch.float64
    whole.save_pretrained(tmp_path)

    decoder = load_decoder(str(tmp_path), device="cpu")
    assert decoder.dtype is torch.float64  # as config.json says
    frames = 60
    codes = random_codes(decoder, frames, seed=5)
    expected = whole_decode(reference, codes)
    assert len(expected) == frames * decoder.spec.samples_per_frame - decoder.spec.trimmed_samples
    assert expected.std() > 1e-3
    assert (expected.abs() == 1).float().mean() < 0.1  # clipped samples would hide differences
    rng = random.Random(6)
    states = decoder.new_states(2)
    states.acquire()
    slot = states.acquire()
    assert slot is not None
    actual = decode(decoder, states, slot, codes, random_split(frames, 4, rng))
    assert (actual - expected).abs().max() <= FLOAT64_TOLERANCE


def save_sharded(reference: Qwen3OmniMoeCode2Wav, folder: Path) -> None:
    """Two shards and an index, with a tensor of another stage in a shard that does not exist."""
    import json

    tensors = {f"code2wav.{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    shard_of = dict(zip(tensors, itertools.cycle(["a.safetensors", "b.safetensors"]), strict=False))
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({n: t for n, t in tensors.items() if shard_of[n] == shard}, folder / shard)
    shard_of["thinker.lm_head.weight"] = "c.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))


def test_a_checkpoint_without_code2wav_is_refused(tiny_checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_decoder(str(tmp_path))
    AutoConfig.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        load_decoder(str(tmp_path))
    save_file({"talker.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="none of the tensors"):
        load_decoder(str(tmp_path))
    save_file({"code2wav.code_embedding.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="Missing key"):
        load_decoder(str(tmp_path))
