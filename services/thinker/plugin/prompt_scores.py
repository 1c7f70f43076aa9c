"""Log-probabilities of chosen tokens at positions of a prompt.

vLLM's model runner V1, that of CPUs, has none; V2 has its own, which this has the results of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm import SamplingParams

_EXTRA_ARG = "quartet_prompt_scores"


@dataclass(frozen=True)
class Chosen:
    """Tokens to score.

    Attributes:
        start: the position whose next token the first row is for.
        rows: ids for each position from there on, -1 in places of none; all as long.
    """

    start: int
    rows: Sequence[Sequence[int]]

    def ask(self, params: "SamplingParams", runner_is_v2: bool) -> None:
        """Asks for them in `params`, which vLLM has verified. The prefix cache is not read: it has no scores."""
        params.skip_reading_prefix_cache = True
        if runner_is_v2:
            params.prompt_logprob_token_ids = np.asarray(self.rows, dtype=np.int32)
            params.prompt_logprob_start = self.start
        else:
            params.extra_args = {_EXTRA_ARG: [self.start, [list(row) for row in self.rows]]}


def score_prompts() -> None:
    """Adds them to vLLM's model runner V1 in this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    get, sample = GPUModelRunner._get_prompt_logprobs_dict, GPUModelRunner.sample_tokens
    if hasattr(get, "__wrapped__"):
        return

    @wraps(get)
    def get_and_score(self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> Any:
        self.quartet_scores = {}
        for request_id, tokens in num_scheduled_tokens.items():
            request = self.requests[request_id]
            arguments = request.sampling_params and request.sampling_params.extra_args
            if arguments and _EXTRA_ARG in arguments:
                scores = _scored(self, request, hidden_states, tokens, Chosen(*arguments[_EXTRA_ARG]))
                if scores is not None:
                    self.quartet_scores[request_id] = scores
        return get(self, hidden_states, num_scheduled_tokens)  # pyright: ignore[reportArgumentType]

    @wraps(sample)
    def sample_and_tell(self: Any, *arguments: Any, **named: Any) -> Any:
        kept = _without_unused_generators(self)
        output = sample(self, *arguments, **named)
        self.input_batch.generators.update(kept)
        if scores := self.__dict__.pop("quartet_scores", None):
            getattr(output, "_model_runner_output", output).prompt_token_id_logprobs_dict = scores
        return output

    GPUModelRunner._get_prompt_logprobs_dict = get_and_score
    GPUModelRunner.sample_tokens = sample_and_tell  # pyright: ignore[reportAttributeAccessIssue]


def _without_unused_generators(runner: Any) -> dict[int, Any]:
    """Takes those of requests whose prompt goes on in a later step out of a CPU's batch, for this step.

    What is drawn for them is dropped. vLLM then turns their generators back. A CPU's cannot be: that ended the engine.
    """
    generators = runner.input_batch.generators
    if runner.device.type != "cpu" or not generators:
        return {}
    unused = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    return {i: generators.pop(i) for i in map(int, unused) if i in generators}


def _scored(runner: Any, request: Any, hidden_states: torch.Tensor, tokens: int, chosen: Chosen) -> torch.Tensor | None:
    """Scores what a step of `tokens` has of the request's prompt.

    Returns:
        (rows, ids of a row) float32, once, with the prompt's last token; -inf where there is no id.
    """
    begin, size = request.num_computed_tokens, len(request.prompt_token_ids)
    if getattr(request, "quartet_is_scored", False) or begin >= size:  # it may run again, after a preemption
        return None
    ids = torch.tensor(chosen.rows)
    if begin <= chosen.start:
        request.quartet_scores = torch.full(ids.shape, -torch.inf)
    first, end = max(begin, chosen.start), min(begin + tokens, size - 1)
    if first < end:
        offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request.req_id]]) - begin
        logits = runner.model.compute_logits(hidden_states[offset + first : offset + end])
        rows = slice(first - chosen.start, end - chosen.start)
        scores = runner.sampler.compute_logprobs(logits).gather(1, ids[rows].clamp_min(0).to(logits.device))
        request.quartet_scores[rows] = scores.cpu().masked_fill(ids[rows] < 0, -torch.inf)
    if begin + tokens < size:
        return None
    request.quartet_is_scored = True
    return request.quartet_scores
