"""Log-probabilities of chosen tokens leave other requests of the step theirs."""

import pytest
import torch


def test_others_keep_their_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.sampler import Sampler

    from services.thinker.plugin.chosen_logprobs import keep_alternatives

    for name in ("forward", "gather_specific_token_logprobs"):
        monkeypatch.setattr(Sampler, name, getattr(Sampler, name))
    keep_alternatives()
    keep_alternatives()  # vLLM may load its plugins more than once
    logprobs = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    sampled, sampler = torch.tensor([7, 8, 9]), Sampler()
    vars(sampler)["most_alternatives"] = 3
    for chosen in ([4], [4, 5, 6, 40, 41]):
        told = sampler.gather_specific_token_logprobs(logprobs, {1: chosen}, sampled)
        assert told is not None
        usual = sampler.gather_logprobs(logprobs, 3, token_ids=sampled)
        for row in (0, 2):
            assert torch.equal(told.logprob_token_ids[row, :4], usual.logprob_token_ids[row])
            assert torch.equal(told.logprobs[row, :4], usual.logprobs[row])
        assert told.logprob_token_ids[1, : len(chosen) + 1].tolist() == [8, *chosen]
        assert torch.equal(told.logprobs[1, : len(chosen) + 1], logprobs[1, [8, *chosen]])
        assert torch.equal(told.selected_token_ranks, usual.selected_token_ranks)
