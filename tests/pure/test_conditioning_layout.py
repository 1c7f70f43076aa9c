"""What an encoder sends of its results is what a diffusion stage gets."""

import pytest
import torch

from services.common.errors import InvalidInput
from services.diffusion.conditioning import Conditioning, pack, unpack

CPU = torch.device("cpu")


def test_results_arrive_as_they_were_sent():
    mask = torch.tensor([[True, False]])
    sent = {
        "encode_prompt": [(torch.arange(6.0).reshape(1, 2, 3), None, [mask, 3, True, 0.1, "a"], [], ())],
        "generate_prior_tokens": [torch.tensor(7)],
    }
    layout, tensors = pack(Conditioning(sent))
    assert len(tensors) == 3
    assert all(tensor.dim() == 2 for tensor in tensors)
    got = unpack(layout, tensors.__getitem__, CPU).results
    floats, nothing, mixed, *empty = got["encode_prompt"][0]
    assert floats.equal(sent["encode_prompt"][0][0])
    assert nothing is None
    assert mixed[0].equal(mask)
    assert mixed[0].dtype == torch.bool
    assert [(type(value), value) for value in mixed[1:]] == [(int, 3), (bool, True), (float, 0.1), (str, "a")]
    assert empty == [[], ()]
    assert got["generate_prior_tokens"][0].equal(torch.tensor(7))


def test_what_is_no_layout_is_refused():
    layout, tensors = pack(Conditioning({"encode_prompt": [torch.zeros(2, 2)]}))
    with pytest.raises(InvalidInput, match="do not fit together"):
        unpack(layout, [].__getitem__, CPU)
    with pytest.raises(InvalidInput, match="do not fit together"):
        unpack(layout, [tensors[0][:1]].__getitem__, CPU)
    with pytest.raises(InvalidInput, match="no ConditioningLayout"):
        unpack(b'{"encode_prompt"', [].__getitem__, CPU)


def test_a_result_of_no_known_kind_is_not_sent():
    with pytest.raises(TypeError, match="cannot send a set"):
        pack(Conditioning({"encode_prompt": [{1}]}))
