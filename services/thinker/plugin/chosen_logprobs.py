"""Log-probabilities of chosen tokens beside those of other requests.

vLLM's model runner V1, that of CPUs, has one kind of log-probabilities a step: where a request chooses tokens, others
lose their alternatives.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch


def keep_alternatives() -> None:
    """Mends vLLM's sampler in this process: requests that choose no tokens keep their alternatives."""
    from vllm.v1.sample.sampler import Sampler

    forward, gather = Sampler.forward, Sampler.gather_specific_token_logprobs
    if hasattr(gather, "__wrapped__"):
        return

    @wraps(forward)
    def forward_noted(self: Any, logits: torch.Tensor, sampling_metadata: Any, *others: Any, **named: Any) -> Any:
        self.most_alternatives = sampling_metadata.max_num_logprobs or 0  # of any request of the step
        return forward(self, logits, sampling_metadata, *others, **named)

    @wraps(gather)
    def gather_both(
        self: Any, logprobs: torch.Tensor, logprob_token_ids: Mapping[int, list[int]], sampled: torch.Tensor
    ) -> Any:
        chosen = gather(self, logprobs, logprob_token_ids, sampled)  # pyright: ignore[reportArgumentType]
        others = [row for row in range(len(logprobs)) if row not in logprob_token_ids]
        if chosen is None or not others:
            return chosen
        likeliest = logprobs[others].topk(min(self.most_alternatives, logprobs.shape[1]))
        more = max(0, likeliest.values.shape[1] + 1 - chosen.logprobs.shape[1])
        ids = torch.nn.functional.pad(chosen.logprob_token_ids, (0, more))
        values = torch.nn.functional.pad(chosen.logprobs, (0, more), value=float("-inf"))
        ids[others, 1 : likeliest.indices.shape[1] + 1] = likeliest.indices.to(ids.dtype)
        values[others, 1 : likeliest.values.shape[1] + 1] = likeliest.values
        return chosen._replace(logprob_token_ids=ids, logprobs=values)

    Sampler.forward, Sampler.gather_specific_token_logprobs = forward_noted, gather_both
