"""Speed, measured against the alternatives in one run.

    learner     one policy update on the same dialogues: packed, one row per turn, TRL's GRPOTrainer; and the memory of the head
Run: python bench.py learner --trl .venv-trl --json FILE
"""
import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    learner = commands.add_parser("learner", help="one policy update on the same dialogues, packed and not")
    learner.set_defaults(bench=bench_learner)
    add_flags = learner.add_argument
    add_flags("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="shapes of the policy, weights are random (default: all)")
    add_flags("--repetitions", type=int, default=3, help="updates of the tiny model, ways interleaved, medians count; other models 1 (default: 3)")
    add_flags("--threads", type=int, default=2, help="CPU threads (default: 2)")
    add_flags("--trl", metavar="DIR", help="measure TRL too, from the venv DIR, made and filled where missing (default: not measured)")
    add_flags("--worker", nargs=3, help=argparse.SUPPRESS)
    for command in commands.choices.values():
        command.add_argument("--json", metavar="FILE", help="write the numbers to FILE, for machines")
    args = parser.parse_args(argv)
    result = args.bench(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


# ---- bench.py learner ----------------------------------------------------------------------------------------------------

MODELS = {                                             # dialogues of the step, then Qwen2's sizes
    "tiny": (8, dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384, vocab_size=1600)),
    "smollm2": (1, dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
                        vocab_size=49152)),            # SmolLM2-135M's
    "qwen-vocab": (2, dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
                           vocab_size=151936)),        # Qwen2.5's vocabulary under almost no model
}
JOBS = [("tiny", "think", ("packed", "rows", "padded", "trl")), ("tiny", "plain", ("packed", "rows", "padded", "trl")),
        ("smollm2", "think", ("packed", "padded", "trl")), ("qwen-vocab", "think", ("packed", "all logits"))]
WAYS = {"packed": "one row per dialogue (this learner)", "rows": "one row per turn, rows of similar length together",
        "padded": "one row per turn, padded to the longest", "all logits": "packed, the head in one piece", "trl": "TRL's GRPOTrainer"}
TOKENS_PER_BATCH = 8192                                # of a micro-batch, padding included, for every way


def recorded(shape, count):
    """`count` dialogues of 8 turns, made-up tokens in the lengths of real ones: system prompt 90, each message of the user 25-55, each
    thought 80-160 (shape "think"; "plain" has none), each reply 30-60. All log-probs are -7, so that some ratios are clipped."""
    from rollout import Dialogue, Reaction, Turn
    rng, dialogues = random.Random(0), []
    tokens = lambda low, high: [rng.randrange(3, 1600) for _ in range(rng.randint(low, high))]
    for _ in range(count):
        dialogue = Dialogue(None, shape == "think", 0, trunk=tokens(90, 90), end_reason="max_turns")
        for _ in range(8):
            dialogue.trunk += tokens(25, 55)
            thought, reply = tokens(80, 160) if shape == "think" else [], tokens(30, 60)
            dialogue.turns.append(Turn(len(dialogue.trunk), thought + reply, [-7.0] * len(thought + reply), "stop", None, "", True,
                                       Reaction(0, 50, "", "", None)))
            dialogue.trunk += reply
        dialogues.append(dialogue)
    return dialogues


def turn_by_turn(dialogues):
    """The same turns, each a row of its own after its whole past: what a learner without packing trains on."""
    from rollout import Dialogue
    return [Dialogue(None, False, 0, trunk=d.trunk[:turn.prompt_len], turns=[turn], end_reason="max_turns") for d in dialogues for turn in d.turns]


