"""GRPO for dialogue: the group's own mean is the baseline, no critic. Statistics are taken per DIALOGUE.

Source: GRPO (arXiv 2402.03300) Eq. 3; RLVER (2507.03112) app. B.3 (n = 4); Dr. GRPO (2503.20783) for `std=False`.
    R_i = mean of dialogue i's turn rewards          A of turn k of dialogue i = (r_k - mean_j R_j) / (std_j R_j + 1e-6)
Differs from the released code: there a group mixes all turns of its dialogues, so long dialogues weigh more (facts 4.7).
Everything else - the clipped loss, the entropy bonus, the metrics - is ppo.py's.
Run: python train.py --algo grpo --think --preset tiny
"""
import itertools

import torch

from ppo import update_policy


def group_advantages(turn_rewards, turns, groups, std=True, totals=None):
    """Advantage of each turn: (K,).

    turn_rewards: (K,) in [0, 1]. turns: turns of each dialogue. groups: the group of each dialogue. totals: (D,) R_i where it
    is not the mean of the r_k (--reward delta: turn_rewards are then rewards to go).
    std uses n - 1, as the released code does. A dialogue alone in its group has nothing to compare with: advantage 0. So has
    a group of equal rewards. Where malformed turns spread the r_k within dialogues wider than the dialogues differ, that
    spread (root mean square over dialogues) is the scale: a malformed turn is pushed down, never by hundreds.
    Returns advantages and the share of groups whose dialogues all earned the same.
    """
    ends = list(itertools.accumulate(turns))
    parts = [turn_rewards[end - n:end].double() for end, n in zip(ends, turns)]
    advantages, equal = [torch.zeros_like(part) for part in parts], 0
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        own = torch.stack([parts[i].mean() if totals is None else totals[i].double() for i in members])      # (n,) R_i
        within = torch.stack([parts[i].var(correction=0) for i in members]).mean().sqrt() if totals is None else torch.zeros(())
        spread = own.std() if len(members) > 1 else torch.zeros(())
        equal += bool(spread < 1e-6)
        if len(members) < 2 or max(spread, within) < 1e-6:
            continue
        for i in members:
            advantages[i] = (parts[i] - own.mean()) / (max(spread, within) + 1e-6 if std else 1.0)
    return torch.cat(advantages).float(), equal / len(set(groups))


def estimate(critic, batch, cfg):
    """Advantages as they enter the policy's loss, (N,); no values, no returns; and metrics."""
    if not batch.dialogues:
        raise ValueError("nothing to learn from: every dialogue of the step failed")
    groups, rewards = [dialogue.group for dialogue in batch.dialogues], batch.turn_rewards
    totals = None
    if cfg.reward == "delta":                       # a turn is credited with what follows it; a constant baseline keeps that unbiased
        per_dialogue = rewards.split(batch.turns)
        totals = torch.stack([part.sum() for part in per_dialogue])
        rewards = torch.cat([part.flip(0).cumsum(0).flip(0) for part in per_dialogue])
    advantages, frac_equal = group_advantages(rewards, batch.turns, groups, cfg.std, totals)
    return batch.per_token(advantages), None, None, {"frac_zero_std_groups": frac_equal, "advantage_std": advantages.std(correction=0).item()}


def update(policy, critic, optimizers, batch, cfg, rng, ref_policy=None, train_policy=True):
    """One GRPO step on one rollout; the same signature as ppo.update (there is no critic: None)."""
    advantages, _, _, metrics = estimate(critic, batch, cfg)
    metrics.update(update_policy(policy, optimizers["policy"], batch, advantages, cfg, rng, ref_policy))
    return metrics
