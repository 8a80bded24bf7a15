"""Supervised warm start: builds the embedded tiny policy, or warm-starts any causal LM from good transcripts.

The paper starts RL from Qwen2.5-7B-Instruct, an assistant that answers feelings with solutions. The embedded policy is our
stand-in for it: a 1M-parameter Qwen2 that first learns the language of prompts/en (what the hints mean, how a reply of each
kind is worded, to name the thing just told) and then, in the last quarter, the assistant habit: whatever is needed, it mostly
plans advice. Its evidence and its reading of the need stay right; only the step from need to plan is left for RL to repair.
Loss: cross-entropy on the agent's tokens (words copied from the user weigh more), and a little on the user's.
Run: python sft.py                                   # builds runs/tiny-sft/think and /plain, about 100 s each on 2 cores
     python sft.py --model M --data transcripts.jsonl --min-emotion 70 --out DIR         # any causal LM
"""
import argparse
import json
import random
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollout import ChatTokens, Dialogue, Turn, _microbatch, row_of, system_prompt
from simulator import (FOCUS, INTENTIONS, PROMPTS, STANCE, ScriptedSimulator, Scenario, hints_in, infer_need, lines, load_scenarios,
                       nouns, stock_reply, things_in)

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
PLANS = {"praise": "praise", "empathy": "comfort", "listening": "listen", "support": "agree", "advice": "advise",
         "analysis": "weigh", "motives": "explain", "reflection": "guide"}


# ---- the embedded model ------------------------------------------------------------------------------------------------

def build_tokenizer(corpus, vocab_size=1600):
    """Byte-level BPE in which every common noun, hint and plan is one token, with the ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML)


def corpus_texts(scenarios):
    """Everything the tokenizer is trained on: prompts, stock lines, common nouns and the TRAINING scenarios' details."""
    def strings(node):
        return [node] if isinstance(node, str) else [s for child in (node.values() if isinstance(node, dict) else node) for s in strings(child)]
    user = {name: part for name, part in lines("user").items() if name not in ("cues", "thoughts")}
    texts = ["system", "user", "assistant", system_prompt(True), system_prompt(False)] * 20 + [pad + text for text in strings(user) + strings(lines("replies")) for pad in ("", " ")] * 10
    texts += [f" the {noun}. My {noun}" for noun in sorted(nouns())] * 20
    texts += [f"I hear {word} and nothing. They need {need}. I will {plan}." for need, plan in PLANS.items()
              for group in lines("user")["hints"].values() for word, _ in group]
    return texts + [line for s in scenarios for _, line in s.script["details"]]


def build_model(tokenizer, hidden=128, layers=2):
    """A small Qwen2 whose attention starts out copying: in every layer W_O W_V = the identity on a random subspace, and token
    embeddings are large enough to be told apart (mimetic initialisation, arXiv 2305.09828). From the usual start, naming what
    the user just said is not learned in 350 steps; from this one it takes 100 (measured, seed 0)."""
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=3 * hidden, tie_word_embeddings=True, max_position_embeddings=2048, initializer_range=0.05,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.1)
        for layer in model.model.layers:
            attention = layer.self_attn
            basis, _ = torch.linalg.qr(torch.randn(hidden, attention.v_proj.out_features))       # (H, kv heads * head dim)
            groups = attention.num_key_value_groups
            attention.v_proj.weight.copy_(basis.T)
            attention.o_proj.weight.copy_(torch.cat([head for head in basis.split(attention.head_dim, 1) for _ in range(groups)], 1) / groups)
    return model


# ---- demonstrations ----------------------------------------------------------------------------------------------------

def synthetic_scenario(rng, intention):
    """An event made of random common nouns, so that naming what was just told is learned as a skill, not as a list."""
    details = [[w, line.format(w=w)] for w, line in zip(rng.sample(sorted(nouns()), 9), rng.sample(lines("replies")["tellings"], 9))]
    return Scenario("synthetic", "synthetic", "", "", "", (), intention, "", {"details": details})


def thought_of(texts, need, plan):
    """The demonstrated thought: the evidence (last focus hint, last stance hint), the need, the plan."""
    heard = {kind: keyword for text in texts for kind, _, keyword in hints_in(text)}
    evidence = "it clearly" if "clear" in heard else f"{heard.get('focus', 'nothing')} and {heard.get('stance', 'nothing')}"
    return f"I hear {evidence}. They need {need}. I will {PLANS[plan]}."


