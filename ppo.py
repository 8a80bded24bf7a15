"""PPO for dialogue: clipped policy update and a learned critic, on the user's final emotion.

Source: RLVER (arXiv 2507.03112) sec. 2-3, app. B.3; PPO (1707.06347) Eq. 7, 11-12; released code core_algos.py.
    L = -E_t[ min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t) ] - ent_coef H + kl_coef KL(policy || ref)
        - imitation_coef E_t[ R log pi_t ]
Differs from the paper or its released code in:
  1) a malformed turn gets reward 0, as paper 2.3 says; the released code has no such check;
  2) losses are normalised by the agent tokens of the whole minibatch, so its split into micro-batches changes nothing;
  3) the critic can read one value per turn, at its header (values="turn"; the embedded preset), instead of one per token;
  4) the critic starts as V = 0.3 everywhere, the reward of a dialogue that leaves its user at the starting 30 points (theirs: with
     the head of whatever model its user names);
  5) one optimizer step a rollout by default; theirs makes about 8 with thinking, because its minibatch of 32 counts turns there.
Shapes: N agent tokens of the step, n of a micro-batch, B rows of T tokens, V vocabulary, K turns.
Run: python train.py --algo ppo --think --preset tiny
"""
import copy
import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from rollout import Dialogue, Turn, microbatches

# ---- what a rollout becomes: flat tensors over agent tokens -------------------------------------------------------------

@dataclass
class Batch:
    """Dialogue after dialogue, turn after turn, token after token; no padding, so no mask can be wrong."""
    dialogues: list                 # D dialogues, failed ones left out
    turn_lengths: list              # K ints: agent tokens of each turn
    turns: list                     # D ints: turns of each dialogue
    turn_rewards: torch.Tensor      # (K,) in [0, 1]
    old_logprobs: torch.Tensor      # (N,) by the engine that sampled
    tokens: list                    # D ints: agent tokens of each dialogue

    @property
    def starts(self):
        """Where each dialogue's agent tokens begin in the flat order."""
        return begins(self.tokens)

    def per_token(self, per_turn):
        """(K,) -> (N,): a turn's value at each of its tokens."""
        return torch.repeat_interleave(per_turn, torch.tensor(self.turn_lengths))

    def at_last_token(self, per_turn):
        """(K,) -> (N,): a turn's value on its last token, 0 elsewhere."""
        flat = torch.zeros(sum(self.turn_lengths))
        flat[torch.tensor(self.turn_lengths).cumsum(0) - 1] = per_turn
        return flat


def begins(lengths):
    """Where each of consecutive stretches begins: [2, 3, 1] -> [0, 2, 5]."""
    return [0, *itertools.accumulate(lengths)][:-1]


def turn_rewards(dialogue, format_reward=True):
    """r_k of each turn: the dialogue's outcome R = final emotion / 100 (paper 2.1), or 0 where the format broke (2.3)."""
    return [0.0 if format_reward and not turn.format_ok else dialogue.emotion / 100 for turn in dialogue.turns]


def turn_deltas(dialogue, format_reward=True):
    """r_k of each turn as what it changed: (e_k - e_{k-1}) / 100, the first one from 0, so that they sum to R (paper 2.1's e_t).
    A malformed turn earns nothing, but it still pays for what it broke."""
    emotions = [0, *(turn.reaction.emotion for turn in dialogue.turns)]
    deltas = [(after - before) / 100 for before, after in zip(emotions, emotions[1:])]
    return [min(0.0, r) if format_reward and not turn.format_ok else r for r, turn in zip(deltas, dialogue.turns)]


REWARDS = {"final": turn_rewards, "delta": turn_deltas}            # by --reward


