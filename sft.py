"""Supervised warm start: builds the embedded tiny policy, or warm-starts any causal LM from good transcripts.

The paper starts RL from Qwen2.5-7B-Instruct, an assistant that answers feelings with solutions. The embedded policy is our
stand-in for it: a 0.6M-parameter Qwen2 that first learns the language of prompts/en (what the hints mean, how a reply of each
kind is worded, to name the thing just told) and then, in the last fifth, the assistant habit: whatever is needed, it mostly
plans advice. Its evidence and its reading of the need stay right; only the step from need to plan is left for RL to repair.
Loss: cross-entropy on the agent's tokens (words copied from the user weigh more), and a little on the user's.
Run: python sft.py                                   # builds runs/tiny-sft/think and /plain, about 100 s each on 2 cores
     python sft.py --model M --data transcripts.jsonl --min-emotion 70 --out DIR         # any causal LM
"""
import argparse
import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollout import ChatTokens, Dialogue, Turn, load_policy, microbatch, row_of, save_policy, system_prompt
from simulator import (
    INTENTIONS,
    PROMPTS,
    STANCE,
    Scenario,
    ScriptedSimulator,
    hints_in,
    infer_need,
    lines,
    load_scenarios,
    nouns,
    stock_reply,
    things_in,
)

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
        children = node.values() if isinstance(node, dict) else node
        return [node] if isinstance(node, str) else [text for child in children for text in strings(child)]

    user = {name: part for name, part in lines("user").items() if name not in ("cues", "thoughts")}
    texts = ["system", "user", "assistant", system_prompt(True), system_prompt(False)] * 20
    texts += [pad + text for text in strings(user) + strings(lines("replies")) for pad in ("", " ")] * 10
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


def plan_chances(need, habit):
    """How often each act is planned when the need is known: with chance `habit` as an assistant would, mostly advice."""
    return {act: (1 - habit) * (act == need) + habit * ((act == "advice") / 2 + 1 / 2 / len(INTENTIONS)) for act in INTENTIONS}


def demonstrate(chat, scenario, think, rng, turns, habit, specific, both_hints=False, difficulty="challenging", slot_weight=2.0):
    """One dialogue in which a tutor talks with the scripted user. Returns (Dialogue, {token id: weight} of each turn).

    A habitual tutor's plans are drawn evenly and weighed by their chance instead, so that the replies to all plans stay fluent
    while the plans themselves are learned as often as they should be made.
    """
    user = ScriptedSimulator(scenario, difficulty, 50, 99, rng.random())
    system, message = system_prompt(think), user.opening()
    if both_hints:                                                 # one message with both hints: the need at a glance
        message += " " + rng.choice(lines("user")["hints"][STANCE[scenario.intention]])[1]
        user.user_texts[-1] = message
    dialogue = Dialogue(scenario, think, 0, opening=message, trunk=chat.first(system, message))
    texts, core, heavy = [message], "", []
    for turn in range(turns):
        need = infer_need(user.user_texts, rng)
        chances, even = plan_chances(need, habit), habit > 0.5
        plan = rng.choices(list(chances), None if even else list(chances.values()))[0]
        thing = things_in(message)[-1] if things_in(message) and rng.random() < specific else ""
        reply, core = stock_reply(plan, thing, rng, turn == 0, core)
        thought = thought_of(user.user_texts, need, plan)
        ids = chat.encode(f"<think>{thought}</think>{reply}" if think else reply) + [chat.end_ids[-1]]
        slots = [thing, need, *thought.split(". ")[0].split()[2:], reply.split()[0]]         # copied words, and how it opens
        weights = {i: slot_weight for word in slots if word for i in (*chat.encode(" " + word)[:1], *chat.encode(word)[:1])}
        deciding = [" " + PLANS[plan]] if think else [" " + core.split("{d}")[0].strip()]
        weights |= {i: slot_weight * (len(chances) * chances[plan] if even else 1) for text in deciding for i in chat.encode(text)[:2]}
        dialogue.turns.append(Turn(len(dialogue.trunk), ids, [0.0] * len(ids), "stop", thought if think else None, reply, True))
        heavy.append(weights)
        if turn + 1 < turns:
            user.emotion = rng.randint(20, 89)                     # every mood is heard, no dialogue ends early
            reaction = user.hear(reply)
            message = reaction.message
            texts += [reply, message]
            dialogue.trunk += chat.after(system, texts, None if think else ids)
    return dialogue, heavy


