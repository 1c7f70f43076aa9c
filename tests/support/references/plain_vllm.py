"""What vLLM answers by itself: no connector, no plugin and no process of Quartet's. `answers` is for tests; the rest
runs in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GUARD_S = 300
_TOLD = "answers: "
# Without the plugins vLLM runs its own models.
ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass
class PlainAnswer:
    """Token ids, and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


def answers(
    checkpoint: Path, prompts: Sequence[list[int]], max_tokens: int, dtype: str = "float32"
) -> list[PlainAnswer]:
    """Greedy answers to prompts of token ids, one after another, past any end of sequence."""
    told_of = {"checkpoint": str(checkpoint), "prompts": list(prompts), "max_tokens": max_tokens, "dtype": dtype}
    asked = json.dumps(told_of)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.references.plain_vllm"],
        input=asked.encode(),
        capture_output=True,
        timeout=GUARD_S,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr.decode()
    # vLLM's processes write there, too
    told = next(line for line in done.stdout.decode().splitlines() if line.startswith(_TOLD))
    return [PlainAnswer(**answer) for answer in json.loads(told.removeprefix(_TOLD))]


def _answer() -> None:
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    llm = LLM(
        asked["checkpoint"],
        dtype=asked["dtype"],
        max_model_len=512,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 0, "audio": 0, "video": 0},
        kv_cache_memory_bytes=64 << 20,
    )
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, logprobs=1)
    given = [llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False) for ids in asked["prompts"]]
    outputs = [output.outputs[0] for (output,) in given]
    told = [
        {
            "token_ids": list(output.token_ids),
            "logprobs": [
                (step or {})[token].logprob for token, step in zip(output.token_ids, output.logprobs or (), strict=True)
            ],
        }
        for output in outputs
    ]
    print(f"\n{_TOLD}{json.dumps(told)}", flush=True)


if __name__ == "__main__":
    _answer()