def make_batch(dialogues, format_reward=True, reward="final"):
    """Flatten played dialogues. Dialogues whose simulator failed hold no reward and are left out."""
    dialogues = [d for d in dialogues if not d.failed]
    turns = [turn for d in dialogues for turn in d.turns]
    tokens = [sum(len(turn.ids) for turn in d.turns) for d in dialogues]
    return Batch(dialogues, [len(turn.ids) for turn in turns], [len(d.turns) for d in dialogues],
                 torch.tensor([r for d in dialogues for r in REWARDS[reward](d, format_reward)]),
                 torch.tensor([logprob for turn in turns for logprob in turn.logprobs]),
                 tokens)


# ---- the equations -----------------------------------------------------------------------------------------------------

def compute_gae(rewards, values, lengths, gamma=1.0, gae_lambda=1.0):
    """Advantage of each agent token (GAE; PPO paper Eq. 11-12).

        delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lambda A_{t+1}

    rewards, values: (N,), agent tokens only, in order. lengths: agent tokens of each segment; they sum to N. A segment is a
    turn or a whole dialogue; t+1 is the NEXT AGENT TOKEN of the segment (the user's tokens in between neither cost nor
    earn) and V is 0 after its last one.
    Returns advantages, returns = advantages + values: (N,), not whitened.
    With gamma = lambda = 1 and one final reward R: A_t = R - V_t at every token.
    """
    r, v = rewards.double().tolist(), values.double().tolist()
    advantages, end = [0.0] * len(r), 0
    for length in lengths:
        end += length
        following = next_value = 0.0
        for t in reversed(range(end - length, end)):
            delta = r[t] + gamma * next_value - v[t]
            following = advantages[t] = delta + gamma * gae_lambda * following
            next_value = v[t]
    advantages = torch.tensor(advantages, dtype=values.dtype)
    return advantages, advantages + values


def whiten(x):
    """Mean 0, variance 1 over all agent tokens (released code: masked_whiten). Fewer than two tokens stay as they are."""
    return (x - x.mean()) * torch.rsqrt(x.var() + 1e-8) if x.numel() > 1 else x


def policy_loss(logprobs, old_logprobs, advantages, clip_eps, clip_high=0.0):
    """Per-token loss (n,) and whether the clip was active (n,). PPO Eq. 7; clipping acts on each token's own ratio.
    clip_high: how far the ratio may rise, when not clip_eps (DAPO, arXiv 2503.14476)."""
    logratio = (logprobs - old_logprobs).clamp(-20, 20)          # exp never overflows; far outside the clip anyway
    ratio = logratio.exp()
    surr_unclipped = ratio * advantages
    surr_clipped = ratio.clamp(1 - clip_eps, 1 + (clip_high or clip_eps)) * advantages
    return -torch.min(surr_unclipped, surr_clipped), surr_clipped < surr_unclipped


def importance_weights(logprobs, engine_logprobs, cap):
    """min(pi_learner / pi_engine, cap) per token: the two share weights but not kernels (truncated importance sampling,
    https://fengyao.notion.site/off-policy-rl). A token's own ratio, so a long reply cannot blow up."""
    return (logprobs - engine_logprobs).clamp(-20, 20).exp().clamp(max=cap)


def value_loss(values, old_values, returns, value_clip):
    """Per-element 0.5 max((V - R)^2, (V_clipped - R)^2), V_clipped within value_clip of the old value (core_algos.py)."""
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


def kl_k1(logprobs, ref_logprobs):
    """Unbiased estimate of KL(policy || ref) per token, of either sign; kl_k3's source."""
    return logprobs - ref_logprobs


def kl_k3(logprobs, ref_logprobs):
    """Unbiased, non-negative estimate of KL(policy || ref) per token, http://joschu.net/blog/kl-approx.html"""
    logratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return (logratio.exp() - logratio - 1).clamp(min=0)          # rounding can go a hair below 0


# ---- many ranks: each knows every dialogue of the step and computes the gradients of its share of the micro-batches ---------

def ranks():
    """(rank, world size); (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def over_ranks(tensor, op="sum"):
    """The tensor's sum (or maximum) over all ranks, in place."""
    if ranks()[1] > 1:                             # vLLM opens a group of one for itself
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return tensor


