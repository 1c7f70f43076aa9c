"""Tokenizer, chat template and media processors as the published checkpoint has them."""

import json
from pathlib import Path

from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

from cli.tiny.sizes import Sizes
from cli.tiny.tokenizer import NAMED_TOKENS

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
AUDIO_RATE_HZ = 16_000
AUDIO_S = 300
PATCH = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PIXELS = {"shortest_edge": 3_136, "longest_edge": 12_845_056}


def save_processor(out: Path, tokenizer: Qwen2Tokenizer, sizes: Sizes) -> None:
    """Writes everything that `Qwen3OmniMoeProcessor.from_pretrained(out)` reads."""
    for name, token in NAMED_TOKENS.items():
        setattr(tokenizer, name, token)
    template = CHAT_TEMPLATE.read_text()
    tokenizer.chat_template = template
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(size=PIXELS, **PATCH),
        video_processor=Qwen2VLVideoProcessor(size=PIXELS, **PATCH),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128,
            sampling_rate=AUDIO_RATE_HZ,
            hop_length=160,
            chunk_length=AUDIO_S,
            n_fft=400,
        ),
        tokenizer=tokenizer,
        chat_template=template,
    )
    processor.save_pretrained(out)
    # The names under which the processor looks its tokens up, which save_pretrained leaves out.
    file = out / "tokenizer_config.json"
    config = json.loads(file.read_text()) | NAMED_TOKENS | {"extra_special_tokens": NAMED_TOKENS}
    file.write_text(json.dumps(config, indent=2))
