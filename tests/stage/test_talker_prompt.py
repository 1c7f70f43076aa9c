"""The talker's rope positions, moved from the thinker's, are those that transformers computes anew."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import InvalidInput
from services.families.qwen3_omni.talker_prompt import ThinkerPrompt, answer_head, rope_positions, user_positions
from tests.support.references.qwen3_omni import Reference
from tests.support.samples.conversations import CONVERSATIONS, image, read_prompt_spec, sound, turn, video

WITH_SOUND = {
    "video with sound": [turn("user", video(), sound(2.0), "What happens?")],
    "image, then video with sound": [turn("user", image(70), video(), sound(2.0), "And here?")],
    "video with sound, then image": [
        turn("system", "You are kind."),
        turn("user", video(), sound(2.0), "Look."),
        turn("assistant", "I do."),
        turn("user", image(70), "And here?"),
    ],
}


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Reference:
    return Reference(tiny_checkpoint)


@pytest.mark.parametrize("name", [*CONVERSATIONS, *WITH_SOUND])
def test_rope_positions_equal_the_references(reference: Reference, tiny_checkpoint: Path, name: str) -> None:
    spec, with_sound = read_prompt_spec(tiny_checkpoint), name in WITH_SOUND
    inputs = reference.inputs((CONVERSATIONS | WITH_SOUND)[name], with_sound)
    ids = inputs["input_ids"][0]
    prompt = ThinkerPrompt(ids, (), reference.rope_positions(inputs, with_sound))
    positions = rope_positions(prompt, spec)

    kept = ids[user_positions(ids, spec)]
    talker_ids = torch.cat((kept, torch.full((len(positions) - len(kept),), spec.tts_pad_id)))[None]
    lengths = inputs.get("feature_attention_mask")
    expected, _ = (
        reference.model.talker.get_rope_index(  # as its generate calls it: use_audio_in_video is not passed on
            talker_ids,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(talker_ids),
            False,
            None if lengths is None else lengths.sum(dim=1),
            inputs.get("video_second_per_grid"),
        )
    )
    np.testing.assert_array_equal(positions.numpy(), expected[:, 0].T.long().numpy())


def test_a_prompt_with_an_image_needs_rope_positions(reference: Reference, tiny_checkpoint: Path) -> None:
    ids = reference.inputs(CONVERSATIONS["image"], False)["input_ids"][0]
    with pytest.raises(InvalidInput, match="rope_positions"):
        rope_positions(ThinkerPrompt(ids, (), None), read_prompt_spec(tiny_checkpoint))


def test_a_prompt_without_an_assistant_turn_is_refused(tiny_checkpoint: Path) -> None:
    spec = read_prompt_spec(tiny_checkpoint)
    with pytest.raises(InvalidInput, match="assistant"):
        answer_head(torch.tensor([spec.im_start_id, spec.user_id, 5]), spec)
