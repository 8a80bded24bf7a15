"""Evaluate: play the test scenarios, print the Sentient score, verify transcripts, compare two results, write a report.

Source: SAGE (arXiv 2505.02847) and RLVER (2507.03112) sec. 3.1, Table 1. Score = mean final emotion (points 0-100),
success = share of dialogues that end at >= 100, failure = share that end below 10 (both in percent).
On the published SAGE files this gives the leaderboard: GPT-4.1 68.2 / 35 / 13, rounded half up (68.15 -> 68.2).
Differs from SAGE in:
  1) every number has a 95 % interval. The repetitions of a scenario are alike, so they count as ONE cluster:
     SE^2 = G/(G-1) * sum over the G scenarios of (sum of its deviations from the mean)^2 / n^2, which is sd^2/n without
     repetitions and the SE of the scenario means when all have equally many. Success and failure: Wilson's interval
     with the effective n = sd^2/SE^2. The 8 needs of one scripted event are taken as independent scenarios.
  2) a dialogue whose simulator failed for good is neither a 0 nor hidden: left out, counted, headline "incomplete".
  3) each result holds the settings that made it; results of different simulators are not compared (user cases A1, A2).
Run: python evaluate.py --model runs/tiny-sft --json before.json             # plays; prints reference players beside it
     python evaluate.py --transcripts FILE.jsonl --verify                    # ours, or a published SAGE result file
     python evaluate.py --compare before.json after.json
     python evaluate.py --report runs/NAME
"""
import argparse
import hashlib
import json
import math
import shutil
import string
import subprocess
import sys
from collections import Counter, defaultdict
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from pathlib import Path

import numpy as np

import simulator

ROOT = Path(__file__).resolve().parent
METRICS = {"score": lambda emotion: emotion, "success": lambda emotion: 100 * (emotion >= 100),
           "failure": lambda emotion: 100 * (emotion < 10)}  # final emotion -> what is averaged
# Settings that make the user: results that differ here are on different scales. The policy's may differ, but not unseen.
SIMULATOR_SIDE = ("simulator", "difficulty", "start_emotion", "clamp", "max_turns", "scenarios_sha256", "prompts_sha256",
                  "simulator_model", "simulator_format")
AGENT_SIDE = ("think", "greedy", "temperature", "max_new_tokens", "engine", "repetitions", "seed", "code_version")
BEHAVIOUR = ("mean_turns", "reply_tokens", "thought_tokens", "format_rate", "repeat_rate")
CURVES = ("emotion", "success", "failure", "format_rate", "repeat_rate", "response_len", "turns")  # drawn first
# what scoring and verifying need of a transcript, and of its turns
FIELDS = {"scenario": str, "intention": str, "start_emotion": int, "max_turns": int, "final_emotion": int, "turns": list}
TURN_FIELDS = {"reply": str, "user": str, "change": int, "emotion": int, "raw": list, "flags": list}