# ---- models over packed rows --------------------------------------------------------------------------------------------

def compute_dtype(model):
    """Inside it matrix products run in bfloat16 when model.in_bfloat16 is set; weights, gradients and Adam stay in float32, so an
    update at lr 1e-6 is never lost to rounding."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=getattr(model, "in_bfloat16", False))


def hidden_states(model, micro):
    """(n, H): the decoder's output at the positions `micro.before`."""
    decoder = getattr(model, model.base_model_prefix)
    how = {"branches": micro.branches} if model.config._attn_implementation == "branches" else {}        # see check_model
    hidden = decoder(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=micro.mask, use_cache=False, **how)[0]
    return hidden[micro.before]                                   # (B, T, H) -> (n, H): only agent tokens need logits


def token_logprobs(model, micro, temperature=1.0, entropy_grad=True, chunk=None):
    """Log-prob and entropy of each agent token under `model` at the sampling temperature: (n,), (n,).

    The head runs on agent tokens only, in chunks (default: of 2^25 logits, 128 MiB) that are computed again in the backward
    pass: memory does not grow with vocabulary x length. entropy_grad=False: the entropy is a number only.
    """
    if hasattr(model, "whole"):                    # sharded (train.shard): its weights are whole only inside model.whole()
        return model.whole(_token_logprobs, model, micro, temperature, entropy_grad, chunk)
    return _token_logprobs(model, micro, temperature, entropy_grad, chunk)


