"""Speed, measured against the alternatives in one run.

    simulator   64 dialogues x 8 turns with an LLM user behind a slow endpoint: how near to the slowest dialogue's own latencies?
Run: python bench.py simulator --json FILE
"""
import argparse
import json
import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    simulator = commands.add_parser("simulator", help="the event loop with an LLM user on a slow loopback endpoint")
    simulator.set_defaults(bench=bench_simulator)
    add_flags = simulator.add_argument
    add_flags("--dialogues", type=int, default=64, help="played at the same time (default: 64)")
    add_flags("--turns", type=int, default=8, help="replies of each (default: 8, RLVER's)")
    add_flags("--median", type=float, default=0.05, help="median latency of a call in seconds (default: 0.05)")
    add_flags("--sigma", type=float, default=0.6, help="sigma of the log-normal latency (default: 0.6)")
    add_flags("--repetitions", type=int, default=5, help="runs; the best and the median count, other processes only add time (default: 5)")
    for command in commands.choices.values():
        command.add_argument("--json", metavar="FILE", help="write the numbers to FILE, for machines")
    args = parser.parse_args(argv)
    result = args.bench(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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


class InstantPolicy:
    """An engine that answers at once, and the tokens of nothing: what is left of rollout() is the event loop and the users."""
    max_new_tokens, max_context, tokenizer = 1, 10 ** 9, None

    def __init__(self):
        self.waiting = []

    def submit(self, key, prompt_ids, seed):
        self.waiting.append(key)

    def step(self):
        from rollout import Finished
        keys, self.waiting = self.waiting, []
        return [Finished(key, [1], [0.0], "stop") for key in keys]

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
    from rollout import Dialogue, rollout
    from simulator import PROMPTS, LLMClient, LLMSimulator, load_scenarios
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
            engine, began, cpu = InstantPolicy(), time.perf_counter(), time.process_time()
            rollout(engine, engine, dialogues, lambda d: Named(d.scenario, client, "challenging", None, 10, args.turns, d.seed), "", client.pool)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert all(d.end_reason == "max_turns" and len(d.turns) == args.turns for d in dialogues), [d.error for d in dialogues if d.failed]
            return seconds, cpu, [sum(own) for own in latencies.values()], sum(map(len, latencies.values()))
        run(args.dialogues)                            # connections and threads exist from here on
        runs = sorted(run(args.dialogues) for _ in range(args.repetitions))
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
          f"event loop       {runs[0][0]:7.3f} s   best of {args.repetitions}: {runs[0][0] / path:.2f} x the critical path; median "
          f"{result['wall_median_s']:.3f} s, {result['median_over_critical_path']:.2f} x; {result['cpu_ms_per_call']:.2f} ms of CPU a call\n"
          f"a serial loop    {sum(runs[0][2]):7.3f} s   (computed: the sum of the same latencies; measured on one dialogue: "
          f"{serial_wall:.3f} s for {serial_latency[0]:.3f} s of latency)")
    return result


if __name__ == "__main__":
    main()
