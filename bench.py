"""Speed, each part measured against its alternative in one run, so that the ratio holds although the machine differs.

Run: python bench.py rollout --json rollout.json                     # vLLM where it is installed, else only the scheduler
     python bench.py learner --trl .venv-trl --json learner.json     # packed rows against rows per turn, and TRL's GRPOTrainer
     python bench.py simulator --json simulator.json                 # an LLM user behind a slow loopback endpoint
"""
import argparse
import importlib.util
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn.functional import pad

import ppo
import sft
from rollout import ChatTokens, Dialogue, Finished, HFEngine, Turn, VLLMEngine, load_policy, rollout, system_prompt
from simulator import PROMPTS, LLMClient, LLMSimulator, Reaction, Scenario, ScriptedSimulator, load_scenarios, seed_of


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"bench.py: error: {message} (--help lists the flags)\n")
    what = parser.add_subparsers(dest="what", required=True)
    command = what.add_parser("rollout", help="continuous against lock-step turns, vLLM against transformers, the scheduler's own cost")
    command.add_argument("--models", nargs="*", help="Hugging Face folders to generate with (default: the embedded policy)")
    command.add_argument("--dialogues", type=int, default=64, help="dialogues at once (default: 64, the embedded preset)")
    command.add_argument("--max-turns", type=int, default=6, help="replies of a dialogue (default: 6, the embedded preset)")
    command.add_argument("--max-new-tokens", type=int, default=64, help="tokens of a reply at most (default: 64, the embedded preset)")
    command.set_defaults(run=bench_rollout, repetitions=3)
    command = what.add_parser("simulator", help="the event loop with an LLM user on a slow loopback endpoint")
    command.set_defaults(run=bench_simulator, repetitions=5)
    command = what.add_parser("learner", help="one policy update on the same dialogues: packed, one row per turn, TRL; the head's memory")
    command.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="shapes of the policy, weights are random (default: all)")
    command.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    command.add_argument("--trl", metavar="DIR", help="measure TRL too, from the venv DIR, made and filled where it is missing (default: no)")
    command.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    command.set_defaults(run=bench_learner, repetitions=3)
    for command in what.choices.values():
        command.add_argument("--repetitions", type=int, default=(default := command.get_default("repetitions")),
                             help=f"times each is measured (default: {default}{'; large models once' * (command is what.choices['learner'])})")
        command.add_argument("--json", metavar="FILE", help="write the numbers to FILE")
    args = parser.parse_args(argv)
    result = args.run(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


# ---- rollout --------------------------------------------------------------------------------------------------------------

def bench_rollout(args):
    """Seconds, replies and tokens a second. All of one comparison runs in this process, in turns, on the same scenarios."""
    models = args.models if args.models is not None else [str(sft.cached_tiny(True))]
    result = {"threads": torch.get_num_threads(), "gpu": torch.cuda.is_available(), "dialogues": args.dialogues, "max_turns": args.max_turns,
              "max_new_tokens": args.max_new_tokens, "repetitions": args.repetitions, "scheduler": scheduler_cost(args)}
    for path in models:
        result[path] = engines_compared(path, args)
    print(json.dumps(result, indent=1))
    return result


USER_SECONDS = 1.0              # mean time of a slow user's answer; a tenth of them take five times as long


class InstantEngine:
    """Every reply is there at once."""
    max_new_tokens, max_context = 64, 10 ** 9

    def __init__(self, ids):
        self.ids, self.waiting = ids, []

    def submit(self, key, prompt_ids, seed):
        self.waiting.append(key)

    def step(self):
        done, self.waiting = self.waiting, []
        return [Finished(key, self.ids, [-1.0] * len(self.ids), "stop") for key in done]


class InstantUser:
    def __init__(self, turns):
        self.left = turns

    def opening(self):
        return "Something happened at work today and I keep thinking about it."

    def hear(self, reply):
        self.left -= 1
        return Reaction(5, 50, "I had not seen it like that; tell me more about it.", "", None if self.left else "max_turns")


def scheduler_cost(args, count=1024, turns=8):
    """Milliseconds a turn that rollout() itself takes, chat template and tokenizer included: engine and user are instant."""
    chat = ChatTokens(sft.build_tokenizer(sft.corpus_texts(load_scenarios(PROMPTS / "en" / "train.jsonl"))))
    engine = InstantEngine(chat.encode("<think>They are sad.</think>That sounds hard, and I am here for you.") + [chat.end_ids[-1]])
    person = Scenario("bench/praise", "bench", "", "", "", (), "praise")

    def play(think, pool):
        dialogues = [Dialogue(person, think, i, max_turns=turns) for i in range(count)]
        start = time.perf_counter(), time.process_time()
        rollout(engine, chat, dialogues, lambda d: InstantUser(turns), "You are a friend.", pool)
        assert sum(len(d.turns) for d in dialogues) == count * turns
        return [1000 * (end - began) / (count * turns) for end, began in zip((time.perf_counter(), time.process_time()), start)]

    with ThreadPoolExecutor(64) as pool:
        runs = {f"{'think' if think else 'plain'}, {'64 threads' if users else 'inline'}": [play(think, users) for _ in range(args.repetitions)]
                for think in (True, False) for users in (None, pool)}
    return {"dialogues": count, "turns": turns} | {                      # CPU time does not depend on what else the machine does
        f"{clock}_ms_per_turn": {name: round(statistics.median([run[i] for run in played]), 4) for name, played in runs.items()}
        for i, clock in enumerate(("wall", "cpu"))}


class LockStep:
    """The usual way, for comparison: all living dialogues generate together, and nobody goes on before the last user has answered."""

    def __init__(self, engine, dialogues):
        self.engine, self.dialogues, self.held = engine, dialogues, []
        self.max_new_tokens, self.max_context = engine.max_new_tokens, engine.max_context

    def submit(self, *reply):
        self.held.append(reply)

    def step(self):
        if len(self.held) < sum(d.end_reason is None for d in self.dialogues):
            time.sleep(0.001)
            return []
        count, done = len(self.held), []
        for reply in self.held:
            self.engine.submit(*reply)
        self.held = []
        while len(done) < count:
            done += self.engine.step()
        return done


def engines_compared(path, args):
    """vLLM against transformers with the instant scripted user, then continuous against lock-step turns with a slow one."""
    model, tokenizer = load_policy(path)
    chat, scenarios = ChatTokens(tokenizer), load_scenarios(PROMPTS / "en" / "train.jsonl")
    think = json.loads(how.read_text())["think"] if (how := Path(path) / "policy.json").exists() else False
    result = {"parameters": sum(p.numel() for p in model.parameters()), "think": think}

    def play(engine, user_seconds=0.0, lockstep=False, pool=None):
        """(seconds, dialogues) with users whose answers take a seeded time, the same in every mode."""
        dialogues = [Dialogue(scenarios[i % len(scenarios)], think, i, start_emotion=60, max_turns=args.max_turns) for i in range(args.dialogues)]
        start = time.perf_counter()
        rollout(LockStep(engine, dialogues) if lockstep else engine, chat, dialogues,
                lambda d: SlowUser(d, args.max_turns, user_seconds), system_prompt(think), pool)
        seconds = time.perf_counter() - start
        engine.sync()
        return seconds, dialogues

    def speed(played):
        replies = [turn for d in played[0][1] for turn in d.turns]
        seconds = statistics.median([seconds for seconds, _ in played])
        return {"seconds": round(seconds, 3), "replies": len(replies), "tokens": sum(len(t.ids) for t in replies),
                "tokens_per_second": round(sum(len(t.ids) for t in replies) / seconds, 1)}

    engines = {"hf": HFEngine(model, chat.end_ids, args.max_new_tokens, 0.7)}
    if importlib.util.find_spec("vllm"):
        engines["vllm"] = VLLMEngine(path, chat.end_ids, args.max_new_tokens, 0.7, max_context=2048)
    played = {name: [] for name in engines}
    for repeat in range(args.repetitions + 1):                           # in turns; the first round warms up
        for name, engine in engines.items():
            played[name] += [play(engine)] if repeat else play(engine) and []
    result["engines"] = {name: speed(runs) for name, runs in played.items()}
    if "vllm" not in engines:
        return result | {"vllm": "not installed"}
    result["vllm_over_hf"] = round(result["engines"]["vllm"]["tokens_per_second"] / result["engines"]["hf"]["tokens_per_second"], 2)
    turns = {"continuous": [], "lockstep": []}
    with ThreadPoolExecutor(args.dialogues) as pool:
        for _ in range(args.repetitions):
            for mode, runs in turns.items():
                runs.append(play(engines["vllm"], USER_SECONDS, mode == "lockstep", pool))
    texts = [[[turn.reply for turn in d.turns] for d in runs[0][1]] for runs in turns.values()]
    result["turns"] = {mode: speed(runs) for mode, runs in turns.items()} | {
        "user_seconds": USER_SECONDS, "same_dialogues": round(sum(a == b for a, b in zip(*texts)) / len(texts[0]), 3)}
    result["lockstep_over_continuous_seconds"] = round(result["turns"]["lockstep"]["seconds"] / result["turns"]["continuous"]["seconds"], 2)
    return result


class SlowUser(ScriptedSimulator):
    """The scripted user, who takes its time; how long depends on the dialogue alone, so that every mode waits for the same answers."""

    def __init__(self, dialogue, turns, seconds):
        super().__init__(dialogue.scenario, "challenging", dialogue.start_emotion, turns, dialogue.seed)
        self.rng, self.seconds = random.Random(seed_of("slow", dialogue.seed)), seconds

    def hear(self, reply):
        if self.seconds:
            time.sleep(self.seconds * self.rng.uniform(0.5, 1.5) * (5 if self.rng.random() < 0.1 else 1))
        return super().hear(reply)


# ---- bench.py simulator --------------------------------------------------------------------------------------------------

# The endpoint: a process of its own, so that it takes no time from the client's interpreter; the latency of a call is a
# function of its seed, so that every run waits for the same.
SERVER = '''
import asyncio, json, math, random, sys
median, sigma, loop = float(sys.argv[1]), float(sys.argv[2]), asyncio.new_event_loop()
texts = ["Content: a\\nReason: b\\nActivity: c\\nAnalysis: d\\nChange: +5", "Thinking: a\\nOrigin: b\\nChange: c\\nResponse: Go on, I listen."]
bodies = [json.dumps({"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
                      "usage": {"prompt_tokens": 900, "completion_tokens": 60}}).encode() for text in texts]
answers = [b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body for body in bodies]
class Protocol(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        head = self.data.find(b"\\r\\n\\r\\n")
        if head > 0 and len(self.data) >= head + 4 + int(self.data.lower().split(b"content-length:")[1].split(b"\\r")[0]):
            seed = int(self.data.split(b'"seed":')[1].split(b",")[0])
            answer, self.data = answers[b"Activity: [" not in self.data], b""
            loop.call_later(median * math.exp(random.Random(seed).gauss(0, sigma)), self.transport.write, answer)
server = loop.run_until_complete(loop.create_server(Protocol, "127.0.0.1", 0, backlog=1024))
print(server.sockets[0].getsockname()[1], flush=True)
loop.run_forever()
'''


DIALOGUES, TURNS, MEDIAN, SIGMA = 64, 8, 0.05, 0.6          # latency of a call: MEDIAN seconds x exp(N(0, SIGMA))


class Tokenless(InstantEngine):
    """An engine and a ChatTokens at once, of one token: what is left of rollout() is the event loop and the users."""

    def first(self, system, text):
        return [1]

    def after(self, system, texts, sampled=None):
        return [1]

    def encode(self, text):
        return [1]

    def decode(self, ids):
        return "That sounds hard. Tell me more."


def bench_simulator(args):
    """Wall time of rollout() over the critical path: the largest sum of its own latencies that any dialogue has.

    A serial loop over the same calls would take the sum of all latencies; it is computed, and measured on the first dialogue.
    """
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(MEDIAN), str(SIGMA)], stdout=subprocess.PIPE, text=True)
    try:
        client = LLMClient("loopback", f"http://127.0.0.1:{int(server.stdout.readline())}/v1", concurrency=DIALOGUES)
        send, latencies, name = client.http.post, {}, threading.local()

        def noted(path, *, body, **kw):                # the same latency as the server's, under the dialogue that waits for it
            latencies.setdefault(name.dialogue, []).append(MEDIAN * math.exp(random.Random(body["seed"]).gauss(0, SIGMA)))
            return send(path, body=body, **kw)
        client.http.post = noted

        class Named(LLMSimulator):
            def hear(self, reply):
                name.dialogue = self.seed
                return super().hear(reply)
        scenarios = load_scenarios(PROMPTS / "en" / "train.jsonl")
        people = [scenarios[(7 * k) % len(scenarios)] for k in range(DIALOGUES)]

        def run(count):
            latencies.clear()
            dialogues = [Dialogue(person, False, seed, start_emotion=10, max_turns=TURNS) for seed, person in enumerate(people[:count])]
            engine, began, cpu = Tokenless([1]), time.perf_counter(), time.process_time()
            rollout(engine, engine, dialogues, lambda d: Named(d.scenario, client, "challenging", 10, TURNS, d.seed), "", client.pool)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert all(d.end_reason == "max_turns" and len(d.turns) == TURNS for d in dialogues), [d.error for d in dialogues if d.failed]
            return seconds, cpu, [sum(own) for own in latencies.values()], sum(map(len, latencies.values()))
        run(DIALOGUES)                            # connections and threads exist from here on
        runs = sorted(run(DIALOGUES) for _ in range(args.repetitions))
        serial_wall, _, serial_latency, _ = run(1)
    finally:
        server.kill()
    path, calls = max(runs[0][2]), runs[0][3]
    result = {"dialogues": DIALOGUES, "turns": TURNS, "calls": calls, "critical_path_s": path, "wall_best_s": runs[0][0],
              "wall_median_s": runs[len(runs) // 2][0], "best_over_critical_path": runs[0][0] / path,
              "median_over_critical_path": runs[len(runs) // 2][0] / path, "cpu_ms_per_call": 1000 * runs[0][1] / calls,
              "serial_latencies_s": sum(runs[0][2]), "serial_one_dialogue_s": serial_wall, "serial_one_dialogue_latencies_s": serial_latency[0]}
    print(f"{DIALOGUES} dialogues x {TURNS} turns, {calls} calls, latency {1000 * MEDIAN:g} ms x exp(N(0, {SIGMA}))\n"
          f"critical path    {path:7.3f} s   (the slowest dialogue's own latencies)\n"
          f"event loop       {runs[0][0]:7.3f} s   best of {args.repetitions}: {runs[0][0] / path:.2f} x the critical path; median "
          f"{result['wall_median_s']:.3f} s, {result['median_over_critical_path']:.2f} x; {result['cpu_ms_per_call']:.2f} ms of CPU a call\n"
          f"a serial loop    {sum(runs[0][2]):7.3f} s   (computed: the sum of the same latencies; measured on one dialogue: "
          f"{serial_wall:.3f} s for {serial_latency[0]:.3f} s of latency)")
    return result


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
    return [Dialogue(None, False, 0, trunk=d.trunk[:turn.prompt_len], turns=[turn], end_reason="max_turns") for d in dialogues for turn in d.turns]


def worker(way, model, shape, threads):
    """One way in a process of its own, so that its peak memory is its own. Each line of input asks for one update; the answer is
    a line with its tokens (padding included), seconds, MiB above the loaded model, and loss and gradient norm, which must agree."""
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
    from trl import GRPOConfig, GRPOTrainer

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
        print(f"\n{model}, {shape}: {MODELS[model][0]} dialogues of 8 turns, median of {repetitions}, {args.threads} threads\n"
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
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        sys.exit(2)
