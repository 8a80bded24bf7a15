"""ppo.py: every equation by hand or by a second way, packed rows against turns scored alone, and that it truly learns.

The helpers are the definition of what a learner needs: `made` is a dialogue of made-up tokens, `told` one of real tokens,
`settings` the fields that update() reads, `LikesLetters` a user.
"""
import argparse
import copy
import itertools
import math
import random

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ppo
import sft
from rollout import ChatTokens, Dialogue, HFEngine, Reaction, Turn, microbatches, rollout, seed_of
from simulator import Scenario, ScriptedSimulator

SCENARIO = Scenario("exam/praise", "exam", "", "", "", (), "praise")
fixed = hypothesis_settings(max_examples=40)
unit = st.floats(0, 1)
emotions_of_turns = st.lists(st.integers(0, 100), min_size=1, max_size=6)


# ---- fakes ---------------------------------------------------------------------------------------------------------------

def settings(**changed):
    """What update() reads of the flags; plain values in which nothing is scaled or clipped away."""
    return argparse.Namespace(**{**dict(
        tokens_per_batch=4096, gae="turn", gamma=1.0, gae_lambda=1.0, epochs=1, minibatches=1, value_clip=0.5, max_grad_norm=1e9,
        temperature=1.0, clip_eps=0.2, ent_coef=0.0, kl_coef=0.0, std=True, tis_cap=0.0, max_mismatch=1e9, clip_high=0.0, reward="final", loss_norm="token",
        imitation_coef=0.0), **changed})


def made(lengths, emotions=None, ok=None, user=3, group=0):
    """A plain dialogue of made-up tokens: turn k samples lengths[k] tokens after `user` tokens of the user."""
    dialogue = Dialogue(SCENARIO, False, 0, group=group, end_reason="max_turns")
    for k, length in enumerate(lengths):
        ids = [10 * (k + 1) + i for i in range(length)]
        dialogue.trunk += [1] * user
        dialogue.turns.append(Turn(len(dialogue.trunk), ids, [-1.0] * length, "stop", None, "yes", ok[k] if ok else True,
                                   Reaction(0, emotions[k] if emotions else 60, "", "", None)))
        dialogue.trunk += ids
    dialogue.trunk += [1] * user
    return dialogue


def told(chat, scenario, think, emotions, seed=0, group=0, ok=None):
    """A dialogue of real tokens by sft's tutor; the user felt `emotions`."""
    dialogue, _ = sft.demonstrate(chat, scenario, think, random.Random(seed), len(emotions), 0.5, 0.8)
    for k, (turn, emotion) in enumerate(zip(dialogue.turns, emotions)):
        turn.reaction, turn.format_ok = Reaction(0, emotion, "", "", None), ok[k] if ok else True
        turn.logprobs = [-7.4 + 0.3 * math.sin(3.0 * i + k) for i in range(len(turn.ids))]     # around log 1/1600
    dialogue.group, dialogue.end_reason = group, "max_turns"
    return dialogue


