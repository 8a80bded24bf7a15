"""bench.py: every way that it times is the same update."""
import pytest
import torch

import bench
import ppo


@pytest.mark.parametrize("shape", ["think", "plain"])
def test_every_way_gives_the_same_loss_and_gradient_and_packing_the_fewest_tokens(model, monkeypatch, shape):
    dialogues, weights, results = bench.recorded(shape, 2), {k: v.clone() for k, v in model.state_dict().items()}, {}
    for way in ("packed", "all logits", "rows", "padded"):
        with monkeypatch.context() as patch:
            for name in ("microbatches", "token_logprobs"):            # put back after the update replaced them
                patch.setattr(ppo, name, getattr(ppo, name))
            model.load_state_dict(weights)
            model.set_attn_implementation("sdpa")
            results[way] = bench.our_update(way, model, torch.optim.SGD(model.parameters(), lr=0.0), dialogues, [1.0, -0.5])()
    tokens, loss, norm = results["packed"]
    assert norm > 1e-3 and tokens < results["rows"][0] / 2 and results["rows"][0] <= results["padded"][0]
    for other in results.values():
        assert other[1:] == pytest.approx((loss, norm), rel=1e-4)
