"""What one family has and another lacks: each switch of `TalkerSpec` against the same thing said otherwise."""

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTalkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniRotaryEmbedding, apply_rotary_pos_emb

from services.talker.engine import TalkerEngine
from services.talker.family import ProjectionSpec, SamplingDefaults, TalkerSpec, TransformerSpec
from services.talker.inputs import Prompt, States, Text
from services.talker.layers import Rope, rotate
from services.talker.model import TalkerModel, empty_model
from services.talker.runner import TalkerRunner
from services.talker.sampling import resolve
from services.talker.speech import SpeechRequest
from tests.support.stage.replay import ReplayedOps

SIZES = TransformerSpec(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    vocab=80,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    activation="silu",
)
SPEC = TalkerSpec(
    talker=SIZES,
    num_code_groups=1,
    max_positions=64,
    text_vocab=40,
    speakers=("one",),
    after_text=(38, 39),
    end_codes=frozenset(),
    defaults=SamplingDefaults(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.2, max_frames=12),
)
STATE_WIDTH = 24


@torch.inference_mode()
def _random_model(spec: TalkerSpec, seed: int = 0) -> TalkerModel:
    model = empty_model(spec, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.text_table = torch.randn(spec.text_vocab, spec.talker.hidden, generator=generator, dtype=torch.float64)
    model.precompute()
    return model


async def _say(model: TalkerModel, prompt: Prompt, *texts: Text, captured: bool = False) -> list[list[int]]:
    engine = TalkerEngine(TalkerRunner(model, 2, 64, ReplayedOps() if captured else None))
    speech = engine.submit(SpeechRequest(prompt, texts[0], resolve(model.spec.defaults)))
    for text in texts[1:]:
        speech.feed(text)
    speech.finish_text()
    frames = [frames async for frames in speech.frames()]
    engine.stop()
    return torch.cat(frames).tolist()


def _prompt(text_ids: list[int], codes: list[int], states: States | None = None) -> Prompt:
    positions = torch.arange(len(text_ids))[:, None].expand(-1, 3)
    return Prompt(torch.tensor(text_ids), torch.tensor(codes), positions, states)


def test_rope_sections_in_one_piece_are_those_of_transformers() -> None:
    spec = replace(SIZES, head_dim=32, rope_sections=(4, 6, 6))
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(5, heads, 32, generator=generator) for heads in (4, 2))
    positions = torch.randint(0, 500, (5, 3), generator=generator)
    parameters = {"rope_type": "default", "rope_theta": SIZES.rope_theta, "mrope_section": [4, 6, 6]}
    reference = Qwen2_5OmniRotaryEmbedding(Qwen2_5OmniTalkerConfig(head_dim=32, rope_parameters=parameters))  # pyright: ignore[reportArgumentType]
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], *reference(query, positions.T[:, None])
    )
    rope = Rope(spec)(positions, torch.float32)
    for x, other in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, *rope), other[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("captured", [False, True])
async def test_states_that_come_with_text_are_added_to_it(captured: bool) -> None:
    """One talker reads ids and states apart, as they come one step late; of the other each text id is their sum."""
    projection = ProjectionSpec(STATE_WIDTH, bias=False)
    apart = _random_model(replace(SPEC, text_has_states=True, state_projection=projection))
    summed = _random_model(SPEC)
    ids, states = [7, 7, 9, 11, 7], torch.randn(5, STATE_WIDTH, generator=torch.Generator().manual_seed(2))
    own = list(range(20, 25))
    with torch.inference_mode():
        summed.load_state_dict(apart.state_dict(), strict=False)
        summed.precompute()
        summed.text_table = apart.text_table.clone()
        summed.text_table[own] = apart.text_table[ids] + apart.project_states(states)

    first = States("hidden_states.9", (states[:1],), torch.tensor([0]), torch.tensor([2]))
    with_states = _prompt([3, -1, ids[0]], [-1, 4, 5], first)
    said = await _say(apart, with_states, Text(ids[:2], states[:2]), Text(ids[2:], states[2:]), captured=captured)
    expected = await _say(summed, _prompt([3, -1, own[0]], [-1, 4, 5]), Text(own))
    without = await _say(apart, with_states, Text(ids))
    assert said == expected
    assert said != without


async def test_a_predictor_of_another_width_projects_what_it_reads() -> None:
    """With the identity as projection it is the predictor that has none."""
    narrow = replace(SPEC, num_code_groups=3, predictor=replace(SIZES, layers=1, vocab=60))
    plain, wide = _random_model(narrow), _random_model(narrow)
    assert plain.code_predictor is not None
    assert wide.code_predictor is not None
    assert plain.code_predictor.input_projection is None
    wide.code_predictor.input_projection = torch.nn.Linear(32, 32, dtype=torch.float64)
    with torch.inference_mode():
        wide.code_predictor.input_projection.weight.copy_(torch.eye(32))
        wide.code_predictor.input_projection.bias.zero_()
    prompt, text = _prompt([3, 4], [-1, 5]), Text([4, 6, 8])
    frames = await _say(wide, prompt, text)
    assert frames == await _say(plain, prompt, text)
    assert len(frames[0]) == 3
    other = _random_model(replace(narrow, predictor=replace(SIZES, layers=1, vocab=60, hidden=16, intermediate=20)))
    assert len(await _say(other, prompt, text)) == len(frames)