def _token_logprobs(model, micro, temperature, entropy_grad, chunk):
    head, chunk = model.get_output_embeddings(), chunk or max(1, 2 ** 25 // model.config.get_text_config().vocab_size)

    def score(hidden, actions):
        logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)        # (chunk, V)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs.clamp(min=-100)).sum(-1)              # a logit of -inf adds 0, not 0 x inf = NaN
        return logprobs.gather(1, actions[:, None])[:, 0], entropy

    with compute_dtype(model):
        hidden = hidden_states(model, micro)
        parts = [checkpoint(score, h, a, use_reentrant=False) if len(hidden) > chunk else score(h, a)
                 for h, a in zip(hidden.split(chunk), micro.actions.split(chunk))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class Critic(torch.nn.Module):
    """V(s): the policy's decoder, copied, with a linear head. values="token": before each agent token. values="turn":
    once per turn, where the header ends; it then reads the trunk alone and never pays for the thoughts."""

    def __init__(self, policy, values="token"):
        super().__init__()
        self.model, self.values = copy.deepcopy(policy), values
        self.model.set_output_embeddings(torch.nn.Linear(policy.config.hidden_size, 1, device=policy.device))
        torch.nn.init.zeros_(self.model.get_output_embeddings().weight)
        torch.nn.init.constant_(self.model.get_output_embeddings().bias, 0.3)            # 30 points, where a dialogue starts

    def forward(self, micro):
        with compute_dtype(self.model):
            hidden = hidden_states(self.model, micro)
        return self.model.get_output_embeddings()(hidden.float()).sum(-1)                # (n, 1) -> (n,)


def predict_values(critic, batch, tokens_per_batch):
    """(N,) values of all agent tokens, no gradient."""
    branches = critic.values == "token"
    values = torch.zeros(len(batch.old_logprobs) if branches else len(batch.turn_lengths))
    starts = batch.starts if branches else begins(batch.turns)
    with torch.no_grad():
        for micro in microbatches(batch.dialogues, starts, tokens_per_batch, branches, critic.model.device, *ranks()):
            values[micro.index] += micro.weight * critic(micro).cpu()
    over_ranks(values)
    return values if branches else batch.per_token(values)


def check_model(model, think):
    """Raise ValueError for a model that the learner would score otherwise than it speaks: one that does more to its logits than
    its head does, or (think) reads a packed row otherwise than the turns one by one, as one without 4-D masks does. On a CPU the
    model then takes branch_attention() where it can."""
    name, decoder, think_row = type(model).__name__, getattr(model, model.base_model_prefix), Dialogue(None, True, 0)
    think_row.trunk = [(7 * i) % 50 + 3 for i in range(10)]
    think_row.turns = [Turn(prompt_len, [60 - i for i in range(length)], [], "stop", "", "", True)
                       for prompt_len, length in ((4, 3), (6, 5), (10, 2))]
    micro, = microbatches([think_row], [0], 10 ** 9, device=model.device)
    close = lambda a, b: torch.allclose(a, b, rtol=0.01, atol=0.01 * b.abs().max().item())
    with torch.no_grad():
        flat = torch.tensor([think_row.trunk + think_row.turns[-1].ids], device=model.device)
        alone = decoder(input_ids=flat, use_cache=False)[0]
        if not close(model.get_output_embeddings()(alone), model(input_ids=flat, use_cache=False).logits):
            raise ValueError(f"{name} scales or caps its logits after the head, which the learner does not: use another model")
        if not think:
            return
        same = False
        for attention in ("sdpa",) if torch.cuda.is_available() else ("branches", "sdpa"):
            try:
                model.set_attn_implementation(attention)
                if same := close(hidden_states(model, micro)[-2:], alone[0, -3:-1]):
                    break
            except (RuntimeError, TypeError, ValueError):
                pass
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or math.inf              # a 4-D mask replaces it, so packed rows would see further
    if not same or window < config.max_position_embeddings:
        raise ValueError(f"{name} does not read packed thoughts ({'sliding window' if same else 'no 4-D attention masks'}): "
                         "use another model, or --no-think")


# ---- the update ---------------------------------------------------------------------------------------------------------

def estimate(critic, batch, cfg):
    """Advantages as they enter the policy's loss, values and returns, each (N,), and metrics."""
    if not batch.dialogues:
        raise ValueError("nothing to learn from: every dialogue of the step failed")
    values = predict_values(critic, batch, cfg.tokens_per_batch)
    rewards = batch.at_last_token(batch.turn_rewards)
    if cfg.gae == "turn":                                          # the paper: each turn is a segment that earns R
        lengths = batch.turn_lengths
    else:
        lengths = batch.tokens
        if cfg.reward == "final":                                  # one stream: the last turn's r once, on the dialogue's last token
            last = torch.tensor(lengths).cumsum(0) - 1
            rewards = torch.zeros_like(rewards).index_copy(0, last, rewards[last])
    advantages, returns = compute_gae(rewards, values, lengths, cfg.gamma, cfg.gae_lambda)
    return whiten(advantages), values, returns, {
        "value_mean": values.mean().item(), "advantage_std": advantages.std(correction=0).item(),
        "explained_var": (1 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)).item()}


def update(policy, critic, optimizers, batch, cfg, rng, ref_policy=None, train_policy=True):
    """One PPO step on one rollout. Returns metrics averaged over agent tokens."""
    advantages, values, returns, metrics = estimate(critic, batch, cfg)
    if train_policy:                                               # first: where engine and learner differ, nothing is updated
        metrics.update(update_policy(policy, optimizers["policy"], batch, advantages, cfg, rng, ref_policy))
    else:
        metrics.update(check_engine(rescore(policy, batch, cfg) - batch.old_logprobs, cfg))
    metrics.update(update_critic(critic, optimizers["critic"], batch, values, returns, cfg, rng))
    return metrics


