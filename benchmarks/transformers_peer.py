"""transformers' `generate` under the load of first_sound.py; prints one JSON line of timings for each load on stdin.

A process of its own, so that neither side's threads or memory touch the other's.
"""

import json
import sys
import time

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging


class FirstToken(BaseStreamer):
    """Notes when the first generated token came. The first `put` is the prompt."""

    def __init__(self) -> None:
        self.puts = 0
        self.first_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        pass


def main() -> None:
    logging.set_verbosity_error()
    directory = sys.argv[1]
    processor = Qwen3OmniMoeProcessor.from_pretrained(directory)
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype="auto").eval()

    voices = model.config.talker_config.speaker_id

    def speak(prompt: str, tokens: int, frames: int, sent_s: float) -> dict:
        conversation = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        text = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=text, return_tensors="pt")
        first = FirstToken()
        sequences, wav = model.generate(
            **inputs,
            thinker_streamer=first,
            thinker_do_sample=False,
            thinker_max_new_tokens=tokens + 1,  # it never speaks its last token
            thinker_eos_token_id=model.config.im_end_token_id,
            speaker="ethan" if "ethan" in voices else min(voices),
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,  # it makes one frame less than that
        )
        done_s = time.perf_counter()
        sequences = getattr(sequences, "sequences", sequences)
        new = sequences[0, inputs["input_ids"].shape[1] :][:tokens]
        return {
            "ttft_ms": (first.first_s - sent_s) * 1000,
            "ttfa_ms": (done_s - sent_s) * 1000,
            "total_ms": (done_s - sent_s) * 1000,
            "text": processor.tokenizer.decode(new, skip_special_tokens=True),
            "samples": wav.numel(),
        }

    with torch.inference_mode():
        speak("Warm up.", 4, 4, time.perf_counter())
        for line in sys.stdin:
            load = json.loads(line)
            results, began_s = [], time.perf_counter()
            for _ in range(load["rounds"]):
                sent_s = time.perf_counter()  # all of a round are sent at once and served in line
                results += [speak(prompt, load["tokens"], load["frames"], sent_s) for prompt in load["prompts"]]
            print(json.dumps({"wall_s": time.perf_counter() - began_s, "requests": results}), flush=True)


if __name__ == "__main__":
    main()