def main(argv=None):
    """Exit code 0: fine; 1: no score, or a transition does not verify; 2: the user's error, in one line."""
    args = parse_args(argv)
    try:
        if args.report:
            print(write_report(args.report))
            return 0
        for path in filter(None, (args.json, args.save_transcripts)):  # now, not after an hour of playing
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        if args.compare:
            result = compare(*map(read_result, args.compare), force=args.force)
            print("\n".join(result["notes"]))
            print_table(comparison_table(result))
        else:
            result = score(args)
            print_summary(result)
        if args.json:
            Path(args.json).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return 0 if args.compare or result["score"] is not None and not result.get("faults") else 1
    except (ValueError, OSError) as error:
        print("evaluate.py:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def score(args):
    """Play, or read a file; returns the summary."""
    if args.transcripts:
        transcripts = read_transcripts(args.transcripts)
        settings, references = settings_of_file(args.transcripts, transcripts), {}
    else:
        scenarios = simulator.load_scenarios(args.scenarios)[:args.limit]
        make_user, client = simulator.users_of(args)
        settings, references = settings_of_run(args), {}
        if args.simulator == "scripted":  # what players that know the rules get, so that a score can be read
            references = {name: mean([simulator.play_reference(name, scenario, args.difficulty, args.start_emotion,
                                                               args.max_turns, args.seed) for scenario in scenarios])
                          for name in simulator.REFERENCE_PLAYERS}
        transcripts = play(args, scenarios, make_user, client)
    if args.save_transcripts:
        lines = (json.dumps(transcript, ensure_ascii=False) + "\n" for transcript in transcripts)
        Path(args.save_transcripts).write_text("".join(lines), encoding="utf-8")
    return (summarize(transcripts, settings, references) | (verify(transcripts) if args.verify else {})
            | ({"simulator": client.take_counts()} if args.model and client else {}))


def play(args, scenarios, make_user, client):
    """Let the policy talk to every scenario; returns transcripts (dicts, see rollout.Dialogue.to_dict)."""
    import rollout  # here: scoring files needs no torch
    dialogues = rollout.play_scenarios(
        args.model, scenarios, make_user=make_user, pool=client and client.pool, max_failures=args.max_simulator_failures, think=args.think,
        temperature=args.temperature, max_new_tokens=args.max_new_tokens, max_turns=args.max_turns,
        start_emotion=args.start_emotion, repetitions=args.repetitions, seed=args.seed, desc="evaluate", engine=args.engine)
    return [dialogue.to_dict() for dialogue in dialogues]


# ---- settings: what must be known to get the same numbers again ----

def settings_of_run(args):
    names = ("model", "simulator", "simulator_model", "simulator_url", "simulator_format", "difficulty", "start_emotion", "max_turns",
             "scenarios", "limit", "think", "greedy", "temperature", "max_new_tokens", "engine", "repetitions",
             "seed")  # by name: a key or token must never reach a file
    settings = {name: getattr(args, name) for name in names} | {"clamp": 10}
    if args.simulator == "scripted":
        settings |= dict.fromkeys(("simulator_model", "simulator_url", "simulator_format"), "")
    prompts = [path for path in sorted((ROOT / "prompts").rglob("*")) if path.suffix in (".txt", ".json")]
    for name, paths in (("scenarios_sha256", [args.scenarios]), ("prompts_sha256", prompts)):
        settings[name] = hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()
    if shutil.which("git"):
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        settings["code_version"] = git.stdout.strip() or None
    return settings


def settings_of_file(path, transcripts):
    """What a transcript file tells by itself; SAGE names its judge in the file name."""
    judge, found, _ = Path(path).name.partition("_based_simulator__")
    settings = {"transcripts": str(path), "simulator": judge if found else None, "clamp": 10}
    for key in ("start_emotion", "max_turns"):
        values = sorted({transcript[key] for transcript in transcripts})
        settings[key] = values[0] if len(values) == 1 else values
    return settings


# ---- transcripts: ours, and the published SAGE files as if they were ours ----

def read_transcripts(path):
    """Every line of the file as a transcript; "where" is added (file:line). ValueError names a line that is not one."""
    transcripts = []
    for where, row in read_jsonl(path):
        try:
            transcripts.append(check_transcript(from_sage(row) if "emo_point" in row else row) | {"where": where})
        except KeyError as error:
            raise ValueError(f"{where}: field {error} is missing") from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: no transcript: {error}") from None
    if not transcripts:
        raise ValueError(f"{path}: no dialogue in it")
    return transcripts


def read_jsonl(path):
    """The (file:line, object) pairs of a JSONL file."""
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", dict(json.loads(line))
            except (TypeError, ValueError) as error:  # broken JSON, broken UTF-8, or no object
                raise ValueError(f"{path}:{number}: not a JSON object ({error})") from None


def from_sage(row):
    """A published dialogue in our form. Its history is user, agent, user, ...; an agent line at the end was never felt."""
    opening, *rest = row["history"]
    turns = []
    for agent, user in zip(rest[::2], rest[1::2]):
        inner = "\n".join(str(user["planning"].get(key, "")) for key in ("activity", "TargetCompletion", "analyse"))
        turns.append({"thought": agent.get("think"), "reply": agent["content"], "change": user["planning"]["change"],
                      "emotion": user["emotion-point"], "inner": inner, "user": user["content"], "raw": [], "flags": []})
    end = simulator.end_of(row["emo_point"], len(turns), 9, turns[-1]["user"] if turns else "")
    return {"scenario": row["id"], "intention": simulator.intention_of(row["task"]), "character": row.get("character"),
            "start_emotion": opening["emotion-point"], "max_turns": 9, "opening": opening["content"], "turns": turns,
            "final_emotion": row["emo_point"], "end_reason": end or "farewell"}  # not stored; SAGE: a farewell word anywhere


def check_transcript(transcript):
    """The transcript, if each field that scoring and verifying need is there and of its kind."""
    if transcript["end_reason"] not in simulator.END_REASONS:
        raise ValueError(f"unknown end_reason {transcript['end_reason']!r}")
    lost = transcript["end_reason"] in ("simulator_failed", "context_full")  # then the last reply has no emotion
    for row, fields in [(transcript, FIELDS), *((turn, TURN_FIELDS) for turn in transcript["turns"])]:
        for field, kind in fields.items():
            if type(row[field]) is not kind and not (lost and row[field] is None and field in ("change", "emotion")):
                raise ValueError(f"field {field!r} cannot be {row[field]!r}")
    simulator.intention_of(transcript["intention"])
    if not 0 <= transcript["final_emotion"] <= 100:
        raise ValueError(f"final_emotion {transcript['final_emotion']} is not in 0..100")
    return transcript


def scored_turns(transcript):
    """Turns that the user felt: the last one is not among them if the simulator failed or the context was full."""
    return [turn for turn in transcript["turns"] if None not in (turn["change"], turn["emotion"])]


def failed(transcript):
    """No score: the simulator failed for good, or no reply was ever felt (the context was full at once)."""
    return transcript["end_reason"] == "simulator_failed" or not scored_turns(transcript)


def verify(transcripts):
    """Derive every emotion again: change from the raw texts, then the emotion rule, then the rule of the end.

    Each transition is judged from the RECORDED emotion before it, so that one wrong number is not eight faults.
    """
    transitions, wrong, faults = 0, 0, []
    for transcript in transcripts:
        where, emotion, end = transcript.get("where", transcript["scenario"]), transcript["start_emotion"], None
        for number, turn in enumerate(scored_turns(transcript), 1):
            if end:
                faults.append(f"{where}: turn {number}: goes on after {end}")
            change = derive_change(turn)
            expected = None if change is None else simulator.move_emotion(emotion, change)
            transitions += 1
            if turn["emotion"] != expected or np.clip(change, -10, 10) != np.clip(turn["change"], -10, 10):
                wrong += 1
                faults.append(f"{where}: turn {number}: expected {emotion} -> {expected} (change {change}), "
                              f"got {turn['emotion']} (change {turn['change']})")
            emotion = turn["emotion"]
            end = simulator.end_of(emotion, number, transcript["max_turns"], turn["user"])
        if transcript["final_emotion"] != emotion:
            faults.append(f"{where}: final_emotion: expected {emotion}, got {transcript['final_emotion']}")
        # no rule here tells a failure, a full context, or SAGE's farewell word anywhere in the message
        if transcript["end_reason"] != end and (end or transcript["end_reason"] in ("satisfied", "gave_up", "max_turns")):
            faults.append(f"{where}: end_reason: expected {end}, got {transcript['end_reason']}")
    return {"transitions": transitions, "transitions_ok": transitions - wrong, "faults": faults}


def derive_change(turn):
    """The change that the simulator's raw texts state (the first appraisal that parses); None if none does."""
    if "unparsed" in turn["flags"]:  # asked three times in vain: counts as no change
        return 0
    for raw in turn["raw"]:                  # appraisals come first; the reply that follows never reads as one
        try:
            return simulator.parse_appraisal(raw).change
        except simulator.ParseError:
            continue  # a failed attempt, or the raw text of the user's message
    return None if turn["raw"] else turn["change"]


# ---- the numbers ----

def summarize(transcripts, settings=None, references=None):
    """Everything that is printed and stored; the keys are stable. n: scored dialogues; failed: those without a score."""
    scored = [t for t in transcripts if not failed(t)]
    lost = len(transcripts) - len(scored)
    groups = {name: [t for t in scored if t["intention"] == name] for name in simulator.INTENTIONS}
    turns = [turn for transcript in scored for turn in scored_turns(transcript)]
    replies = [[turn["reply"].strip() for turn in scored_turns(transcript)] for transcript in scored]
    split = [turn for turn in turns if {"tokens", "thought_tokens"} <= turn.keys()]
    return {
        **rates(scored), "failed": lost, "incomplete": lost > 0,
        "per_intention": {name: rates(group) for name, group in groups.items() if group},
        "mean_turns": mean([len(scored_turns(transcript)) for transcript in scored]),
        "reply_tokens": mean([turn["tokens"] - turn["thought_tokens"] for turn in split]),
        "thought_tokens": mean([turn["thought_tokens"] for turn in split]),
        "format_rate": mean([turn["format_ok"] for turn in turns if "format_ok" in turn]),
        "repeat_rate": mean([reply in said[:place] for said in replies for place, reply in enumerate(said)]),
        "end_reasons": dict(Counter(t["end_reason"] for t in transcripts).most_common()),
        "flags": dict(Counter(flag for t in transcripts for turn in t["turns"] for flag in turn["flags"]).most_common()),
        "references": references or {}, "settings": settings or {},
        "dialogues": [[t["scenario"], t.get("repetition", 0), None if failed(t) else t["final_emotion"], t["end_reason"]]
                      for t in transcripts],
    }


def rates(transcripts):
    """Score, success and failure with their intervals (module docstring, 1). By hand: 50 x 0 and 50 x 100 -> SE 5.03."""
    scenarios, result = [transcript["scenario"] for transcript in transcripts], {"n": len(transcripts)}
    for name, metric in METRICS.items():
        values = [metric(transcript["final_emotion"]) for transcript in transcripts]
        centre, (se, effective_n) = mean(values), clustered_se(values, scenarios)
        if name == "score":
            result["score_se"], ci = se, None if se is None else [max(0.0, centre - 1.96 * se), min(100.0, centre + 1.96 * se)]
        else:
            ci = wilson(centre, effective_n) if values else None
        result |= {name: centre, f"{name}_ci": ci}
    return result


def mean(values):
    """Exact quotient of integers, as half_up() needs; None of nothing."""
    return sum(values) / len(values) if values else None


def clustered_se(values, clusters):
    """Standard error of the plain mean when values of one cluster are alike (module docstring, 1), None below 2 clusters;
    and how many independent values tell as much: from one a cluster (also if all are equal: nothing is known) to all."""
    sums, n, centre = defaultdict(float), len(values), mean(values)
    for value, cluster in zip(values, clusters):
        sums[cluster] += value - centre
    groups = len(sums)
    if groups < 2:
        return None, groups
    se = math.sqrt(groups / (groups - 1) * sum(s * s for s in sums.values())) / n
    return se, min(max(float(np.var(values, ddof=1)) / se**2, groups), n) if se else groups


def wilson(percent, n, z=1.96):
    """Wilson's 95 % interval of a share, in percent; it stays inside 0..100, at 0 and 100 % too."""
    p = percent / 100
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [100 * max(0.0, (centre - half) / (1 + z * z / n)), 100 * min(1.0, (centre + half) / (1 + z * z / n))]


def compare(a, b, force=False, resamples=10_000, seed=0):
    """b - a on the scenarios that both have: paired bootstrap over scenarios, whose repetitions are averaged first.

    a, b: results of summarize(). p: twice the smaller share of resampled differences on one side of 0 (at most 1; never 0).
    ValueError if the users were different people (SIMULATOR_SIDE), unless forced, or if nothing is shared.
    """
    def differing(keys):
        return {key: (a["settings"].get(key), b["settings"].get(key)) for key in keys
                if a["settings"].get(key) != b["settings"].get(key)}

    def say(pairs):
        return ", ".join(f"{key} {str(x)[:24]} / {str(y)[:24]}" for key, (x, y) in pairs.items())
    mixed = {key: pair for key, pair in differing(SIMULATOR_SIDE).items() if None not in pair}
    if mixed and not force:
        raise ValueError(f"not comparable, the simulated users differ: {say(mixed)} (--force compares all the same)")
    unknown = [key for key in SIMULATOR_SIDE if None in (a["settings"].get(key), b["settings"].get(key))]
    sides = defaultdict(list), defaultdict(list)
    for side, result in zip(sides, (a, b)):
        for scenario, _, emotion, _ in result["dialogues"]:
            if emotion is not None:
                side[scenario].append(emotion)
    shared = sorted(sides[0].keys() & sides[1].keys())
    left_out = [len(side) - len(shared) for side in sides]
    if not shared:
        raise ValueError("nothing to compare: the two results share no scored scenario")
    notes = [mixed and f"WARNING: THE SIMULATED USERS DIFFER, no fair comparison: {say(mixed)}",
             unknown and f"not recorded, so not checked: {', '.join(unknown)}",
             differing(AGENT_SIDE) and f"the policies' settings differ: {say(differing(AGENT_SIDE))}",
             (a["incomplete"] or b["incomplete"]) and "INCOMPLETE: failed dialogues are left out",
             f"{len(shared)} scenarios in both; left out: {left_out[0]} only in A, {left_out[1]} only in B"]
    comparison = {"n": len(shared), "left_out": left_out, "notes": [note for note in notes if note]}
    picks = np.random.default_rng(seed).integers(0, len(shared), (resamples, len(shared)))
    for name, metric in METRICS.items():
        before, after = (np.array([mean([*map(metric, side[scenario])]) for scenario in shared]) for side in sides)
        difference, resampled = float((after - before).mean()), (after - before)[picks].mean(axis=1)
        comparison[name] = {"a": float(before.mean()), "b": float(after.mean()), "difference": difference, "ci": None, "p": None}
        if len(shared) > 1:  # resampling one scenario says nothing
            tail = 1 + min((resampled <= 0).sum(), (resampled >= 0).sum())
            comparison[name]["ci"] = np.percentile(resampled, [2.5, 97.5]).tolist()
            comparison[name]["p"] = min(1.0, 2 * float(tail) / (1 + resamples))
    return comparison


def read_result(path):
    """A --json file, or any transcript file, as a summary."""
    try:
        result = json.loads(Path(path).read_bytes())
    except ValueError:  # many lines: transcripts
        result = None
    if isinstance(result, dict) and "dialogues" in result:
        if summarize([]).keys() - result.keys() or not all(isinstance(row, list) and len(row) == 4 for row in result["dialogues"]):
            raise ValueError(f"{path}: not a whole result of evaluate.py --json")
        return result
    transcripts = read_transcripts(path)
    return summarize(transcripts, settings_of_file(path, transcripts))


# ---- printing: the same tables on the terminal and in the report ----

def half_up(value, digits=1):
    """61.25 -> 61.3 as on the leaderboard. repr of a quotient of integers shows a half as a half (28.95, not 28.9499...)."""
    return "-" if value is None else str(Decimal(repr(float(value))).quantize(Decimal(10) ** -digits, ROUND_HALF_UP))


def with_interval(value, ci):
    return f"{half_up(value)} ({half_up(ci[0])} to {half_up(ci[1])})" if ci else half_up(value)


def headline(summary):
    if summary["score"] is None:
        return f"no score: all {summary['failed']} dialogues failed"
    text = " / ".join([half_up(summary["score"]), *(half_up(summary[key]).removesuffix(".0") for key in ("success", "failure"))])
    lost = f"  INCOMPLETE: {summary['failed']} more dialogues failed" if summary["incomplete"] else ""
    return f"score / success / failure: {text}{lost}"


def summary_tables(summary):
    """Tables as rows of text: all and each hidden intention; reference players; behaviour and counters."""
    yield [("intention", "n", "SE", "score (95 %)", "success % (>= 100)", "failure % (< 10)")] + [
        (name, str(row["n"]), half_up(row["score_se"], 2), *(with_interval(row[key], row[key + "_ci"]) for key in METRICS))
        for name, row in {"all": summary, **summary["per_intention"]}.items()]
    if summary["references"]:
        yield [("reference player", "score")] + [(name, half_up(value)) for name, value in summary["references"].items()]
    yield ([("behaviour and counters", "")] + [(key, half_up(summary[key], 2)) for key in BEHAVIOUR]
           + [(f"{kind}: {name}", str(count)) for kind in ("end_reasons", "flags") for name, count in summary[kind].items()]
           + [(name, str(count)) for name, count in summary.get("simulator", {}).items()])


def comparison_table(comparison):
    return [("", "A", "B", "B - A (95 %)", "p")] + [
        (name, half_up(row["a"]), half_up(row["b"]), with_interval(row["difference"], row["ci"]), half_up(row["p"], 4))
        for name, row in ((name, comparison[name]) for name in METRICS)]


def print_summary(summary):
    settings = summary["settings"]
    name = hashlib.sha256(json.dumps([settings.get(key) for key in SIMULATOR_SIDE]).encode()).hexdigest()[:8]
    print(f"benchmark {name}: " + ", ".join(f"{key} {str(value)[:8] if 'sha256' in key else value}"
                                            for key, value in settings.items() if value not in (None, "")))
    print(headline(summary))
    for table in summary_tables(summary):
        print_table(table)
    if "transitions" in summary:
        print(f"transitions: {summary['transitions_ok']} of {summary['transitions']} verify, {len(summary['faults'])} faults",
              *summary["faults"][:5], sep="\n  ")


def print_table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"evaluate.py: {message} (--help lists the flags)\n")  # one line
    what = parser.add_argument_group("what to do (one of these)").add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="play the scenarios with this policy (a run folder, a Hugging Face folder or name)")
    what.add_argument("--transcripts", metavar="FILE", help="score this transcript file: ours, or a published SAGE result file")
    what.add_argument("--compare", nargs=2, metavar=("A", "B"), help="B - A of two --json or transcript files, paired bootstrap over scenarios")
    what.add_argument("--report", metavar="RUN", help="write RUN/report.html from a run folder")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--verify", action="store_true", help="derive every emotion again from the recorded changes; exit code 1 if one differs")
    out.add_argument("--json", metavar="FILE", help="write the numbers to FILE, for machines")
    out.add_argument("--save-transcripts", metavar="FILE", help="write the dialogues to FILE, one a line")
    out.add_argument("--force", action="store_true", help="with --compare: also compare results of different simulated users")
    user = parser.add_argument_group("the simulated user (SAGE's setting is the default)")
    user.add_argument("--scenarios", default=str(ROOT / "prompts/en/test.jsonl"), metavar="FILE", help="scenario file (default: the held-out events of prompts/en/test.jsonl)")
    simulator.add_simulator_flags(user)
    user.add_argument("--difficulty", choices=("vanilla", "challenging"), default="challenging", help="how much the user hints at its need (default: challenging; RLVER 3.4)")
    user.add_argument("--start-emotion", type=int, choices=range(10, 100), default=40, metavar="POINTS", help="emotion at the start (default: 40, SAGE; RLVER trains from 30)")
    user.add_argument("--max-turns", type=positive, default=9, metavar="N", help="scored replies at most (default: 9, SAGE; RLVER trains with 8)")
    agent = parser.add_argument_group("the policy")
    agent.add_argument("--think", action=argparse.BooleanOptionalAction, help="think first, then say (default: as the model's policy.json says, else no)")
    agent.add_argument("--greedy", action="store_true", help="always the likeliest token (default: sample; the papers do not state it)")
    agent.add_argument("--temperature", type=float, help="sampling temperature (default: the model's policy.json, else 1.0, RLVER's rollouts)")
    agent.add_argument("--max-new-tokens", type=positive, metavar="N", help="tokens of a reply with its thought (default: the model's policy.json, else 1024; RLVER: 5000)")
    agent.add_argument("--engine", choices=("auto", "hf", "vllm"), default="auto", help="vllm, or hf (plain transformers) (default: auto, vllm where there is a GPU and vllm)")
    run = parser.add_argument_group("the run")
    run.add_argument("--repetitions", type=positive, default=1, metavar="N", help="dialogues of each scenario (default: 1, SAGE)")
    run.add_argument("--limit", type=positive, metavar="N", help="only the first N scenarios (default: all)")
    run.add_argument("--seed", type=int, default=0, help="of the sampling and of the simulator (default: 0)")
    args = parser.parse_args(argv)
    how = {"think": False, "temperature": 1.0, "max_new_tokens": 1024}
    if args.model and (checkpoints := sorted(Path(args.model).glob("checkpoints/step-*[0-9]"))):  # a run folder
        args.model = str(checkpoints[-1])
    if args.model and (Path(args.model) / "policy.json").exists():  # how train.py let this policy speak
        how |= json.loads((Path(args.model) / "policy.json").read_bytes())
    for name, value in how.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.temperature *= not args.greedy
    return args


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