def update_critic(critic, optimizer, batch, old_values, returns, cfg, rng):
    branches, starts, device = critic.values == "token", batch.starts, critic.model.device
    if not branches:                                               # one target per turn: the return at its first token
        starts, first = begins(batch.turns), torch.tensor(begins(batch.turn_lengths))
        old_values, returns = old_values[first], returns[first]
    total, norms, (rank, world) = torch.zeros(1), [], ranks()
    critic.train()
    for members, size in minibatches(batch, cfg, rng, batch.tokens if branches else batch.turns):
        for micro in microbatches([batch.dialogues[i] for i in members], [starts[i] for i in members], cfg.tokens_per_batch, branches,
                                  device, rank, world):
            loss = value_loss(critic(micro), old_values[micro.index].to(device), returns[micro.index].to(device), cfg.value_clip)
            name_nan({"value loss": loss}, micro, batch, starts)
            loss = loss.sum() * micro.weight
            (loss * world / size).backward()                       # FSDP averages the ranks' gradients; we want their sum
            total += loss.item()
        norms.append(apply_gradients(critic, optimizer, cfg))
    return {"v_loss": over_ranks(total).item() / (len(returns) * cfg.epochs), "critic_grad_norm": sum(norms) / len(norms)}


def apply_gradients(model, optimizer, cfg):
    """Clip, step, forget. Returns the gradient norm. A NaN or inf never reaches the weights: that minibatch is skipped, and the
    third in a row raises ValueError (all ranks see one norm, so all agree)."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
    norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    if math.isfinite(norm):
        optimizer.step()
        optimizer.skipped = 0
    else:
        optimizer.skipped = getattr(optimizer, "skipped", 0) + 1
        name = next((n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()), "their norm")
        print(f"warning: gradient norm {norm} (first in {name}), minibatch {optimizer.skipped} in a row skipped", file=sys.stderr)
        if optimizer.skipped == 3:
            optimizer.zero_grad()
            raise ValueError(f"three minibatches in a row gave no finite gradient (first in {name}); no weight was touched by them: "
                             "lower --lr, then go on from the last checkpoint with --resume")
    optimizer.zero_grad()
    return norm


def name_nan(tensors, micro, batch, starts):
    """Say which tensor first holds a NaN or inf, and in whose dialogue. The gradient norm then stops the minibatch."""
    for name, tensor in tensors.items():
        bad = (~tensor.detach().isfinite()).nonzero()
        if len(bad):
            at = micro.index[bad[0, 0].item()].item()
            scenario = batch.dialogues[max(i for i, start in enumerate(starts) if start <= at)].scenario.id
            print(f"warning: {name} is {tensor[bad[0, 0]].item()} in the dialogue of {scenario}", file=sys.stderr)
            return


def minibatches(batch, cfg, rng, sizes):
    """cfg.epochs x cfg.minibatches groups of dialogue indices, each with the sum of its dialogues' sizes (tokens, turns, or 1s)."""
    for _ in range(cfg.epochs):
        order = rng.sample(range(len(batch.dialogues)), len(batch.dialogues))
        for part in range(min(cfg.minibatches, len(order))):
            members = sorted(order[part::cfg.minibatches])
            yield members, sum(sizes[i] for i in members)