def worker(way, model, shape, threads):
    """One way in a process of its own, so that its peak memory is its own. Each line of input asks for one update; the answer is
    a line with its tokens (padding included), seconds, MiB above the loaded model, and loss and gradient norm, which must agree."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, logging
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    count, sizes = MODELS[model]
    policy, dialogues = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, max_position_embeddings=4096, **sizes)), recorded(shape, count)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    advantages = [1.0 if i % 2 == 0 else -0.5 for i in range(count)]
    update = (trl_update if way == "trl" else our_update)(way, policy, optimizer, dialogues, advantages)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2 ** 20
    for _ in sys.stdin:
        began = time.perf_counter()
        tokens, loss, norm = update()
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began, "loss": loss, "grad_norm": norm,
                          "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident}), flush=True)


def our_update(way, policy, optimizer, dialogues, advantages):
    import torch
    from torch.nn.functional import pad

    import ppo
    per_token = torch.cat([torch.full((sum(len(turn.ids) for turn in d.turns),), a) for d, a in zip(dialogues, advantages)])
    batch = ppo.make_batch(turn_by_turn(dialogues) if way in ("rows", "padded") else dialogues)
    cfg = argparse.Namespace(tokens_per_batch=TOKENS_PER_BATCH, epochs=1, minibatches=1, temperature=1.0, clip_eps=0.2, clip_high=0.0, ent_coef=0.0,
                             kl_coef=0.0, imitation_coef=0.0, loss_norm="token", tis_cap=0.0, max_mismatch=1e9, max_grad_norm=1.0)
    ppo.check_model(policy, way in ("packed", "all logits"))
    microbatches, score, seen = ppo.microbatches, ppo.token_logprobs, []

    def counted(dialogues, starts, budget, **where):
        width = max(turn.prompt_len + len(turn.ids) for d in dialogues for turn in d.turns)
        rows = budget // width if way == "padded" else len(dialogues)
        for at in range(0, len(dialogues), rows):
            for micro in microbatches(dialogues[at:at + rows], starts[at:at + rows], 10 ** 9 if way == "padded" else budget, **where):
                if way == "padded":
                    micro.input_ids = pad(micro.input_ids, (0, width - micro.input_ids.shape[1]))
                    micro.position_ids = torch.arange(width).expand(len(micro.input_ids), width)
                seen.append(micro.input_ids.numel())
                yield micro
    ppo.microbatches = counted
    if way == "all logits":
        ppo.token_logprobs = lambda *args, **kw: score(*args, **kw, chunk=10 ** 9)

    def update():
        seen.clear()
        metrics = ppo.update_policy(policy, optimizer, batch, per_token, cfg, random.Random(0))
        return sum(seen), metrics["pg_loss"], metrics["grad_norm"]
    return update


def trl_update(way, policy, optimizer, dialogues, advantages):
    """TRL's own loss, fused head and all, on the rows its users must make: one per turn where thoughts leave the history, else one
    per dialogue with the user's tokens masked. Only its loss, backward and step are timed, not its trainer's other work."""
    import tempfile

    import datasets
    import torch
    from trl import GRPOConfig, GRPOTrainer

    import sft
    rows = []                                          # prompt, completion, 1 on sampled tokens, advantage
    for dialogue, advantage in zip(dialogues, advantages):
        if dialogue.think:
            rows += [(dialogue.trunk[:t.prompt_len], t.ids, [1] * len(t.ids), advantage) for t in dialogue.turns]
        else:
            first, mask = dialogue.turns[0].prompt_len, [0] * len(dialogue.trunk)
            for turn in dialogue.turns:
                mask[turn.prompt_len:turn.prompt_len + len(turn.ids)] = [1] * len(turn.ids)
            rows.append((dialogue.trunk[:first], dialogue.trunk[first:], mask[first:], advantage))
    settings = GRPOConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, beta=0.0, epsilon=0.2, loss_type="bnpo", num_generations=2,
                          per_device_train_batch_size=2, gradient_checkpointing=False, report_to="none", temperature=1.0)
    tokenizer = sft.build_tokenizer(["Hi. Go on."], vocab_size=259)
    trainer = GRPOTrainer(policy, lambda completions, **_: [0.0] * len(completions), settings, datasets.Dataset.from_dict({"prompt": ["Hi."] * 2}),
                          processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    total, size = sum(sum(row[2]) for row in rows), max(1, TOKENS_PER_BATCH // (left + right))
    before = lambda row, fill: [fill] * (left - len(row))
    after = lambda row, fill: [fill] * (right - len(row))

    def update():
        policy.train()
        loss_sum = 0.0
        for at in range(0, len(rows), size):
            part = rows[at:at + size]
            inputs = {"prompt_ids": [before(p, 0) + p for p, *_ in part], "prompt_mask": [before(p, 0) + [1] * len(p) for p, *_ in part],
                      "completion_ids": [c + after(c, 0) for _, c, *_ in part], "completion_mask": [[1] * len(c) + after(c, 0) for _, c, *_ in part],
                      "tool_mask": [m + after(m, 0) for _, _, m, _ in part]}
            inputs = {name: torch.tensor(value) for name, value in inputs.items()}
            inputs |= {"advantages": torch.tensor([row[3] for row in part]), "old_per_token_logps": torch.full((len(part), right), -7.0)}
            loss = trainer.compute_loss(policy, inputs) * sum(sum(row[2]) for row in part) / total
            loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        return len(rows) * (left + right), loss_sum, norm
    return update


def python_with_trl(folder):
    """The interpreter of the venv `folder`, where trl is installed first if it is missing; torch stays this one's."""
    python = Path(folder).absolute() / "bin" / "python"
    if not python.exists():
        print(f"{folder}: making a venv and installing trl", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        ours = [path for path in sys.path if path.endswith("site-packages")]
        next(Path(folder).glob("lib/*/site-packages")).joinpath("ours.pth").write_text("\n".join(ours) + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "trl"], check=True)
    return str(python)


