"""python -m tests.support.systems.hub_starts MODEL OUT: each stage reads MODEL from the hub as at its start.

Twice: with an empty cache, then with what that left in it. The hub is told before each by GET /start/STAGE/CACHE. What
each stage got is pickled to OUT.
"""

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import constants

from services.code2wav.family import load_decoder
from services.common.rpc.digest import checkpoint_digest
from services.talker.model import load_talker
from services.thinker.family import load_checkpoint


def main(model: str, out: Path) -> None:
    got = {}
    for stage, read in READERS.items():
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        for cache in ("cold", "warm"):
            httpx.get(f"{constants.ENDPOINT}/start/{stage}/{cache}", timeout=240)
            got[stage] = read(model)
            assert checkpoint_digest(model)
    out.write_bytes(pickle.dumps(got))


def talker(model: str, dtype: torch.dtype | None = None) -> Any:
    _, read = load_talker(model, torch.device("cpu"), dtype)
    return read.spec, str(read.dtype), _values(read)


def code2wav(model: str, dtype: str = "auto") -> Any:
    read = load_decoder(model, dtype)
    return read.spec, str(read.dtype), _values(read)


def thinker(model: str, dtype: str | None = None) -> Any:
    """Its facts, and the ids of a prompt with all kinds of tokens."""
    read = load_checkpoint(model)
    facts = {k: v for k, v in vars(read).items() if k not in ("dtype", "processor", "folder")}
    content = [*({"type": kind} for kind in ("image", "audio", "video")), {"type": "text", "text": "Grüße <tool_call>"}]
    text = read.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    parts = (read.processor.image_processor, read.processor.video_processor)
    sizes = [(part.size, part.patch_size, part.merge_size) for part in parts]
    return facts, dtype or read.dtype, read.tokenizer(text).input_ids, read.tokenizer.eos_token_id, sizes


def _values(module: torch.nn.Module) -> dict[str, bytes]:
    state = {name: value.contiguous().view(-1).view(torch.uint8) for name, value in module.state_dict().items()}
    return {name: value.numpy().tobytes() for name, value in state.items()}


READERS: dict[str, Callable[[str], Any]] = {"thinker": thinker, "talker": talker, "code2wav": code2wav}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