def update_policy(policy, optimizer, batch, advantages, cfg, rng, ref_policy=None):
    """The clipped policy update that PPO and GRPO share. advantages: (N,), as they enter the loss."""
    sums, gaps, ratio_max, norms, (rank, world) = Counter(), [torch.zeros(0)], torch.zeros(1), [], ranks()
    sizes, lengths = [1] * len(batch.tokens) if cfg.loss_norm == "dialogue" else batch.tokens, torch.tensor(batch.tokens)
    share = torch.repeat_interleave(torch.tensor(sizes) / lengths, lengths)            # (N,) weight of a token in the loss
    rewards = batch.per_token(batch.turn_rewards)
    all_old_logprobs = rescore(policy, batch, cfg) if cfg.tis_cap else batch.old_logprobs
    policy.train()
    optimizer.zero_grad()
    for number, (members, size) in enumerate(minibatches(batch, cfg, rng, sizes)):
        for micro in microbatches([batch.dialogues[i] for i in members], [batch.starts[i] for i in members], cfg.tokens_per_batch,
                                  device=policy.device, rank=rank, world=world):
            logprobs, entropy = token_logprobs(policy, micro, cfg.temperature, entropy_grad=cfg.ent_coef > 0)
            engine_logprobs, old_logprobs, adv, reward, weight = (
                x[micro.index].to(logprobs.device) for x in (batch.old_logprobs, all_old_logprobs, advantages, rewards, share))
            pg_loss, clipped = policy_loss(logprobs, old_logprobs, adv, cfg.clip_eps, cfg.clip_high)
            tis = importance_weights(old_logprobs, engine_logprobs, cfg.tis_cap or math.inf)     # all 1 where they are the same numbers
            pg_loss = pg_loss * tis
            loss = pg_loss - cfg.ent_coef * entropy - cfg.imitation_coef * reward * logprobs
            ref_logprobs = logprobs.detach()
            if ref_policy is not None:
                with torch.no_grad():
                    ref_logprobs, _ = token_logprobs(ref_policy, micro, cfg.temperature)
                # k2 is the estimator whose gradient is that of KL(policy || ref); the unbiased k3 is what we report
                loss = loss + cfg.kl_coef * 0.5 * (logprobs - ref_logprobs) ** 2
            name_nan({"logprobs": logprobs, "advantages": adv, "entropy": entropy, "loss": loss}, micro, batch, batch.starts)
            ((loss * weight).sum() * micro.weight * world / size).backward()   # FSDP averages the ranks' gradients; we want their sum
            with torch.no_grad():
                if number == 0 and micro.weight:                   # before the first step engine and learner hold the same weights
                    gaps.append((logprobs - engine_logprobs).cpu())
                ratio_max = torch.max(ratio_max, (logprobs - old_logprobs).clamp(max=20).exp().max().cpu())
                for name, per_token in {"tokens": torch.ones_like(logprobs), "pg_loss": pg_loss, "entropy": entropy, "clipfrac": clipped,
                                        "approx_kl": kl_k3(old_logprobs, logprobs), "approx_kl_k1": kl_k1(old_logprobs, logprobs),
                                        "ref_kl": kl_k3(logprobs, ref_logprobs), "tis_capped": tis >= (cfg.tis_cap or math.inf)}.items():
                    sums[name] += per_token.sum().item() * micro.weight
        if number == 0:
            metrics = check_engine(torch.cat(gaps), cfg)
        norms.append(apply_gradients(policy, optimizer, cfg))
    total = dict(zip(sums, over_ranks(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()))
    tokens = total.pop("tokens")
    return {**{name: value / tokens for name, value in total.items()}, **metrics, "ratio_max": over_ranks(ratio_max, "max").item(),
            "grad_norm": sum(norms) / len(norms)}


def check_engine(gap, cfg):
    """How far engine and learner differ before the step's first update. gap: (n,) log-prob by the learner minus the engine's.
    Returns mean and largest difference and the k3 KL. ValueError above --max-mismatch: then the replies are not this policy's."""
    gap = gap.double()
    absolute, kl, tokens = over_ranks(torch.stack([gap.abs().sum(), kl_k3(torch.zeros_like(gap), gap).sum(), torch.tensor(float(len(gap)))])).tolist()
    if not absolute / tokens <= cfg.max_mismatch:                  # NaN is a mismatch too
        raise ValueError(f"engine and learner differ by {absolute / tokens:.3g} nats a token (--max-mismatch {cfg.max_mismatch}): "
                         "the engine does not sample from the weights that are trained; no update was made")
    return {"mismatch": absolute / tokens, "mismatch_kl": kl / tokens,
            "mismatch_max": over_ranks(torch.cat([gap.abs(), torch.zeros(1)]).max(), "max").item()}


def rescore(policy, batch, cfg):
    """(N,) the sampled tokens' log-probs under the learner's own weights and kernels, no gradient."""
    logprobs, (rank, world) = torch.zeros_like(batch.old_logprobs), ranks()
    with torch.no_grad():
        for micro in microbatches(batch.dialogues, batch.starts, cfg.tokens_per_batch, device=policy.device, rank=rank, world=world):
            logprobs[micro.index] += micro.weight * token_logprobs(policy, micro, cfg.temperature)[0].cpu()
    return over_ranks(logprobs)