def bench_learner(args):
    """Each way on the same dialogues and weights, in turn, and the medians of their seconds; peak memory of each way's process."""
    if args.worker:
        return worker(*args.worker, args.threads)
    results = []
    for model, shape, ways in [job for job in JOBS if job[0] in args.models]:
        repetitions, processes, answers = args.repetitions if model == "tiny" else 1, {}, {}
        ways = [way for way in ways if way != "trl" or args.trl]
        for repetition in range(repetitions + (repetitions > 1)):      # the first of several warms up
            for way in ways:
                if way not in processes:
                    python = python_with_trl(args.trl) if way == "trl" else sys.executable
                    processes[way] = subprocess.Popen([python, __file__, "learner", "--threads", str(args.threads), "--worker", way, model, shape],
                                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                processes[way].stdin.write("update\n")
                processes[way].stdin.flush()
                line = processes[way].stdout.readline()
                while line and not line.startswith("{"):               # whatever a library prints
                    line = processes[way].stdout.readline()
                if not line:
                    raise RuntimeError(f"{way} on {model} ended: {processes[way].stderr.read()[-2000:]}")
                answers.setdefault(way, []).append(json.loads(line))
                if repetition == repetitions - (repetitions == 1):
                    processes[way].communicate()                       # frees its memory before the next one starts
        ours = answers["packed"][0]
        print(f"\n{model}, {shape}: {MODELS[model][0]} dialogues of 8 turns, {repetitions} timed updates a way, {args.threads} threads\n"
              f"{'':52} {'tokens':>8} {'seconds':>8} {'peak MiB':>9} {'x time':>7} {'x peak':>7}")
        for way in ways:
            timed = sorted(a["seconds"] for a in answers[way][repetitions > 1:])
            last = answers[way][-1]
            row = {"model": model, "shape": shape, "way": way, "tokens": last["tokens"], "seconds": statistics.median(timed),
                   "all_seconds": timed, "threads": args.threads, "peak_mib": last["peak_mib"],
                   "loss": answers[way][0]["loss"], "grad_norm": answers[way][0]["grad_norm"]}
            results.append(row)
            packed = next(r for r in results if (r["model"], r["shape"], r["way"]) == (model, shape, "packed"))
            row |= {"seconds_over_packed": row["seconds"] / packed["seconds"], "peak_over_packed": row["peak_mib"] / packed["peak_mib"]}
            # the first update of each way starts from the same weights
            same = abs(row["loss"] - ours["loss"]) < 1e-4 and abs(row["grad_norm"] / ours["grad_norm"] - 1) < 1e-3
            print(f"{WAYS[way]:52} {row['tokens']:8d} {row['seconds']:8.2f} {row['peak_mib']:9.0f} {row['seconds_over_packed']:7.2f} "
                  f"{row['peak_over_packed']:7.2f}{'' if same else '   NOT THE SAME loss and gradient'}")
    return results


if __name__ == "__main__":
    main()
