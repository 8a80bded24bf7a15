"""Speed, each part measured against its alternative in one run, so that the ratio holds although the machine differs.

Run: python bench.py rollout --json rollout.json                     # vLLM where it is installed, else only the scheduler
     python bench.py simulator --json simulator.json                 # 64 dialogues with an LLM user behind a slow endpoint
"""
import argparse
import importlib.util
import json
import math
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import sft
from rollout import ChatTokens, Dialogue, Finished, HFEngine, VLLMEngine, load_policy, rollout, seed_of, system_prompt
from simulator import PROMPTS, LLMClient, LLMSimulator, Reaction, Scenario, ScriptedSimulator, load_scenarios


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"bench.py: error: {message} (--help lists the flags)\n")
    what = parser.add_subparsers(dest="what", required=True)
    command = what.add_parser("rollout", help="continuous against lock-step turns, vLLM against transformers, the scheduler's own cost")
    command.add_argument("--models", nargs="*", help="Hugging Face folders to generate with (default: the embedded policy)")
    command.add_argument("--dialogues", type=int, default=64, help="dialogues at once with the first model (default: 64, the embedded preset)")
    command.add_argument("--max-turns", type=int, default=6, help="replies of a dialogue (default: 6, the embedded preset)")
    command.add_argument("--max-new-tokens", type=int, default=64, help="tokens of a reply at most (default: 64, the embedded preset)")
    command.add_argument("--user-seconds", type=float, default=1.0, help="mean time of a slow user's answer; a tenth take 5 times that (default: 1.0)")
    command.add_argument("--repeats", type=int, default=3, help="times each is measured; the median counts (default: 3)")
    command.set_defaults(run=bench_rollout)
    command = what.add_parser("simulator", help="dialogues with an LLM user behind a slow loopback endpoint, against a serial loop")
    command.add_argument("--dialogues", type=int, default=64, help="dialogues at once (default: 64)")
    command.add_argument("--turns", type=int, default=8, help="replies of each (default: 8, RLVER's)")
    command.add_argument("--median", type=float, default=0.05, help="median latency of a call in seconds (default: 0.05)")
    command.add_argument("--sigma", type=float, default=0.6, help="sigma of the log-normal latency (default: 0.6)")
    command.add_argument("--repeats", type=int, default=5, help="times it is measured; best and median are told (default: 5)")
    command.set_defaults(run=bench_simulator)
    for command in what.choices.values():
        command.add_argument("--json", metavar="FILE", help="write the numbers to FILE")
    args = parser.parse_args(argv)
    result = args.run(args)
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def median(values):
    return sorted(values)[len(values) // 2]


# ---- rollout --------------------------------------------------------------------------------------------------------------

def bench_rollout(args):
    """Seconds, replies and tokens a second. All of one comparison runs in this process, in turns, on the same scenarios."""
    models = args.models if args.models is not None else [str(sft.cached_tiny(True))]
    result = {"threads": torch.get_num_threads(), "gpu": torch.cuda.is_available(), "dialogues": args.dialogues, "max_turns": args.max_turns,
              "max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "scheduler": scheduler_cost(args)}
    for path in models:
        result[path] = engines_compared(path, args)
    return result


class InstantEngine:
    """Every reply is there at once."""
    tensor_parallel, max_new_tokens, max_context = 1, 64, 10 ** 6

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
        start = time.perf_counter()
        rollout(engine, chat, dialogues, lambda d: InstantUser(turns), "You are a friend.", pool)
        assert sum(len(d.turns) for d in dialogues) == count * turns
        return 1000 * (time.perf_counter() - start) / (count * turns)

    with ThreadPoolExecutor(64) as pool:
        return {"dialogues": count, "turns": turns, "ms_per_turn": {
            f"{'think' if think else 'plain'}, {'64 threads' if threads else 'inline'}":
                round(median([play(think, pool if threads else None) for _ in range(args.repeats)]), 4)
            for think in (True, False) for threads in (False, True)}}


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
        seconds = median([seconds for seconds, _ in played])
        return {"seconds": round(seconds, 3), "replies": len(replies), "tokens": sum(len(t.ids) for t in replies),
                "tokens_per_second": round(sum(len(t.ids) for t in replies) / seconds, 1)}

    engines = {"hf": HFEngine(model, chat.end_ids, args.max_new_tokens, 0.7)}
    if importlib.util.find_spec("vllm"):
        engines["vllm"] = VLLMEngine(path, chat.end_ids, args.max_new_tokens, 0.7, max_context=2048)
    played = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):                               # in turns; the first round warms up
        for name, engine in engines.items():
            played[name] += [play(engine)] if repeat else play(engine) and []
    result["engines"] = {name: speed(runs) for name, runs in played.items()}
    if "vllm" not in engines:
        return result | {"vllm": "not installed"}
    result["vllm_over_hf"] = round(result["engines"]["vllm"]["tokens_per_second"] / result["engines"]["hf"]["tokens_per_second"], 2)
    turns = {"continuous": [], "lockstep": []}
    with ThreadPoolExecutor(args.dialogues) as pool:
        for _ in range(args.repeats):
            for mode, runs in turns.items():
                runs.append(play(engines["vllm"], args.user_seconds, mode == "lockstep", pool))
    texts = [[[turn.reply for turn in d.turns] for d in runs[0][1]] for runs in turns.values()]
    result["turns"] = {mode: speed(runs) for mode, runs in turns.items()} | {
        "user_seconds": args.user_seconds, "same_dialogues": round(sum(a == b for a, b in zip(*texts)) / len(texts[0]), 3)}
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


# ---- simulator ------------------------------------------------------------------------------------------------------------

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


class NoTokens:
    """The chat of an engine that answers at once: what is left of rollout() is the event loop and the users."""

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
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(args.median), str(args.sigma)], stdout=subprocess.PIPE, text=True)
    try:
        client = LLMClient("loopback", f"http://127.0.0.1:{int(server.stdout.readline())}/v1", concurrency=args.dialogues)
        send, latencies, name = client.http.post, {}, threading.local()

        def noted(path, *, body, **kw):                # the same latency as the server's, under the dialogue that waits for it
            latencies.setdefault(name.dialogue, []).append(args.median * math.exp(random.Random(body["seed"]).gauss(0, args.sigma)))
            return send(path, body=body, **kw)
        client.http.post = noted

        class Named(LLMSimulator):
            def hear(self, reply):
                name.dialogue = self.seed
                return super().hear(reply)
        scenarios = load_scenarios(PROMPTS / "en" / "train.jsonl")
        people = [scenarios[(7 * k) % len(scenarios)] for k in range(args.dialogues)]

        def run(count):
            latencies.clear()
            dialogues = [Dialogue(person, False, seed, start_emotion=10, max_turns=args.turns) for seed, person in enumerate(people[:count])]
            began, cpu = time.perf_counter(), time.process_time()
            make_user = lambda d: Named(d.scenario, client, "challenging", None, 10, args.turns, d.seed)
            rollout(InstantEngine([1]), NoTokens(), dialogues, make_user, "", client.pool)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert all(d.end_reason == "max_turns" and len(d.turns) == args.turns for d in dialogues), [d.error for d in dialogues if d.failed]
            return seconds, cpu, [sum(own) for own in latencies.values()], sum(map(len, latencies.values()))
        run(args.dialogues)                            # connections and threads exist from here on
        runs = sorted(run(args.dialogues) for _ in range(args.repeats))
        serial_wall, _, serial_latency, _ = run(1)
    finally:
        server.kill()
    path, calls = max(runs[0][2]), runs[0][3]
    result = {"dialogues": args.dialogues, "turns": args.turns, "calls": calls, "critical_path_s": path, "wall_best_s": runs[0][0],
              "wall_median_s": runs[len(runs) // 2][0], "best_over_critical_path": runs[0][0] / path,
              "median_over_critical_path": runs[len(runs) // 2][0] / path, "cpu_ms_per_call": 1000 * runs[0][1] / calls,
              "serial_latencies_s": sum(runs[0][2]), "serial_one_dialogue_s": serial_wall, "serial_one_dialogue_latencies_s": serial_latency[0]}
    print(f"{args.dialogues} dialogues x {args.turns} turns, {calls} calls, latency {1000 * args.median:g} ms x exp(N(0, {args.sigma}))\n"
          f"critical path    {path:7.3f} s   (the slowest dialogue's own latencies)\n"
          f"event loop       {runs[0][0]:7.3f} s   best of {args.repeats}: {runs[0][0] / path:.2f} x the critical path; median "
          f"{result['wall_median_s']:.3f} s, {result['median_over_critical_path']:.2f} x; {result['cpu_ms_per_call']:.2f} ms of CPU a call\n"
          f"a serial loop    {sum(runs[0][2]):7.3f} s   (computed: the sum of the same latencies; measured on one dialogue: "
          f"{serial_wall:.3f} s for {serial_latency[0]:.3f} s of latency)")
    return result


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        sys.exit(2)
