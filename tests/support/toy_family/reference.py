"""What the toy's talker says by transformers' Qwen2Model and logits processors, greedily."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2Model
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from tests.support.toy_family.talker import END_OF_TEXT, SILENCE
from tests.support.toy_family.tiny import CONFIG


@torch.inference_mode()
def reference_codes(checkpoint: Path, text: str, voice: str, frames: int) -> list[int]:
    """Codes of `text` in the voice of that name, `frames` at most."""
    tensors = load_file(checkpoint / "model.safetensors")
    codes = len(tensors["sounds.weight"])
    config = Qwen2Config(
        vocab_size=codes,
        hidden_size=CONFIG["width"],
        intermediate_size=2 * CONFIG["width"],
        num_hidden_layers=CONFIG["depth"],
        num_attention_heads=CONFIG["heads"],
        num_key_value_heads=CONFIG["heads"] // 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = Qwen2Model(config).eval()
    names = {"blocks.": "layers.", "last_norm.": "norm.", "sounds.": "embed_tokens."}
    model.load_state_dict(
        {new + name.removeprefix(old): t for name, t in tensors.items() for old, new in names.items() if old in name}
    )
    letters, sounds, ids = tensors["letters.weight"], tensors["sounds.weight"], [*text.encode(), END_OF_TEXT]
    rules = [
        RepetitionPenaltyLogitsProcessor(1.3),
        SuppressTokensLogitsProcessor([c for c in range(CONFIG["sounds"], codes) if c not in CONFIG["ends"]], "cpu"),
        MinNewTokensLengthLogitsProcessor(len(CONFIG["heard"]), CONFIG["shortest"], CONFIG["ends"], "cpu"),
    ]
    rows = torch.stack((sounds[CONFIG["voices"][voice]], sounds[CONFIG["begin"]] + letters[ids[0]]))
    said = list(CONFIG["heard"])
    for frame in range(1, frames + 1):
        logits = model(inputs_embeds=rows[None]).last_hidden_state[:, -1] @ tensors["to_sound.weight"].T
        for rule in rules:
            logits = rule(torch.tensor([said]), logits)
        code = int(logits.argmax())
        if code in CONFIG["ends"]:
            break
        said.append(code)
        rows = torch.cat((rows, (sounds[code] + letters[ids[frame] if frame < len(ids) else SILENCE])[None]))
    return said[len(CONFIG["heard"]) :]