def demonstrate(chat, scenario, think, rng, turns, habit, specific, both_hints=False, difficulty="challenging"):
    """One dialogue in which a tutor talks with the scripted user. Returns (Dialogue, per turn ids that weigh more).

    habit: chance that the plan ignores the need, as an assistant would (mostly advice, else any act).
    """
    user = ScriptedSimulator(scenario, difficulty, 50, 99, rng.random())
    system, message = system_prompt(think), user.opening()
    if both_hints:                                                 # one message with both hints: the need at a glance
        extra = rng.choice(lines("user")["hints"][STANCE[scenario.intention]])[1]
        message += " " + extra
        user.user_texts[-1] = message
    dialogue = Dialogue(scenario, think, 0, opening=message, trunk=chat.first(system, message))
    texts, change, core, heavy = [message], None, "", []
    for turn in range(turns):
        need = infer_need(user.user_texts, rng)
        plan = need if rng.random() >= habit else rng.choices(["advice", rng.choice(list(INTENTIONS))], [2, 1])[0]
        thing = things_in(message)[-1] if things_in(message) and rng.random() < specific else ""
        reply, core = stock_reply(plan, thing, rng, change, core)
        thought = thought_of(user.user_texts, need, plan)
        text = f"<think>{thought}</think>{reply}" if think else reply
        ids = chat.encode(text) + [chat.end_ids[-1]]
        slots = {i for word in [thing, need, PLANS[plan], *thought.split(". ")[0].split()[2:]] if word for i in chat.encode(" " + word)[:1]}
        dialogue.turns.append(Turn(len(dialogue.trunk), ids, [0.0] * len(ids), "stop", thought if think else None, reply, True))
        heavy.append(slots)
        if turn + 1 < turns:
            user.emotion = rng.randint(20, 89)                     # every mood is heard, no dialogue ends early
            reaction = user.hear(reply)
            message, change = reaction.message, reaction.change
            texts += [reply, message]
            dialogue.trunk += chat.after(system, texts, None if think else ids)
    return dialogue, heavy


def weights_of(chat, dialogue, heavy, slot_weight, user_weight):
    """One weight per token of the row: agent tokens 1 (slots more), the user's words `user_weight`, all else 0.

    The trunk's copy of a thoughtful reply weighs 0: its parent is the bare header, so any weight would teach "skip the thought".
    """
    ids, positions, branch, action = row_of(dialogue)
    copied, system = set(), len(chat.encode(chat.render([{"role": "system", "content": ""}])))
    if dialogue.think:
        for turn in dialogue.turns:
            copied.update(range(turn.prompt_len, turn.prompt_len + len(chat.encode(turn.reply)) + 2))
    slots = {k: heavy[k - 1] if heavy else () for k in range(1, len(dialogue.turns) + 1)}
    weights, turn = [], 0
    for token, position, part, acted, before in zip(ids, positions, branch, action, [0] + action):
        turn += acted and not before
        weights.append(slot_weight if acted and token in slots[turn] else 1.0 if acted
                       else 0.0 if position < system or position in copied else user_weight)
    return weights


def sft_loss(model, dialogues, weights):
    """Weighted cross-entropy over rows (B, T): the token at column t is predicted at column t - 1."""
    micro = _microbatch(dialogues, [row_of(d) for d in dialogues], [0] * len(dialogues), True)
    width = micro.input_ids.shape[1]
    w = torch.tensor([row + [0.0] * (width - len(row)) for row in weights])           # (B, T)
    row, column = w[:, 1:].nonzero(as_tuple=True)                                     # the head runs where a weight stands
    decoder = getattr(model, model.base_model_prefix)
    hidden = decoder(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=micro.mask, use_cache=False)[0]
    logits = model.get_output_embeddings()(hidden[row, column]).float()               # (n, V)
    targets, w = micro.input_ids[row, column + 1], w[row, column + 1]
    nll = F.cross_entropy(logits, targets, reduction="none")
    return (nll * w).sum() / w.sum(), nll.detach(), w


def build_tiny(think, out, seed=0, steps=(170, 240), lr=3e-3, threads=None):
    """Train the embedded policy of one mode and save it in Hugging Face format. Deterministic for a seed."""
    torch.manual_seed(seed)
    rng = random.Random(f"sft/{seed}/{think}")
    scenarios = load_scenarios(PROMPTS / "en" / "train.jsonl")
    tokenizer = build_tokenizer(corpus_texts(scenarios))
    chat, model = ChatTokens(tokenizer), build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    total = sum(steps)
    # linear warm-up, then linear decay over the last 60 %
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 20, max(0.02, (1 - s / total) / 0.6)))
    bar = tqdm(range(total), desc=f"warm start ({'think' if think else 'plain'})", disable=None)
    for step in bar:
        single, knowing = step < steps[0], step < 0.75 * total
        batch = []
        for _ in range(32 if single else 8):
            intention = rng.choice(list(INTENTIONS))
            scenario = (synthetic_scenario(rng, intention) if rng.random() < (0.8 if single else 0.6)
                        else rng.choice([s for s in scenarios if s.intention == intention]))
            vanilla = rng.random() < 0.15
            batch.append(demonstrate(chat, scenario, think, rng, 1 if single else rng.randint(2, 8), 0.08 if knowing else 0.85,
                                     0.85, not vanilla and single and rng.random() < 0.8, "vanilla" if vanilla else "challenging"))
        weights = [weights_of(chat, d, heavy, 4.0 if single else 2.0, 0.1) for d, heavy in batch]
        loss, nll, w = sft_loss(model, [d for d, _ in batch], weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", agent=f"{nll[w >= 1].mean():.3f}", slots=f"{nll[w > 1].mean():.3f}")
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out


def cached_tiny(think, root="runs/tiny-sft"):
    """The embedded policy's folder; built on first use."""
    out = Path(root) / ("think" if think else "plain")
    if not (out / "config.json").exists():
        print(f"building the embedded policy in {out} (about two minutes, once)")
        build_tiny(think, out)
    return out