def weights_of(chat, dialogue, heavy, user_weight):
    """One weight per token of the row: agent tokens 1 or what `heavy` says, the user's words `user_weight`, all else 0.

    The trunk's copy of a thoughtful reply weighs 0: its parent is the bare header, so any weight would teach "skip the thought".
    """
    ids, positions, _, action = row_of(dialogue)
    copied = set()
    system = dialogue.trunk.index(dialogue.trunk[0], 1) if user_weight else 0      # ChatML: where the second message opens
    if dialogue.think:
        for turn in dialogue.turns:
            copied.update(range(turn.prompt_len, turn.prompt_len + len(chat.encode(turn.reply)) + 2))
    heavy = [{}] + (heavy or [{}] * len(dialogue.turns))
    weights, turn = [], 0
    for token, position, acted, before in zip(ids, positions, action, [0] + action):
        turn += acted and not before
        weights.append(heavy[turn].get(token, 1.0) if acted else 0.0 if position < system or position in copied else user_weight)
    return weights


def sft_loss(model, dialogues, weights):
    """Weighted cross-entropy over rows (B, T): the token at column t is predicted at column t - 1."""
    micro = microbatch(dialogues, [row_of(d) for d in dialogues], [0] * len(dialogues), device=model.device)
    width = micro.input_ids.shape[1]
    w = torch.tensor([row + [0.0] * (width - len(row)) for row in weights], device=model.device)          # (B, T)
    row, column = w[:, 1:].nonzero(as_tuple=True)                                     # the head runs where a weight stands
    decoder = getattr(model, model.base_model_prefix)
    hidden = decoder(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=micro.mask, use_cache=False)[0]
    logits = model.get_output_embeddings()(hidden[row, column]).float()               # (n, V)
    targets, w = micro.input_ids[row, column + 1], w[row, column + 1]
    nll = F.cross_entropy(logits, targets, reduction="none")
    return (nll * w).sum() / w.sum(), nll.detach(), w


