"""Random checkpoints with the published config keys, weight names, chat template and processor."""

from pathlib import Path
from typing import Any

SIZES = {  # text decoder, audio encoder's width, classes of time
    "tiny": ((64, 2, 4, 2, 16, 128), 32, 500),
    "small": ((96, 3, 6, 3, 16, 160), 48, 700),
}
_SHARPNESS = 3.0
_MARK = "<timestamp>"
# Behind the sound, each word with two marks: where it begins, and where it ends.
_TEMPLATE = (
    "{%- for message in messages -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>"
    "{%- else -%}{{ part['text'] }}<timestamp><timestamp>{%- endif -%}"
    "{%- endfor -%}{%- endfor -%}"
)


def write_checkpoint(out: Path, size: str) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator. Raises KeyError: no such size."""
    import transformers

    from services.families.qwen3_omni.tiny.processor import SPECIAL_TOKENS, make_tokenizer
    from services.families.tiny_parts import audio_config, edit_json, padded_vocabulary, randomize

    (hidden, layers, heads, kv_heads, head_dim, wide), audio, classes = SIZES[size]
    tokenizer: Any = make_tokenizer(200, special_tokens=[*SPECIAL_TOKENS, _MARK])
    names = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    for name, token in names.items():
        setattr(tokenizer, name, token)
    library: Any = transformers
    config = library.Qwen3ASRConfig(
        audio_config=audio_config(audio, hidden) | {"downsample_hidden_size": 16},
        text_config={
            "model_type": "qwen3",
            "vocab_size": padded_vocabulary(len(tokenizer)),
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": wide,
            "max_position_embeddings": 65536,
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        timestamp_token_id=tokenizer.convert_tokens_to_ids(_MARK),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_labels=classes,
    )
    model = library.Qwen3ASRForTokenClassification(config)
    randomize(model)
    _spread(model, config.timestamp_token_id)
    model.save_pretrained(out)
    tokenizer.chat_template = _TEMPLATE
    extractor = library.Qwen3ASRFeatureExtractor()
    processor = library.Qwen3ASRProcessor(extractor, tokenizer, chat_template=_TEMPLATE)
    processor.save_pretrained(out)
    edit_json(out / "tokenizer_config.json", {**names, "extra_special_tokens": names})


def _spread(model: Any, mark: int) -> None:
    """Has the classes of marks depend on what is around them: random layers give all marks nearly one state, and one
    class. Attention chooses more sharply, and the states' common direction is taken out of the classes."""
    import torch

    ids = torch.randint(0, 256, (1, 400))
    ids[:, ::3] = ids[:, 1::3] = mark
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter *= _SHARPNESS
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][ids == mark]
        common = torch.nn.functional.normalize(states.mean(0), dim=0)
        model.score.weight -= torch.outer(model.score.weight @ common, common)


ARCHS = {"qwen3-aligner": write_checkpoint}