def ragged(chat, scenarios, think):
    """Five dialogues of 1 to 4 turns, so that rows, turns and groups all differ in size."""
    emotions = [[30, 50], [70], [40, 20, 60, 90], [80, 10, 30], [55]]
    return [told(chat, scenarios[7 * i], think, e, seed=i, group=i // 3) for i, e in enumerate(emotions)]


class Fixed:
    """A critic whose values are given."""
    values, model = "token", argparse.Namespace(device="cpu")

    def __init__(self, numbers):
        self.numbers = torch.tensor(numbers)

    def __call__(self, micro):
        return self.numbers[micro.index]


class Keep:
    """An optimizer that changes nothing and keeps each step's gradients."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])

    def zero_grad(self):
        self.model.zero_grad()


def gradients_of_update(model, batch, advantages, cfg, ref_policy=None):
    keep = Keep(model)
    metrics = ppo.update_policy(model, keep, batch, advantages, cfg, random.Random(0), ref_policy)
    return keep.gradients, metrics


def assert_same_gradients(ours, theirs, rtol=1e-5):
    assert max(g.norm() for g in theirs) > 1e-4                                   # there is something to compare
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= rtol * b.norm() + 1e-7


def finite(metrics):
    return {name for name, value in metrics.items() if not math.isfinite(value)} == set()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def whole(dialogues, starts=None, branches=True):
    """All dialogues as one micro-batch."""
    micro, = microbatches(dialogues, starts or ppo.make_batch(dialogues).starts, 10**6, branches)
    return micro


def alone(model, dialogues, temperature=1.0):
    """Log-prob and entropy of each agent token, turn by turn: prompt + reply in one causal row, no packing, no padding."""
    logprobs, entropies = [], []
    for turn, prompt in [(turn, d.trunk[:turn.prompt_len]) for d in dialogues for turn in d.turns]:
        logits = model(input_ids=torch.tensor([prompt + turn.ids])).logits[0] / temperature
        for i, token in enumerate(turn.ids):
            p = torch.softmax(logits[len(prompt) + i - 1], dim=-1)
            logprobs.append(p[token].log())
            entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


# ---- GAE -----------------------------------------------------------------------------------------------------------------

def test_gae_of_three_tokens_worked_by_hand():
    # delta = (.9*.6 - .5, .9*.7 - .6, 1 - .7) = (.04, .03, .3); A_2 = .3, A_1 = .03 + .45*.3, A_0 = .04 + .45*.165
    advantages, returns = ppo.compute_gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.6, 0.7]), [3], gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(advantages, torch.tensor([0.11425, 0.165, 0.3]))
    torch.testing.assert_close(returns, torch.tensor([0.61425, 0.765, 1.0]))


@fixed
@given(st.lists(st.lists(st.tuples(unit, unit), min_size=1, max_size=6), min_size=1, max_size=5), unit, unit)
def test_gae_equals_the_lambda_return_and_the_closed_form_for_any_gamma_lambda_and_lengths(segments, gamma, lam):
    closed, by_returns = [], []
    for segment in segments:
        r, v = [r for r, _ in segment], [v for _, v in segment] + [0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        closed += [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]
        g, backwards = 0.0, []                       # G_t = r_t + gamma ((1 - lambda) V_{t+1} + lambda G_{t+1}), A = G - V
        for t in reversed(range(len(r))):
            g = r[t] + gamma * ((1 - lam) * v[t + 1] + lam * g)
            backwards.append(g - v[t])
        by_returns += backwards[::-1]
    r, v = torch.tensor(sum(segments, []), dtype=torch.float64).T
    advantages, returns = ppo.compute_gae(r, v, [len(s) for s in segments], gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor(closed, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(advantages, torch.tensor(by_returns, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(returns, advantages + v)


@fixed
@given(st.lists(unit, min_size=1, max_size=12), unit)
def test_without_discount_one_final_reward_gives_r_minus_v_at_every_token(values, reward):
    rewards = torch.zeros(len(values))
    rewards[-1] = reward
    advantages, returns = ppo.compute_gae(rewards, torch.tensor(values), [len(values)])
    torch.testing.assert_close(advantages, reward - torch.tensor(values))
    torch.testing.assert_close(returns, torch.full((len(values),), reward))


def test_gae_does_not_cross_from_one_dialogue_to_the_next():
    r, v = torch.tensor([0.0, 1.0, 0.0, 0.2]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    both, _ = ppo.compute_gae(r, v, [2, 2], 0.9, 0.8)
    apart = [ppo.compute_gae(r[i:i + 2], v[i:i + 2], [2], 0.9, 0.8)[0] for i in (0, 2)]
    assert both.equal(torch.cat(apart))


@pytest.mark.parametrize("user, closing", [(1, 1), (3, 3), (9, 9), (3, 0), (3, 2)])
def test_user_tokens_neither_cost_nor_earn(user, closing):
    # one stream of 2 + 2 agent tokens, gamma = 1/2: what is left of R = .8 is .1, .2, .4, .8, whatever the user said
    dialogue = made([2, 2], [30, 80], user=user)
    dialogue.trunk = dialogue.trunk[:len(dialogue.trunk) - user] + [1] * closing
    advantages, values, returns, _ = ppo.estimate(Fixed([0.1, 0.2, 0.3, 0.4]), ppo.make_batch([dialogue]), settings(gae="dialogue", gamma=0.5))
    torch.testing.assert_close(values, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    torch.testing.assert_close(returns, torch.tensor([0.1, 0.2, 0.4, 0.8]))
    raw = [0.0, 0.0, 0.1, 0.4]                                    # mean .125, n-1 variance .035833
    torch.testing.assert_close(advantages, torch.tensor([(a - 0.125) / math.sqrt(0.1075 / 3) for a in raw]), rtol=1e-5, atol=1e-5)


@fixed
@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 100)), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_turns_and_whole_dialogues_give_the_same_advantages_when_nothing_is_discounted_or_malformed(dialogues, rng):
    batch = ppo.make_batch([made([n for n, _ in d], [e for _, e in d]) for d in dialogues])
    critic = Fixed([rng.random() for _ in batch.old_logprobs])
    by_turn, by_dialogue = [ppo.estimate(critic, batch, settings(gae=gae))[:3] for gae in ("turn", "dialogue")]
    for ours, theirs in zip(by_turn, by_dialogue):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ok, earned", [([False, False, True], 0.8), ([True, True, False], 0.0)])
def test_with_gae_dialogue_the_format_of_the_last_turn_alone_decides_what_all_turns_earn(ok, earned):
    batch = ppo.make_batch([made([2, 2, 2], [50, 50, 80], ok=ok)])
    assert ppo.estimate(Fixed([0.0] * 6), batch, settings(gae="dialogue"))[2].tolist() == pytest.approx([earned] * 6)


def test_a_malformed_turn_splits_turn_credit_from_dialogue_credit():
    batch = ppo.make_batch([made([1, 2, 1], [50, 50, 80], ok=[True, False, True])])
    returns = {gae: ppo.estimate(Fixed([0.0] * 4), batch, settings(gae=gae))[2].tolist() for gae in ("turn", "dialogue")}
    assert returns == {"turn": pytest.approx([0.8, 0, 0, 0.8]), "dialogue": pytest.approx([0.8] * 4)}


def test_with_two_turns_and_lambda_half_the_next_value_is_that_of_the_next_turns_first_token():
    # turns of 1 token; V = .4, .6; R = 1: A_1 = .4; A_0 = .6 - .4 + .5 * .4 = .4
    batch = ppo.make_batch([made([1, 1], [50, 100])])
    *_, returns, _ = ppo.estimate(Fixed([0.4, 0.6]), batch, settings(gae="dialogue", gae_lambda=0.5))
    torch.testing.assert_close(returns, torch.tensor([0.8, 1.0]))
    *_, returns, _ = ppo.estimate(Fixed([0.4, 0.6]), batch, settings(gae="turn", gae_lambda=0.5))
    torch.testing.assert_close(returns, torch.tensor([1.0, 1.0]))            # two segments: each ends with its own r_k = R


# ---- whitening, clipping, value clipping, KL -----------------------------------------------------------------------------

def test_whiten_takes_no_value_one_value_and_two():
    assert ppo.whiten(torch.tensor([])).tolist() == []
    assert ppo.whiten(torch.tensor([0.7])).tolist() == [pytest.approx(0.7)]
    torch.testing.assert_close(ppo.whiten(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]) / math.sqrt(2))
    assert ppo.whiten(torch.tensor([0.5, 0.5])).tolist() == [0.0, 0.0]


@fixed
@given(st.lists(unit, min_size=2, max_size=20))
def test_whitened_values_have_mean_0_and_variance_1_unless_all_are_equal(values):
    x = torch.tensor(values, dtype=torch.float64)
    white = ppo.whiten(x)
    assert abs(white.mean()) < 1e-6 and white.isfinite().all()
    assert white.var().item() == pytest.approx(1, abs=0.01) if x.var() > 1e-6 else white.var() <= 1


CLIP_CASES = [  # advantage, ratio, loss, clipped?, gradient of the loss w.r.t. the log-prob; eps = .2, loss = -min(..)
    (1.0, 1.1, -1.1, False, -1.1), (1.0, 1.5, -1.2, True, 0.0), (1.0, 0.5, -0.5, False, -0.5), (1.0, 0.9, -0.9, False, -0.9),
    (-1.0, 1.1, 1.1, False, 1.1), (-1.0, 1.5, 1.5, False, 1.5), (-1.0, 0.5, 0.8, True, 0.0), (-1.0, 0.9, 0.9, False, 0.9)]


@pytest.mark.parametrize("advantage, ratio, loss, clipped, gradient", CLIP_CASES)
def test_clip_with_good_and_bad_advantages_and_ratios_inside_and_outside(advantage, ratio, loss, clipped, gradient):
    logprobs = torch.tensor([-3.0 + math.log(ratio)], requires_grad=True)
    ours, active = ppo.policy_loss(logprobs, torch.tensor([-3.0]), torch.tensor([advantage]), 0.2)
    ours.sum().backward()
    assert (ours.item(), active.item(), logprobs.grad.item()) == (pytest.approx(loss), clipped, pytest.approx(gradient))


@pytest.mark.parametrize("advantage, losses", [(1.0, [-1.2, -math.exp(-1)]), (-1.0, [math.e, 0.8])])
def test_clipping_acts_on_each_token_and_not_on_the_sequence(advantage, losses):
    # log-ratios +1 and -1 sum to 0: a sequence ratio of 1 would never be clipped
    ours, _ = ppo.policy_loss(torch.tensor([-2.0, -4.0]), torch.tensor([-3.0, -3.0]), torch.full((2,), advantage), 0.2)
    assert ours.tolist() == pytest.approx(losses)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logratio", [200.0, -200.0])
def test_a_logratio_of_200_gives_a_finite_loss_and_gradient(logratio, advantage):
    logprobs = torch.tensor([logratio], requires_grad=True)
    loss, _ = ppo.policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2)
    (loss + ppo.kl_k3(logprobs, torch.zeros(1))).sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("value, target, loss, gradient", [
    (0.4, 1.0, 0.18, -0.6),     # inside the clip: the plain squared error
    (0.9, 1.0, 0.045, 0.0),     # clipped to .7, whose error .3 is the larger: no pull any further
    (0.9, 0.6, 0.045, 0.3),     # clipped to .7, but the true error .3 is the larger: pulled back
    (-0.5, 0.3, 0.32, -0.8),    # clipped to -.3 from below
])
def test_value_clip_worked_by_hand(value, target, loss, gradient):
    values = torch.tensor([value], requires_grad=True)                            # the old value was .2, it may move by .5
    ours = ppo.value_loss(values, torch.tensor([0.2]), torch.tensor([target]), 0.5)
    ours.sum().backward()
    assert (ours.item(), values.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))


@fixed
@given(st.floats(-12, 0), st.floats(-12, 0))
def test_k3_is_never_negative_and_0_only_where_both_agree(logprob, ref_logprob):
    for dtype in (torch.float64, torch.float32):
        a, b = torch.tensor([logprob], dtype=dtype), torch.tensor([ref_logprob], dtype=dtype)
        kl = ppo.kl_k3(a, b).item()
        assert kl >= 0
        assert (kl > 0) if abs(logprob - ref_logprob) > 1e-3 else kl < 1e-6
    assert ppo.kl_k3(a, a).item() == 0


def test_k3_is_never_negative_for_tiny_differences_in_float32():
    logratio = torch.linspace(-1e-2, 1e-2, 20001)
    assert ppo.kl_k3(torch.zeros_like(logratio), logratio).min() >= 0


def test_k3_averages_to_the_kl_of_the_policy_from_the_reference_and_not_the_other_way_round():
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert (p * ppo.kl_k3(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


# ---- from dialogues to flat tensors ----------------------------------------------------------------------------------------

def test_a_batch_lists_tokens_dialogue_after_dialogue_and_turn_after_turn():
    batch = ppo.make_batch([made([2, 1], [50, 80]), made([3], [40])])
    assert (batch.turn_lengths, batch.turns, batch.tokens, batch.starts) == ([2, 1, 3], [2, 1], [3, 3], [0, 3])
    assert batch.turn_rewards.tolist() == pytest.approx([0.8, 0.8, 0.4])
    assert batch.per_token(batch.turn_rewards).tolist() == pytest.approx([0.8, 0.8, 0.8, 0.4, 0.4, 0.4])
    assert batch.at_last_token(batch.turn_rewards).tolist() == pytest.approx([0, 0.8, 0.8, 0, 0, 0.4])
    assert batch.old_logprobs.tolist() == [-1.0] * 6


@fixed
@given(emotions_of_turns)
def test_every_turn_earns_the_final_emotion_whatever_was_felt_on_the_way(emotions):
    assert ppo.turn_rewards(made([1] * len(emotions), emotions)) == [emotions[-1] / 100] * len(emotions)


def test_a_malformed_turn_earns_0_and_without_the_format_reward_it_earns_like_the_others():
    dialogue = made([2, 2, 2], [50, 60, 70], ok=[True, False, True])
    assert ppo.turn_rewards(dialogue) == [0.7, 0.0, 0.7]
    assert ppo.turn_rewards(dialogue, format_reward=False) == [0.7, 0.7, 0.7]
    assert ppo.make_batch([dialogue]).turn_rewards.tolist() == pytest.approx([0.7, 0.0, 0.7])
    assert ppo.make_batch([dialogue], False).turn_rewards.tolist() == pytest.approx([0.7] * 3)


def test_a_batch_leaves_out_dialogues_whose_simulator_failed():
    good, failed, unheard = made([2, 2]), made([3, 3]), made([4])
    failed.end_reason, unheard.turns[0].reaction = "simulator_failed", None
    batch = ppo.make_batch([failed, good, unheard])
    assert (batch.dialogues, batch.turn_lengths, batch.tokens, len(batch.old_logprobs)) == ([good], [2, 2], [4], 4)


def test_a_step_whose_dialogues_all_failed_changes_nothing_and_says_so_or_goes_on(model):
    failed = made([3, 3])
    failed.end_reason, before = "simulator_failed", weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    critic = ppo.Critic(model)
    try:
        ppo.update(model, critic, {"policy": optimizer, "critic": optimizer}, ppo.make_batch([failed]), settings(), random.Random(0))
    except ValueError as error:
        assert "fail" in str(error)                                # one sentence for the user, not a shape error
    assert weights(model).equal(before)


# ---- agent tokens only ---------------------------------------------------------------------------------------------------

def test_the_trained_ids_are_the_sampled_ids_at_the_places_that_predict_them():
    #   row of the first   [1 1 1][10 11][1 1 1][20]      plain: sampled tokens are the trunk's own
    first, second = made([2, 1]), made([1], user=2)
    micro = whole([first, second])
    assert micro.input_ids.tolist() == [[1, 1, 10, 0, 0, 0, 0, 0, 0], [1, 1, 1, 10, 11, 1, 1, 1, 20]]    # the shorter row first
    assert micro.actions.tolist() == [10, 10, 11, 20]
    assert [part.tolist() for part in micro.before] == [[0, 1, 1, 1], [1, 2, 3, 7]]
    assert micro.index.tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize("think", [True, False])
def test_no_user_token_is_trained_and_every_end_token_is(chat, scenarios, think):
    dialogues = ragged(chat, scenarios, think)
    sampled = [token for d in dialogues for turn in d.turns for token in turn.ids]
    for budget in (1, 700, 10**6):
        actions = torch.full((len(sampled),), -1)
        for micro in microbatches(dialogues, ppo.make_batch(dialogues).starts, budget):
            assert (actions[micro.index] == -1).all()
            actions[micro.index] = micro.actions
        assert actions.tolist() == sampled
    assert sampled.count(chat.end_ids[-1]) == sum(len(d.turns) for d in dialogues)


def test_microbatches_are_as_few_as_the_budget_allows_and_then_as_equal():
    dialogues = [made([2]) for _ in range(5)]                      # rows of 3 + 2 tokens; 4 of them fit
    starts = ppo.make_batch(dialogues).starts
    assert [micro.input_ids.shape[0] for micro in microbatches(dialogues, starts, 20)] == [3, 2]
    assert [micro.input_ids.shape[0] for micro in microbatches(dialogues, starts, 25)] == [5]


@fixed
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 120))
def test_no_microbatch_exceeds_the_budget_unless_it_is_one_row_and_every_row_is_in_one(lengths, budget):
    dialogues = [made([n]) for n in lengths]
    micros = list(microbatches(dialogues, ppo.make_batch(dialogues).starts, budget))
    assert all(micro.input_ids.numel() <= budget or len(micro.input_ids) == 1 for micro in micros)
    assert sorted(torch.cat([micro.index for micro in micros]).tolist()) == list(range(sum(lengths)))
    fewest, row_count = 1, 0                                       # rows by length, each micro-batch as full as it can be
    for width in sorted(n + 3 for n in lengths):
        row_count += 1
        if row_count > 1 and row_count * width > budget:
            fewest, row_count = fewest + 1, 1
    assert len(micros) == fewest


@pytest.mark.parametrize("think", [True, False])
def test_the_head_runs_on_agent_tokens_only(model, chat, scenarios, think):
    dialogues, rows = ragged(chat, scenarios, think), []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1].numel()))
    ppo.token_logprobs(model, whole(dialogues), chunk=50)
    assert sum(rows) == sum(len(turn.ids) for d in dialogues for turn in d.turns) and max(rows) <= 50


@pytest.mark.parametrize("think", [True, False])
def test_logits_of_user_tokens_get_no_gradient(model, chat, scenarios, think):
    dialogue, seen = ragged(chat, scenarios, think)[2], []
    model.model.register_forward_hook(lambda module, args, out: (out[0].retain_grad(), seen.append(out[0]))[0] and None)
    micro = whole([dialogue])
    ppo.token_logprobs(model, micro)[0].sum().backward()
    touched = set(seen[0].grad[0].abs().sum(-1).nonzero()[:, 0].tolist())
    assert touched == set(micro.before[1].tolist())


# ---- packed rows against turns scored alone --------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("think", [True, False])
def test_packed_log_probs_equal_those_of_each_turn_scored_alone(model, chat, scenarios, think, temperature):
    dialogues = ragged(chat, scenarios, think)
    logprobs, entropies = alone(model, dialogues, temperature)
    for budget in (1, 700, 10**6):
        ours = torch.zeros(2, len(logprobs))
        for micro in microbatches(dialogues, ppo.make_batch(dialogues).starts, budget):
            ours[:, micro.index] = torch.stack(ppo.token_logprobs(model, micro, temperature))
        torch.testing.assert_close(ours[0], logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours[1], entropies, rtol=0, atol=1e-4)


def test_attention_by_branches_equals_the_mask_in_log_probs_and_gradients(model, chat, scenarios):
    dialogues, results = ragged(chat, scenarios, True), []
    batch = ppo.make_batch(dialogues)
    torch.manual_seed(1)
    advantages = torch.randn(len(batch.old_logprobs))
    for attention in ("sdpa", "branches"):
        model.set_attn_implementation(attention)
        logprobs, _ = ppo.token_logprobs(model, whole(dialogues))
        results.append((logprobs.detach(), *gradients_of_update(model, batch, advantages, settings(tokens_per_batch=900, ent_coef=0.01))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-5)
    assert_same_gradients(results[1][1][0], results[0][1][0])
    assert results[1][2] == pytest.approx(results[0][2], rel=1e-5, abs=1e-6)


def test_a_checked_model_attends_by_branches_and_its_checkpoint_does_not_say_so(model, chat, tmp_path):
    ppo.check_model(model, True)
    assert model.config._attn_implementation == "branches" and ppo.Critic(model).model.config._attn_implementation == "branches"
    model.save_pretrained(tmp_path)
    assert "branches" not in (tmp_path / "config.json").read_text()


def test_a_thought_is_never_read_by_later_turns(model, chat, scenarios):
    dialogue = told(chat, scenarios[0], True, [50, 60, 70])
    before, _ = ppo.token_logprobs(model, whole([dialogue]))
    first = len(dialogue.turns[0].ids)
    dialogue.turns[0].ids = [7] * first
    after, _ = ppo.token_logprobs(model, whole([dialogue]))
    torch.testing.assert_close(after[first:], before[first:])
    assert (after[:first] - before[:first]).abs().max() > 0.01


def test_chunked_and_unchunked_scores_and_gradients_are_the_same(model, chat, scenarios):
    micro, results = whole(ragged(chat, scenarios, True)), []
    for chunk in (7, 10**6):
        model.zero_grad()
        logprobs, entropy = ppo.token_logprobs(model, micro, 0.7, chunk=chunk)
        (logprobs.sum() - 0.1 * entropy.sum()).backward()
        results.append((logprobs, entropy, [p.grad.clone() for p in model.parameters()]))
    for ours, theirs in zip(results[0][:2], results[1][:2]):
        torch.testing.assert_close(ours, theirs)
    assert_same_gradients(results[0][2], results[1][2])


# ---- the loss ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("think", [True, False])
def test_the_updates_gradient_equals_that_of_a_plain_loop_over_turns(model, chat, scenarios, think):
    batch = ppo.make_batch(ragged(chat, scenarios, think))
    torch.manual_seed(1)
    advantages, ref_policy = torch.randn(len(batch.old_logprobs)), copy.deepcopy(model)
    with torch.no_grad():
        [p.add_(0.02 * torch.randn_like(p)) for p in ref_policy.parameters()]
        ref_logprobs, _ = alone(ref_policy, batch.dialogues, 0.7)
    logprobs, entropies = alone(model, batch.dialogues, 0.7)
    loss, clips = 0.0, 0
    for logprob, old, ref, entropy, a in zip(logprobs, batch.old_logprobs, ref_logprobs, entropies, advantages):
        ratio = (logprob - old).exp()
        inside = 0.8 <= ratio <= 1.2
        objective = ratio * a if inside or (a > 0) == (ratio < 0.8) else (1.2 if ratio > 1 else 0.8) * a
        clips += not inside and (a > 0) == (ratio > 1.2)
        loss = loss - objective - 0.01 * entropy + 0.1 * 0.5 * (logprob - ref) ** 2
    (loss / len(advantages)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (ours,), metrics = gradients_of_update(model, batch, advantages, settings(temperature=0.7, ent_coef=0.01, kl_coef=0.1), ref_policy)
    assert_same_gradients(ours, expected)
    assert metrics["clipfrac"] == pytest.approx(clips / len(advantages)) and 0 < clips < len(advantages)
    assert metrics["entropy"] == pytest.approx(entropies.mean().item(), rel=1e-4)
    k3 = (ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1
    assert metrics["ref_kl"] == pytest.approx(k3.mean().item(), rel=1e-3)


@pytest.mark.parametrize("think", [True, False])
def test_how_a_minibatch_is_split_into_microbatches_changes_neither_gradients_nor_metrics(model, chat, scenarios, think):
    batch, results = ppo.make_batch(ragged(chat, scenarios, think)), []
    torch.manual_seed(1)
    advantages = torch.randn(len(batch.old_logprobs))
    for budget in (1, 700, 10**6):
        cfg = settings(tokens_per_batch=budget, minibatches=2, epochs=2, ent_coef=0.01)
        results.append(gradients_of_update(model, batch, advantages, cfg))
    for gradients, metrics in results[1:]:
        assert len(gradients) == 4
        for ours, theirs in zip(gradients, results[0][0]):
            assert_same_gradients(ours, theirs)
        assert metrics == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("values", ["token", "turn"])
def test_the_critics_gradient_does_not_depend_on_microbatches_either(model, chat, scenarios, values):
    batch, results = ppo.make_batch(ragged(chat, scenarios, True)), []
    critic = ppo.Critic(model, values)
    torch.nn.init.normal_(critic.model.get_output_embeddings().weight, std=0.1)
    for budget in (1, 700, 10**6):
        keep, cfg = Keep(critic), settings(tokens_per_batch=budget, minibatches=2)
        _, old_values, returns, _ = ppo.estimate(critic, batch, cfg)
        results.append((ppo.update_critic(critic, keep, batch, old_values, returns, cfg, random.Random(0)), keep.gradients))
    for metrics, gradients in results[1:]:
        for ours, theirs in zip(gradients, results[0][1]):
            assert_same_gradients(ours, theirs)
        assert metrics == pytest.approx(results[0][0], rel=1e-5)


def test_the_order_of_dialogues_in_a_batch_changes_nothing(model, chat, scenarios):
    dialogues, results = ragged(chat, scenarios, True), []
    cfg = settings(tokens_per_batch=900, ent_coef=0.01, gae="dialogue", gamma=0.99, gae_lambda=0.9)
    critic = ppo.Critic(model)
    for order in (range(5), (3, 0, 4, 2, 1)):
        batch = ppo.make_batch([dialogues[i] for i in order])
        gradients, metrics = gradients_of_update(model, batch, ppo.estimate(critic, batch, cfg)[0], cfg)
        results.append((gradients[0], metrics))
    assert_same_gradients(results[0][0], results[1][0])
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5, abs=1e-7)


def test_each_minibatch_is_normalised_by_its_own_agent_tokens(model, chat, scenarios):
    # with advantage 1 and old = new, the mean loss is -1 however ragged the dialogues are
    dialogues = ragged(chat, scenarios, False)
    batch = ppo.make_batch(dialogues)
    batch.old_logprobs = alone(model, dialogues)[0].detach()
    ones = torch.ones(len(batch.old_logprobs))
    (whole_gradient,), metrics = gradients_of_update(model, batch, ones, settings())
    assert metrics["pg_loss"] == pytest.approx(-1, abs=1e-4)
    parts, _ = gradients_of_update(model, batch, ones, settings(minibatches=2))
    sizes = [size for _, size in ppo.minibatches(batch, settings(minibatches=2), random.Random(0), batch.tokens)]
    together = [sum(n * g for n, g in zip(sizes, gs)) / sum(sizes) for gs in zip(*parts)]
    assert_same_gradients(together, whole_gradient)


@pytest.mark.parametrize("by_turn", [False, True])
def test_minibatches_use_each_dialogue_exactly_once_an_epoch_for_any_numbers_of_both(by_turn):
    for dialogues, parts in itertools.product(range(1, 14), range(1, 7)):
        turns = [1 + 5 * i % 9 for i in range(dialogues)]                         # 1 to 9 turns, of 1 to 3 tokens each
        batch = ppo.make_batch([made([i % 3 + 1] * n) for i, n in enumerate(turns)])
        chosen = list(ppo.minibatches(batch, settings(minibatches=parts, epochs=2), random.Random(parts), batch.turns if by_turn else batch.tokens))
        an_epoch = min(parts, dialogues)
        assert len(chosen) == 2 * an_epoch
        for epoch in (chosen[:an_epoch], chosen[an_epoch:]):
            assert sorted(itertools.chain(*[members for members, _ in epoch])) == list(range(dialogues))
            sizes = [len(members) for members, _ in epoch]
            assert max(sizes) - min(sizes) <= 1
        for members, size in chosen:
            assert size == sum(turns[i] if by_turn else turns[i] * (i % 3 + 1) for i in members)


def test_an_entropy_bonus_alone_raises_entropy(model, chat, scenarios):
    batch = ppo.make_batch(ragged(chat, scenarios, False))
    optimizer, entropies = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(4):
        metrics = ppo.update_policy(model, optimizer, batch, torch.zeros(len(batch.old_logprobs)), settings(ent_coef=1.0), random.Random(0))
        entropies.append(metrics["entropy"])
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0]


def test_a_kl_penalty_alone_pulls_the_policy_back_to_its_reference(model, chat, scenarios):
    batch, ref_policy = ppo.make_batch(ragged(chat, scenarios, False)), copy.deepcopy(model)
    nothing, cfg = torch.zeros(len(batch.old_logprobs)), settings(kl_coef=1.0)
    batch.old_logprobs = alone(model, batch.dialogues)[0].detach()
    (gradient,), metrics = gradients_of_update(model, batch, nothing, cfg, ref_policy)
    assert metrics["ref_kl"] == pytest.approx(0, abs=1e-6) and max(g.abs().max() for g in gradient) < 1e-4
    torch.manual_seed(1)
    with torch.no_grad():
        [p.add_(0.05 * torch.randn_like(p)) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kls = [ppo.update_policy(model, optimizer, batch, nothing, cfg, random.Random(0), ref_policy)["ref_kl"] for _ in range(4)]
    assert kls == sorted(kls, reverse=True) and kls[-1] < 0.9 * kls[0]


def test_metrics_stay_finite_when_the_engines_log_prob_is_far_off(model, chat, scenarios):
    batch = ppo.make_batch(ragged(chat, scenarios, False))
    batch.old_logprobs[0] = -200.0
    (gradient,), metrics = gradients_of_update(model, batch, torch.ones(len(batch.old_logprobs)), settings())
    assert all(g.isfinite().all() for g in gradient)
    assert finite(metrics), metrics


def test_a_nan_stops_the_step_before_it_reaches_the_weights(model, chat, scenarios):
    batch = ppo.make_batch(ragged(chat, scenarios, False))
    advantages = torch.ones(len(batch.old_logprobs))
    advantages[3] = math.nan
    try:
        ppo.update_policy(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, advantages, settings(), random.Random(0))
    except (ValueError, RuntimeError, FloatingPointError):
        pass                                                       # refusing in words is as good as skipping
    assert weights(model).isfinite().all()


def test_one_agent_token_in_all_is_enough_for_an_update(model):
    critic, before = ppo.Critic(model), weights(model)
    optimizers = {"policy": torch.optim.AdamW(model.parameters(), lr=1e-2), "critic": torch.optim.AdamW(critic.parameters(), lr=1e-2)}
    metrics = ppo.update(model, critic, optimizers, ppo.make_batch([made([1], [70])]), settings(), random.Random(0))
    assert not weights(model).equal(before)
    assert finite(metrics), metrics


# ---- the engine and the learner agree ------------------------------------------------------------------------------------

def play(model, chat, scenarios, think, temperature=0.7, count=8, size=1, max_turns=2, max_new_tokens=12, step=0):
    """Dialogues of a random policy with the scripted user; members of a group start in different moods, so that some
    reward differs although a random policy only ever says garbage."""
    dialogues = [Dialogue(scenarios[9 * (i // size) % len(scenarios)], think, seed_of("play", step, i), i % size, i // size,
                          40 + 10 * (i % 4), max_turns) for i in range(count)]
    make_user = lambda d: ScriptedSimulator(d.scenario, "challenging", d.start_emotion, max_turns, d.seed)
    rollout(HFEngine(model, chat.end_ids, max_new_tokens, temperature), chat, dialogues, make_user, "Be kind.")
    return dialogues


@pytest.mark.parametrize("think", [True, False])
def test_before_the_first_step_the_ratio_is_1_at_the_sampling_temperature(model, chat, scenarios, think):
    dialogues = play(model, chat, scenarios, think)
    batch = ppo.make_batch(dialogues)
    logprobs = torch.zeros(len(batch.old_logprobs))
    for micro in microbatches(dialogues, batch.starts, 500):
        logprobs[micro.index] = ppo.token_logprobs(model, micro, 0.7)[0].detach()
    torch.testing.assert_close(logprobs, batch.old_logprobs, rtol=0, atol=1e-4)
    _, metrics = gradients_of_update(model, batch, torch.ones(len(logprobs)), settings(temperature=0.7))
    assert metrics["mismatch_max"] < 1e-4 and metrics["clipfrac"] == 0
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    _, wrong = gradients_of_update(model, batch, torch.ones(len(logprobs)), settings(temperature=1.0))
    assert wrong["mismatch_max"] > 0.1                             # the check bites: another temperature is seen


def test_the_mismatch_is_measured_before_the_first_step_only(model, chat, scenarios):
    batch = ppo.make_batch(play(model, chat, scenarios, False))
    optimizer, cfg = torch.optim.SGD(model.parameters(), lr=0.1), settings(temperature=0.7, minibatches=4)
    metrics = ppo.update_policy(model, optimizer, batch, torch.ones(len(batch.old_logprobs)), cfg, random.Random(0))
    assert metrics["mismatch_max"] < 1e-4 and metrics["ratio_max"] > 1.01


def test_kl_and_largest_ratio_of_an_update_by_a_loop(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    batch, new = ppo.make_batch(dialogues), alone(model, dialogues)[0].tolist()
    gaps = [0.1 + 0.5 * math.sin(i) for i in range(len(new))]                      # log pi_new - log pi_old of each token
    batch.old_logprobs = torch.tensor([logprob - gap for logprob, gap in zip(new, gaps)])
    _, metrics = gradients_of_update(model, batch, torch.ones(len(new)), settings(minibatches=2, epochs=2))
    assert metrics["approx_kl"] == pytest.approx(sum(math.exp(gap) - gap - 1 for gap in gaps) / len(gaps), rel=1e-3)      # k3 of KL(old || new)
    assert metrics["approx_kl_k1"] == pytest.approx(-sum(gaps) / len(gaps), rel=1e-3)
    assert metrics["ratio_max"] == pytest.approx(max(map(math.exp, gaps)), rel=1e-3)


@pytest.mark.parametrize("lag, weight", [(math.log(1.5), 1.5), (math.log(3.0), 2.0), (-math.log(4.0), 0.25)])
def test_an_engine_that_lags_behind_is_corrected_by_a_weight_up_to_the_cap(model, chat, scenarios, lag, weight):
    batch = ppo.make_batch(play(model, chat, scenarios, True))
    advantages, cfg = torch.linspace(-1, 1, len(batch.old_logprobs)), settings(temperature=0.7, tis_cap=2.0)
    (plain,), metrics = gradients_of_update(model, batch, advantages, cfg)
    assert metrics["tis_capped"] == 0
    batch.old_logprobs -= lag                                      # the engine found every token less likely than the learner does
    (corrected,), metrics = gradients_of_update(model, batch, advantages, cfg)
    for one, other in zip(plain, corrected):
        torch.testing.assert_close(other, weight * one, rtol=1e-3, atol=1e-6)
    assert metrics["mismatch"] == pytest.approx(abs(lag), rel=1e-3) and metrics["tis_capped"] == (weight == 2.0)
    assert metrics["mismatch_kl"] == pytest.approx(math.exp(lag) - lag - 1, rel=1e-3)          # k3 of a constant gap, by hand
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["clipfrac"] == 0     # the ratio is the learner's own


@pytest.mark.parametrize("wrong", [0.2, math.nan])
@pytest.mark.parametrize("tis_cap", [0.0, 2.0])
def test_an_engine_with_other_weights_stops_the_run_before_the_update(model, chat, scenarios, wrong, tis_cap):
    batch, before = ppo.make_batch(play(model, chat, scenarios, False)), weights(model)
    optimizer, cfg = torch.optim.SGD(model.parameters(), lr=0.1), settings(temperature=0.7, max_mismatch=0.1, tis_cap=tis_cap, minibatches=2)
    update = lambda: ppo.update_policy(model, optimizer, batch, torch.ones(len(batch.old_logprobs)), cfg, random.Random(0))
    batch.old_logprobs += wrong
    with pytest.raises(ValueError, match="--max-mismatch 0.1") as error:
        update()
    assert "\n" not in str(error.value) and weights(model).equal(before)
    batch.old_logprobs = ppo.make_batch(batch.dialogues).old_logprobs
    update()
    assert not weights(model).equal(before)


# ---- options of the loss, worked by hand or by a loop -------------------------------------------------------------------------

@pytest.mark.parametrize("ratio, advantage, high, loss", [(1.5, 1.0, 0.0, -1.2), (1.5, 1.0, 0.28, -1.28), (1.25, 1.0, 0.28, -1.25),
                                                          (0.5, -1.0, 0.28, 0.8), (1.5, -1.0, 0.28, 1.5)])
def test_clip_high_bounds_only_how_far_a_ratio_may_rise(ratio, advantage, high, loss):
    got, _ = ppo.policy_loss(torch.tensor([ratio]).log(), torch.zeros(1), torch.tensor([advantage]), 0.2, high)
    assert got.item() == pytest.approx(loss, abs=1e-6)


def test_k1_is_signed_and_averages_to_the_same_kl_as_k3():
    torch.manual_seed(0)
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist()))
    drawn = torch.multinomial(policy, 200_000, replacement=True)
    k1, k3 = (kl(policy.log()[drawn], reference.log()[drawn]) for kl in (ppo.kl_k1, ppo.kl_k3))
    assert k1.mean().item() == pytest.approx(exact, abs=0.01) and k3.mean().item() == pytest.approx(exact, abs=0.01)
    assert k1.min() < 0 <= k3.min() and k3.var() < k1.var()


@pytest.mark.parametrize("gap, cap, weight", [(0.0, 2.0, 1.0), (0.012, 2.0, math.exp(0.012)), (-1.0, 2.0, math.exp(-1)), (5.0, 2.0, 2.0), (200.0, 2.0, 2.0),
                                              (-200.0, 2.0, math.exp(-20))])
def test_the_weight_of_a_token_is_its_own_truncated_ratio(gap, cap, weight):
    got = ppo.importance_weights(torch.full((400,), gap - 3), torch.full((400,), -3.0), cap)
    assert got.tolist() == pytest.approx([weight] * 400, rel=1e-4)           # 400 tokens do not multiply up


def test_with_an_engine_that_differs_the_loss_is_weighted_and_the_ratio_starts_at_1(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    batch = ppo.make_batch(dialogues)
    ours = alone(model, dialogues)[0].detach()
    torch.manual_seed(0)
    batch.old_logprobs = ours + 0.5 * torch.randn(len(ours))                 # the engine's view of the same tokens
    advantages = torch.randn(len(ours))
    _, metrics = gradients_of_update(model, batch, advantages, settings(tis_cap=1.3))
    weights = [min(1.3, math.exp(a - b)) for a, b in zip(ours.tolist(), batch.old_logprobs.tolist())]
    assert metrics["pg_loss"] == pytest.approx(-sum(w * a for w, a in zip(weights, advantages.tolist())) / len(weights), rel=1e-3)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["clipfrac"] == 0
    assert metrics["tis_capped"] == pytest.approx(sum(w == 1.3 for w in weights) / len(weights))
    gaps = [abs(a - b) for a, b in zip(ours.tolist(), batch.old_logprobs.tolist())]
    assert metrics["mismatch"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4) and metrics["mismatch_max"] == pytest.approx(max(gaps), rel=1e-4)


def test_loss_norm_dialogue_weighs_every_dialogue_alike_however_long(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    batch, (logprobs, _) = ppo.make_batch(dialogues), alone(model, dialogues)
    batch.old_logprobs = logprobs.detach()
    torch.manual_seed(0)
    advantages = torch.randn(len(logprobs))
    terms = (-(logprobs - logprobs.detach()).exp() * advantages).split(batch.tokens)
    expected = torch.autograd.grad(sum(part.mean() for part in terms) / len(terms), list(model.parameters()))
    for budget in (1, 10**6):
        (got,), _ = gradients_of_update(model, batch, advantages, settings(loss_norm="dialogue", tokens_per_batch=budget))
        assert_same_gradients(got, expected)


def test_the_imitation_loss_is_minus_the_reward_times_the_log_prob(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    batch, (logprobs, _) = ppo.make_batch(dialogues), alone(model, dialogues)
    batch.old_logprobs = logprobs.detach()
    rewards = torch.tensor([r for d in dialogues for turn, r in zip(d.turns, ppo.turn_rewards(d)) for _ in turn.ids])
    expected = torch.autograd.grad(-0.3 * (rewards * logprobs).mean(), list(model.parameters()))
    (got,), _ = gradients_of_update(model, batch, torch.zeros(len(logprobs)), settings(imitation_coef=0.3))
    assert_same_gradients(got, expected)


# ---- reward delta: what each turn changed --------------------------------------------------------------------------------------

@pytest.mark.parametrize("emotions", [[45], [35, 45, 55], [50, 40, 30, 20, 5], [100]])
def test_deltas_telescope_to_the_final_reward(emotions):
    dialogue = made([2] * len(emotions), emotions)
    assert sum(ppo.turn_deltas(dialogue)) == pytest.approx(emotions[-1] / 100) and ppo.turn_deltas(dialogue)[0] == emotions[0] / 100
    assert ppo.turn_deltas(dialogue)[1:] == pytest.approx([(b - a) / 100 for a, b in zip(emotions, emotions[1:])])


def test_a_malformed_turn_gains_nothing_by_a_delta_and_still_pays():
    dialogue = made([2, 2, 2], [50, 60, 45], ok=[False, False, False])
    assert ppo.turn_deltas(dialogue) == pytest.approx([0, 0, -0.15])
    assert ppo.turn_deltas(dialogue, format_reward=False) == pytest.approx([0.5, 0.1, -0.15])


def test_middle_emotions_matter_for_delta_and_only_for_delta():
    def advantages(emotions, reward):
        batch = ppo.make_batch([made([2, 1, 2], emotions)], reward=reward)
        critic = type("critic", (), {"values": "token"})
        cfg = settings(gae="dialogue", reward=reward)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo, "predict_values", lambda *args: torch.zeros(5))
            patch.setattr(ppo, "whiten", lambda x: x)
            return ppo.estimate(critic, batch, cfg)[0].tolist()
    for middle in (20, 60):
        assert advantages([50, middle, 70], "final") == pytest.approx([0.7] * 5)
    assert advantages([50, 60, 70], "delta") == pytest.approx([0.7, 0.7, 0.2, 0.1, 0.1])        # what follows each token
    assert advantages([50, 20, 70], "delta") == pytest.approx([0.7, 0.7, 0.2, 0.5, 0.5])


# ---- numbers that must not pass, models that cannot ------------------------------------------------------------------------------

def test_a_nan_is_named_with_its_tensor_and_dialogue_and_the_third_in_a_row_stops(model, chat, scenarios, capsys):
    dialogues = ragged(chat, scenarios, True)
    batch = ppo.make_batch(dialogues)
    advantages = torch.ones(len(batch.old_logprobs))
    advantages[batch.starts[1] + 2] = math.nan
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=1.0), [p.clone() for p in model.parameters()]
    step = lambda adv: ppo.update_policy(model, optimizer, batch, adv, settings(), random.Random(0))
    for _ in range(2):
        step(advantages)
        assert f"advantages is nan in the dialogue of {dialogues[1].scenario.id}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="three minibatches in a row") as error:
        step(advantages)
    assert "\n" not in str(error.value) and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    optimizer.skipped = 2
    step(torch.ones_like(advantages))                                        # one good minibatch, and the count starts anew
    assert optimizer.skipped == 0


def test_bfloat16_compute_never_loses_an_update_at_a_tiny_learning_rate(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    batch = ppo.make_batch(dialogues)
    exact, before = alone(model, dialogues)[0].detach(), [p.clone() for p in model.parameters()]
    model.in_bfloat16 = True
    micro = next(iter(ppo.microbatches(batch.dialogues, batch.starts, 10**6)))
    with torch.no_grad():
        rough = torch.zeros_like(exact)
        rough[micro.index] = ppo.token_logprobs(model, micro)[0]
    assert 1e-5 < (rough - exact).abs().max() < 0.2 and rough.dtype == torch.float32        # it does compute in bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(20):
        ppo.update_policy(model, optimizer, batch, torch.ones(len(exact)), settings(), random.Random(0))
    for old, new in zip(before, model.parameters()):
        moved = (new - old).abs()[new != old]
        assert new.dtype == torch.float32 and moved.numel() and moved.median().item() == pytest.approx(2e-5, rel=0.5)


def test_gradient_checkpointing_changes_memory_and_not_gradients(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    batch = ppo.make_batch(dialogues)
    batch.old_logprobs = alone(model, dialogues)[0].detach()
    ones = torch.ones(len(batch.old_logprobs))
    (plain,), _ = gradients_of_update(model, batch, ones, settings())
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    (checkpointed,), _ = gradients_of_update(model, batch, ones, settings())
    assert_same_gradients(checkpointed, plain)


def of_family(name, chat, **more):
    size = dict(vocab_size=len(chat.tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=2048, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**size | more)).eval()


@pytest.mark.parametrize("think", [True, False])
def test_a_model_that_scales_its_logits_after_the_head_is_refused(think, chat):
    ppo.check_model(of_family("Granite", chat), think)
    with pytest.raises(ValueError, match="GraniteForCausalLM scales or caps its logits"):
        ppo.check_model(of_family("Granite", chat, logits_scaling=8.0), think)


@pytest.mark.parametrize("name, more", [("Gemma2", dict(head_dim=8, sliding_window=4)), ("Mistral", dict(sliding_window=4)), ("Bloom", {}), ("Mamba", {})])
def test_without_thoughts_no_model_is_refused_for_its_masks(name, more, chat):
    ppo.check_model(of_family(name, chat, **more), False)


def test_words_that_the_model_cannot_say_make_no_nan(model, chat, scenarios):
    micro, never = whole(ragged(chat, scenarios, True)), torch.ones(model.config.vocab_size, dtype=torch.bool)
    never[micro.actions] = False
    exact, _ = ppo.token_logprobs(model, micro)
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: out.masked_fill(never, -math.inf))
    for chunk in (50, None):
        logprobs, entropy = ppo.token_logprobs(model, micro, chunk=chunk)
        (logprobs - 0.1 * entropy).sum().backward()
        assert (logprobs > exact).all() and entropy.isfinite().all() and (entropy < math.log((~never).sum()) + 1e-4).all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name, more, fits", [
    ("Llama", {}, True), ("Qwen2", {}, True), ("Qwen3", dict(head_dim=8), True), ("Mistral", dict(sliding_window=None), True), ("GPTNeoX", {}, True),
    ("Olmo2", {}, True), ("Mistral", dict(sliding_window=4096), True), ("Mistral", dict(sliding_window=4), False), ("Mistral", dict(sliding_window=1024), False),
    ("Qwen2", dict(sliding_window=4), True), ("Gemma2", dict(head_dim=8, sliding_window=4), False),
    ("Bloom", {}, False), ("Mamba", {}, False)])
def test_a_model_packs_like_flat_turns_or_is_refused_in_one_line(name, more, fits, chat, scenarios):
    model = of_family(name, chat, **more)
    if not fits:
        with pytest.raises(ValueError, match="--no-think") as error:
            ppo.check_model(model, True)
        assert "\n" not in str(error.value)
        return
    ppo.check_model(model, True)
    dialogues = ragged(chat, scenarios, True)
    batch, packed = ppo.make_batch(dialogues), torch.zeros(sum(len(t.ids) for d in dialogues for t in d.turns))
    with torch.no_grad():
        for micro in ppo.microbatches(batch.dialogues, batch.starts, 2000):
            packed[micro.index] = ppo.token_logprobs(model, micro)[0]
    torch.testing.assert_close(packed, alone(model, dialogues)[0].detach(), rtol=1e-4, atol=1e-4)


def test_branch_attention_is_taken_on_a_cpu_and_never_where_there_is_a_gpu(model, monkeypatch):
    ppo.check_model(model, True)
    assert model.config._attn_implementation == "branches"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)            # also for a model that waits in memory to be sharded
    ppo.check_model(model, True)
    assert model.config._attn_implementation == "sdpa"


# ---- the critic ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("values", ["token", "turn"])
def test_the_critic_reads_the_state_before_a_token_or_at_a_turns_header(model, chat, scenarios, think, values):
    dialogues = ragged(chat, scenarios, think)
    batch, critic = ppo.make_batch(dialogues), ppo.Critic(model, values)
    torch.nn.init.normal_(critic.model.get_output_embeddings().weight)
    expected = []
    with torch.no_grad():
        for turn, prompt in [(turn, d.trunk[:turn.prompt_len]) for d in dialogues for turn in d.turns]:
            row = critic.model(input_ids=torch.tensor([prompt + turn.ids])).logits[0, len(prompt) - 1:-1, 0]
            expected += row.tolist() if values == "token" else row[:1].tolist() * len(turn.ids)
    for budget in (1, 700, 10**6):
        ours = ppo.predict_values(critic, batch, budget)
        assert ours.shape == batch.old_logprobs.shape and not ours.requires_grad
        torch.testing.assert_close(ours, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_value_a_turn_never_pays_for_thoughts(model, chat, scenarios):
    dialogues = ragged(chat, scenarios, True)
    micro = whole(dialogues, [0, 2, 3, 7, 10], branches=False)
    assert micro.mask is None and micro.actions is None
    assert micro.input_ids.numel() < whole(dialogues).input_ids.numel()
    assert sorted(micro.index.tolist()) == list(range(sum(len(d.turns) for d in dialogues)))
    assert ppo.Critic(model, "turn")(micro).shape == (11,)


def test_a_new_critic_says_the_same_everywhere_and_shares_no_weight_with_the_policy(model, chat, scenarios):
    batch, before = ppo.make_batch(ragged(chat, scenarios, True)), weights(model)
    critic = ppo.Critic(model)
    assert ppo.predict_values(critic, batch, 4096).unique().numel() == 1
    with torch.no_grad():
        [p.zero_() for p in critic.parameters()]
    assert weights(model).equal(before) and model.get_output_embeddings().out_features == model.config.vocab_size


@pytest.mark.parametrize("values, loss", [("token", (0.2 ** 2 + 0.1 ** 2 + 0.1 ** 2 + 0.5 ** 2) / 8), ("turn", (0.2 ** 2 + 0.1 ** 2) / 4)])
def test_a_value_a_turn_is_fitted_to_the_return_at_the_turns_first_token(model, values, loss):
    # gamma = 1/2: the returns of 2 + 2 tokens are .1 .2 .4 .8, a new critic says .3 everywhere
    batch, cfg, critic = ppo.make_batch([made([2, 2], [30, 80])]), settings(gae="dialogue", gamma=0.5), ppo.Critic(model, values)
    metrics = ppo.update(model, critic, {"critic": Keep(critic)}, batch, cfg, random.Random(0), train_policy=False)
    assert metrics["v_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("values, explained", [([0.2, 0.2, 0.8, 0.8], 1), ([0.1, 0.1, 0.7, 0.7], 1), ([0.5] * 4, 0), ([0.8, 0.8, 0.2, 0.2], -3)])
def test_explained_variance_worked_by_hand(values, explained):
    batch = ppo.make_batch([made([2], [20]), made([2], [80])])               # returns .2 .2 .8 .8; a value off by a constant still explains all
    assert ppo.estimate(Fixed(values), batch, settings())[3]["explained_var"] == pytest.approx(explained, abs=1e-5)


def test_the_value_loss_is_a_mean_over_epochs(model):
    batch, critic, returns = ppo.make_batch([made([2, 2], [30, 80])]), ppo.Critic(model), torch.tensor([0.1, 0.2, 0.4, 0.8])
    for epochs in (1, 3):                                                    # nothing is updated, so every epoch has the same loss
        metrics = ppo.update_critic(critic, Keep(critic), batch, torch.full((4,), 0.3), returns, settings(epochs=epochs), random.Random(0))
        assert metrics["v_loss"] == pytest.approx((0.2 ** 2 + 0.1 ** 2 + 0.1 ** 2 + 0.5 ** 2) / 8, rel=1e-4)


@pytest.mark.parametrize("think, values", [(True, "token"), (True, "turn"), (False, "token"), (False, "turn")])
def test_warm_up_teaches_the_critic_a_constant_and_leaves_the_policy_alone(model, chat, scenarios, think, values):
    batch = ppo.make_batch([told(chat, scenarios[i], think, [50, 80], seed=i) for i in range(3)])
    critic, before = ppo.Critic(model, values), weights(model)
    optimizers, losses = {"critic": torch.optim.AdamW(critic.parameters(), lr=5e-3)}, []
    for _ in range(20):
        metrics = ppo.update(model, critic, optimizers, batch, settings(max_grad_norm=1.0), random.Random(0), train_policy=False)
        losses.append(metrics["v_loss"])
    assert losses[0] == pytest.approx(0.5 * (0.8 - 0.3) ** 2, rel=1e-4) and losses[-1] < 0.1 * losses[0]
    assert (ppo.predict_values(critic, batch, 4096) - 0.8).abs().mean() < 0.1
    assert weights(model).equal(before) and "pg_loss" not in metrics


# ---- whole steps ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("values, gae", [("token", "turn"), ("turn", "dialogue")])
@pytest.mark.parametrize("think", [True, False])
def test_two_ppo_steps_with_the_scripted_user_change_the_weights_and_all_metrics_are_finite(model, chat, scenarios, think, values, gae):
    critic, rng = ppo.Critic(model, values), random.Random(0)
    optimizers = {"policy": torch.optim.AdamW(model.parameters(), lr=1e-3), "critic": torch.optim.AdamW(critic.parameters(), lr=1e-3)}
    for step in range(2):
        before = weights(model)
        batch = ppo.make_batch(play(model, chat, scenarios, think, step=step), format_reward=False)
        metrics = ppo.update(model, critic, optimizers, batch, settings(temperature=0.7, gae=gae, minibatches=2, max_grad_norm=1.0), rng)
        assert finite(metrics), metrics
        assert metrics["mismatch_max"] < 1e-4 and metrics["grad_norm"] > 0
        assert weights(model).isfinite().all() and not weights(model).equal(before)


# ---- it learns -----------------------------------------------------------------------------------------------------------

class LikesLetters:
    """A user whose emotion is the share of letters, in percent, among all characters of the two replies heard."""

    def __init__(self):
        self.heard, self.replies = "", 0

    def opening(self):
        return "Hi."

    def hear(self, reply):
        self.heard, self.replies = self.heard + reply, self.replies + 1
        emotion = round(100 * sum(c.isascii() and c.isalpha() for c in self.heard) / max(1, len(self.heard)))
        return Reaction(0, emotion, "Go on.", "", "max_turns" if self.replies == 2 else None)


@pytest.fixture(scope="module")
def byte_chat():
    """One token a byte: a fifth of what a random policy says are letters."""
    return ChatTokens(sft.build_tokenizer(["Hi. Go on."], vocab_size=259))


def learn(chat, learner, reward="true", steps=14, size=1, seed=0, **changed):
    """Train a random policy on LikesLetters; returns the share of letters of each step, and the policy's first and last weights.

    reward: "true"; "shuffled": every dialogue gets the feeling of another; "constant": everybody always feels the same."""
    torch.manual_seed(seed)
    policy, rng = sft.build_model(chat.tokenizer, hidden=32, layers=1), random.Random(seed)
    critic = ppo.Critic(policy) if learner is ppo else None
    optimizers = {"policy": torch.optim.AdamW(policy.parameters(), lr=8e-3, weight_decay=0.0)}
    if critic is not None:
        optimizers["critic"] = torch.optim.AdamW(critic.parameters(), lr=8e-3, weight_decay=0.0)
    cfg, scores, before = settings(minibatches=2, max_grad_norm=1.0, **changed), [], weights(policy)
    for step in range(steps):
        dialogues = [Dialogue(SCENARIO, False, seed_of("learn", seed, step, i), group=i // size, max_turns=2) for i in range(24)]
        rollout(HFEngine(policy, chat.end_ids, 6), chat, dialogues, lambda d: LikesLetters(), "")
        scores.append(sum(d.emotion for d in dialogues) / len(dialogues) / 100)
        felt = [d.emotion for d in dialogues]
        felt = {"true": felt, "shuffled": rng.sample(felt, len(felt)), "constant": [60] * len(felt)}[reward]
        for dialogue, emotion in zip(dialogues, felt):
            dialogue.turns[-1].reaction.emotion = emotion
        metrics = learner.update(policy, critic, optimizers, ppo.make_batch(dialogues, format_reward=False), cfg, rng)
        assert finite(metrics), metrics
    return scores, before, weights(policy)


def gain(scores):
    return (sum(scores[-3:]) - sum(scores[:3])) / 3


@pytest.mark.parametrize("gae, gae_lambda", [("turn", 1.0), ("dialogue", 0.95)])
def test_ppo_learns_what_a_user_likes(byte_chat, gae, gae_lambda):
    scores, *_ = learn(byte_chat, ppo, gae=gae, gae_lambda=gae_lambda)
    assert gain(scores) > 0.25, scores


@pytest.mark.parametrize("reward", ["shuffled", "constant"])
def test_ppo_learns_nothing_from_shuffled_or_constant_feelings(byte_chat, reward):
    scores, *_ = learn(byte_chat, ppo, reward)
    assert abs(gain(scores)) < 0.12, scores


def test_the_same_seeds_train_the_same_weights(byte_chat):
    (first, _, one), (second, _, two) = (learn(byte_chat, ppo, steps=2) for _ in range(2))
    assert first == second and one.equal(two)