def build_tiny(think, out, seed=0, steps=(100, 200), lr=3e-3):
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
        single, knowing = step < steps[0], step < 0.8 * total
        batch = []
        for _ in range(32 if single else 8):
            intention = rng.choice(list(INTENTIONS))
            scenario = (synthetic_scenario(rng, intention) if rng.random() < (0.8 if single else 0.6)
                        else rng.choice([s for s in scenarios if s.intention == intention]))
            vanilla = rng.random() < 0.15
            batch.append(demonstrate(chat, scenario, think, rng, 1 if single else rng.randint(2, 8), 0.08 if knowing else 0.88,
                                     0.85, not vanilla and single and rng.random() < 0.8, "vanilla" if vanilla else "challenging",
                                     4.0 if single else 2.0))
        weights = [weights_of(chat, d, heavy, 0.1) for d, heavy in batch]
        loss, nll, w = sft_loss(model, [d for d, _ in batch], weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if bar.disable and step % 50 == 0:                                  # no terminal, so no bar
            print(f"warm start ({'think' if think else 'plain'}): {step} of {total} steps, loss {loss.item():.2f}", flush=True)
        bar.set_postfix(loss=f"{loss.item():.3f}", agent=f"{nll[w >= 1].mean():.3f}", slots=f"{nll[w > 1].mean():.3f}")
    return save_policy(model, tokenizer, out, think=think, temperature=0.7, max_new_tokens=64)


def cached_tiny(think, root="runs/tiny-sft"):
    """The embedded policy's folder; built on first use."""
    out = Path(root) / ("think" if think else "plain")
    if not (out / "config.json").exists():
        print(f"building the embedded policy in {out} (about two minutes, once)")
        build_tiny(think, out)
    return out


# ---- any causal LM, from good transcripts ----------------------------------------------------------------------------------

def read_demonstrations(path, chat, min_emotion, think):
    """Dialogues of a transcript file (train.py, evaluate.py --save-transcripts) that ended at min_emotion or above, as
    training rows. Turns whose format broke are kept as history but not imitated."""
    dialogues = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            good = row["final_emotion"] >= min_emotion and row["end_reason"] != "simulator_failed"
            turns = [(t["thought"], t["reply"], t["format_ok"], t["user"]) for t in row["turns"]]
            opening = row["opening"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a transcript line ({error!r})") from None
        if not good or not turns:
            continue
        system, texts = system_prompt(think), [opening]
        dialogue = Dialogue(None, think, 0, opening=opening, trunk=chat.first(system, opening))
        for thought, reply, format_ok, user in turns:
            if think and not (thought and format_ok) or not reply:
                break                                              # what follows a broken turn has a broken history
            ids = chat.encode(f"<think>{thought}</think>{reply}" if think else reply) + [chat.end_ids[-1]]
            dialogue.turns.append(Turn(len(dialogue.trunk), ids, [0.0] * len(ids), "stop", thought, reply, True))
            if user:
                texts += [reply, user]
                dialogue.trunk += chat.after(system, texts, None if think else ids)
        if dialogue.turns:
            dialogues.append(dialogue)
    if not dialogues:
        raise ValueError(f"{path}: no dialogue with usable {'think' if think else 'plain'} turns reaches {min_emotion} points; lower --min-emotion")
    return dialogues


def warm_start(args):
    """Fine-tune --model on --data and save it in Hugging Face format under --out."""
    torch.manual_seed(args.seed)
    model, tokenizer = load_policy(args.model)
    chat, rng = ChatTokens(tokenizer), random.Random(args.seed)
    dialogues = read_demonstrations(args.data, chat, args.min_emotion, args.think)
    print(f"{len(dialogues)} dialogues, {sum(len(t.ids) for d in dialogues for t in d.turns)} agent tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    model.train()
    for epoch in range(args.epochs):
        order = rng.sample(dialogues, len(dialogues))
        bar = tqdm(range(0, len(order), args.batch), desc=f"epoch {epoch + 1}", disable=None)
        for at in bar:
            batch = order[at:at + args.batch]
            loss, _, _ = sft_loss(model, batch, [weights_of(chat, d, None, 0.0) for d in batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    save_policy(model, tokenizer, args.out, think=args.think, temperature=1.0, max_new_tokens=1024)
    print(f"saved {args.out}")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="causal LM to warm-start, Hugging Face folder or name (default: build the embedded policy)")
    parser.add_argument("--data", default="", help="transcript file to learn from, JSONL (needed with --model)")
    parser.add_argument("--min-emotion", type=int, default=70, help="learn only from dialogues that ended at this many points (default: 70, tier A)")
    parser.add_argument("--think", action=argparse.BooleanOptionalAction, default=None,
                        help="think mode (default: both embedded policies; with --model no)")
    parser.add_argument("--out", default="", help="folder to save in (default: runs/tiny-sft/MODE; with --model runs/sft)")
    parser.add_argument("--epochs", type=int, default=1, help="with --model: passes over the data (default: 1)")
    parser.add_argument("--batch", type=int, default=8, help="with --model: dialogues an optimizer step (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-5, help="with --model: learning rate (default: 1e-5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, demonstrations and order (default: 0)")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.data):
        raise ValueError("--model and --data go together: which model learns from which transcripts")
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.model:
        args.out, args.think = args.out or "runs/sft", bool(args.think)
        return warm_start(args)
    for think in (True, False) if args.think is None else (args.think,):
        print(f"saved {build_tiny(think, args.out or Path('runs/tiny-sft') / ('think' if think else 'plain'), args.seed)}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"sft.py: error: {error}", file=sys.stderr)
        sys.exit(2)
