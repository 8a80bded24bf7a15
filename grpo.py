"""GRPO for dialogue: the group's own mean is the baseline, no critic. Statistics are taken per DIALOGUE.

Source: GRPO (arXiv 2402.03300) Eq. 3; RLVER (2507.03112) app. B.3 (n = 4); Dr. GRPO (2503.20783) for `std=False`.
    R_i = mean of dialogue i's turn rewards          A of turn k of dialogue i = (r_k - mean_j R_j) / (max(std_j R_j, within) + 1e-6)
    within = how far the r_k spread inside dialogues (malformed turns earn 0): 0 where every turn is well-formed
Differs from the paper or its released code in:
  1) statistics are per dialogue; there, with thinking, a group mixes all turns, so long dialogues weigh more;
  2) a dialogue that is alone in its group gets advantage 0; there it gets its raw score.
Everything else - the clipped loss, the entropy bonus, the metrics - is ppo.py's.
Run: python train.py --algo grpo --think --preset tiny
"""
import itertools
import math

import torch

from ppo import update_policy


def group_advantages(turn_rewards, turns, groups, std=True):
    """Advantage of each turn: (K,).

    turn_rewards: (K,) in [0, 1]. turns: turns of each dialogue. groups: the group of each dialogue.
    std uses n - 1, as the released code does. A dialogue alone in its group has nothing to compare with: advantage 0. So has
    a group of equal rewards. Where malformed turns spread the r_k within dialogues wider than the dialogues differ, that
    spread (root mean square over dialogues) is the scale: a malformed turn is pushed down, never by hundreds.
    Returns advantages and the share of groups that teach nothing: all their advantages are 0.
    """
    ends = list(itertools.accumulate(turns))
    parts = [turn_rewards[end - n:end].double() for end, n in zip(ends, turns)]
    advantages, silent = [torch.zeros_like(part) for part in parts], 0
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        own = torch.stack([parts[i].mean() for i in members])                                      # (n,) R_i
        within = torch.stack([parts[i].var(correction=0) for i in members]).mean().sqrt()
        spread = own.std() if len(members) > 1 else torch.zeros(())
        if len(members) < 2 or max(spread, within) < 1e-6:
            silent += 1
            continue
        for i in members:
            advantages[i] = (parts[i] - own.mean()) / (max(spread, within) + 1e-6 if std else 1.0)
    return torch.cat(advantages).float(), silent / len(set(groups))


def delta_advantages(turn_rewards, turns, groups, std=True):
    """The same for --reward delta: a turn is credited with what it changed and what followed, G_k = r_k + r_{k+1} + ...

        A of turn k of dialogue i = (G_k,i - mean_j G_k,j) / (scale + 1e-6)

    mean_j: over the dialogues of the group that have a turn k. G shrinks from turn to turn whatever is said, so against one
    baseline for all turns every late turn would look bad. A turn k that one dialogue alone has is compared with nothing: 0.
    scale: root mean square of G_k,i - mean_j G_k,j over the group's compared turns; 1 without std.
    Case: two dialogues earn [.6, .3] and [.3]: G = [.9, .3] and [.3]; turn 1 differs from its mean by +-.3, so A = [1, 0] and [-1].
    """
    to_go = [part.double().flip(0).cumsum(0).flip(0) for part in turn_rewards.split(turns)]
    advantages, silent = [torch.zeros_like(part) for part in to_go], 0
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        table = torch.nn.utils.rnn.pad_sequence([to_go[i] for i in members], True, math.nan)               # (n, turns of the longest)
        compared = table.isfinite() & (table.isfinite().sum(0) > 1)
        centred = torch.where(compared, table - table.nanmean(0), 0.0)
        scale = (centred.square().sum() / compared.sum().clamp(min=1)).sqrt()
        if scale < 1e-6:
            silent += 1
            continue
        for i, row in zip(members, centred):
            advantages[i] = row[:turns[i]] / (scale + 1e-6 if std else 1.0)
    return torch.cat(advantages).float(), silent / len(set(groups))


def estimate(critic, batch, cfg):
    """Advantages as they enter the policy's loss, (N,); no values, no returns; and metrics."""
    if not batch.dialogues:
        raise ValueError("nothing to learn from: every dialogue of the step failed")
    per_turn = delta_advantages if cfg.reward == "delta" else group_advantages
    advantages, silent = per_turn(batch.turn_rewards, batch.turns, [dialogue.group for dialogue in batch.dialogues], cfg.std)
    return batch.per_token(advantages), None, None, {"frac_zero_std_groups": silent, "advantage_std": advantages.std(correction=0).item()}


def update(policy, critic, optimizers, batch, cfg, rng, ref_policy=None, train_policy=True):
    """One GRPO step on one rollout; the same signature as ppo.update (there is no critic: None)."""
    advantages, _, _, metrics = estimate(critic, batch, cfg)
    metrics.update(update_policy(policy, optimizers["policy"], batch, advantages, cfg, rng, ref_policy))
    return metrics
