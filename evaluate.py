"""Evaluate: play the test scenarios, print the Sentient score, verify transcripts, compare two results, write a report.

Source: SAGE (arXiv 2505.02847) and RLVER (2507.03112) sec. 3.1, Table 1. Score = mean final emotion (points 0-100),
success = share of dialogues that end at >= 100, failure = share that end below 10 (both in percent).
On the published SAGE files this gives the leaderboard: GPT-4.1 68.2 / 35 / 13, rounded half up (68.15 -> 68.2).
Differs from SAGE in:
  1) score, success, failure and collapse rate have a 95 % interval. The repetitions of a scenario are alike, so they count as ONE cluster:
     Student's t with G - 1 degrees; SE^2 = G/(G-1) * sum over the G scenarios of (sum of its deviations from the mean)^2 / n^2,
     which is sd^2/n without repetitions and the SE of the scenario means when all have equally many. Success and failure: Wilson's interval
     with the effective n = sd^2/SE^2. The 8 needs of one scripted event are taken as independent scenarios.
  2) a dialogue whose simulator failed for good is neither a 0 nor hidden: left out, counted, headline "incomplete".
  3) each result holds the settings that made it; results of different simulators are not compared (user cases A1, A2).
The judge is judge.py, the page report.py.
Run: python evaluate.py --model runs/tiny-sft/think --json before.json       # plays; prints reference players beside it
     python evaluate.py --rerun before.json                                  # the same again, from that file alone
     python evaluate.py --transcripts FILE.jsonl --verify                    # ours, or a published SAGE result file
     python evaluate.py --compare before.json after.json
     python evaluate.py --report runs/NAME
"""
import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np

import simulator

ROOT = Path(__file__).resolve().parent
METRICS = {"score": lambda emotion: emotion, "success": lambda emotion: 100 * (emotion >= 100),
           "failure": lambda emotion: 100 * (emotion < 10)}  # final emotion -> what is averaged
# Settings that make the user: results that differ here are on different scales. The policy's may differ, but not unseen.
SIMULATOR_SIDE = ("simulator", "difficulty", "start_emotion", "clamp", "max_turns", "scenarios_sha256", "prompts_sha256",
                  "simulator_model", "simulator_format", "simulator_max_tokens", "end_rules")
AGENT_SIDE = ("think", "greedy", "temperature", "max_new_tokens", "engine", "repetitions", "seed", "seeds", "system_prompt_sha256", "code_version")
NOTED = ("code_version", "threads")     # what may change a rare token: said, not refused
JUDGE_SIDE = ("judge", "judge_prompts_sha256")
# flags that do something beside an action; --model takes all but --out and --force, --rerun what is not PLAYED_WITH
TAKES = {"compare": ("json", "force"), "report": ("out", "force"), "watch": ("out", "force"),
         "transcripts": ("verify", "json", "force", "save_transcripts", "scenarios", "train_scenarios", "seed", "judge", "judge_url", "judge_cache",
                         "simulator_concurrency", "simulator_timeout", "simulator_max_tokens")}
# flags that a result stores and --rerun sets again; by name, because a key or token must never reach a file
PLAYED_WITH = ("model", "simulator", "simulator_model", "simulator_url", "simulator_format", "simulator_max_tokens", "difficulty", "start_emotion",
               "max_turns", "scenarios", "train_scenarios", "limit", "think", "greedy", "temperature", "max_new_tokens", "engine", "repetitions",
               "seed", "seeds", "judge", "judge_url")
FEWEST = 6                      # scenarios of a comparison that has an interval: 2 / 2^6 = 0.03
END_RULES = "satisfied >= 100, gave_up < 10, max_turns, farewell as the message's close"
BEHAVIOUR = ("mean_turns", "reply_tokens", "thought_tokens", "format_rate", "repeat_rate", "collapse_rate", "need_named", "hint_named")
GROUPS = {"per_intention": "intention", "per_character": "character", "per_kind": "kind"}     # key of a summary -> field of a transcript



def main(argv=None):
    """Exit code 0: fine; 1: no score, a transition does not verify, or a rerun differs; 2: the user's error, in one line; 130: Ctrl-C."""
    try:
        args = parse_args(argv)
        if args.report or args.watch:
            import report  # here: it imports this file
            if args.watch:
                report.watch(args.watch, args.out, args.force)
            else:
                print(report.write_report(args.report, args.out, args.force))
            return 0
        check_files(args)
        result = compare(*(read_result(path, args.force) for path in args.compare), force=args.force) if args.compare else score(args)
        if args.json:  # before printing: the reader of a pipe may be gone
            simulator.write_whole(args.json, json.dumps(result, ensure_ascii=False, indent=1) + "\n")
        if args.compare:
            print("\n".join(result["notes"]))
            print_table(comparison_table(result))
        else:
            print_summary(result)
        return 0 if args.compare or result["score"] is not None and not result.get("faults") and not result.get("rerun_differs") else 1
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (ValueError, OSError) as error:
        print("evaluate.py:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate.py: stopped; the same command goes on from what --save-transcripts (dialogues), --simulator-cache and --judge-cache "
              "(answers) have kept", file=sys.stderr)
        return 130


def check_files(args):
    """What cannot be written, or would be written over, is said now and not after an hour of playing. OSError, ValueError."""
    read = (args.transcripts, args.rerun, args.scenarios, args.train_scenarios, *(args.compare or ()))
    taken = {Path(path).resolve(): "is read" for path in filter(None, read)}
    for name in ("json", "save_transcripts", "judge_cache", "simulator_cache"):
        if not getattr(args, name):
            continue
        path = Path(getattr(args, name))
        if path.resolve() in taken:
            raise ValueError(f"--{name.replace('_', '-')} {path}: this file {taken[path.resolve()]}; name another")
        taken[path.resolve()] = f"is --{name.replace('_', '-')} too"
        if path.exists() and not path.is_file() or str(path).startswith(("/dev/", "/proc/")):
            raise ValueError(f"--{name.replace('_', '-')} {path} is no plain file")
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            open(path, "ab").close()
        tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=path.name).close()     # it will be written beside itself first


def score(args):
    """Read or play; judge, if asked; keep; count. Returns the summary."""
    judging = None
    if args.judge:
        import judge  # here: it imports this file
        judging = judge.client_of(args)
    if args.train_scenarios:
        simulator.load_scenarios(args.train_scenarios)  # a broken file is said now, not after an hour of playing
    transcripts, others, settings, more = read_to_score(args) if args.transcripts else play_to_score(args)
    if judging:  # before the summary, which holds what the judge found
        judge.judge_dialogues(judging, transcripts, args.seed)
    if args.save_transcripts:
        write_lines(args.save_transcripts, transcripts + others)
    if not (judging or args.transcripts):  # the file of a run may hold what a judge of another call found
        transcripts = without_judge(transcripts)
    result = summarize(transcripts, settings or settings_of_file(args.transcripts, transcripts, args.force)) | more
    if args.verify:
        result |= verify(transcripts)
    if judging:
        result.setdefault("judge", judge.findings_of([]))["calls"] = judging.take_counts()
    if args.train_scenarios:
        unseen = of_unseen_personas(transcripts, args.scenarios, args.train_scenarios)
        result["unseen_persona"] = rates([transcript for transcript in unseen if not failed(transcript)])
    if args.seeds > 1:
        seeds = defaultdict(list)
        for transcript in transcripts:
            if not failed(transcript):
                seeds[str(args.seed + transcript["repetition"] // args.repetitions)].append(transcript["final_emotion"])
        result["per_seed"] = {seed: mean(finals) for seed, finals in seeds.items()}
    if args.rerun:
        old, said_apart = read_result(args.rerun), {"settings", "simulator", "judge", "rerun_differs"}
        result["rerun_differs"] = sorted(key for key in result.keys() & old.keys() - said_apart if result[key] != old[key])
    return result


def read_to_score(args):
    """-> transcripts of a file, [], None (its settings are known after judging), {}. What is wrong is said before a judge is paid."""
    if args.save_transcripts and Path(args.save_transcripts).exists():
        raise ValueError(f"{args.save_transcripts} exists; name a new file")
    transcripts = read_transcripts(args.transcripts)
    settings_of_file(args.transcripts, transcripts, args.force)
    if args.train_scenarios:
        of_unseen_personas(transcripts, args.scenarios, args.train_scenarios)
    return transcripts, [], None, {}


def play_to_score(args):
    """-> transcripts, what else --save-transcripts holds, settings, {what only playing knows: reference players, the LLM user's calls}."""
    scenarios = simulator.load_scenarios(args.scenarios)[:args.limit]
    make_user, client = simulator.users_of(args)
    settings, more = settings_of_run(args), {}
    if args.rerun:
        check_unchanged(args.rerun, settings)
    if args.simulator == "scripted":  # what players that know the rules get, so that a score can be read
        more["references"] = {name: mean([simulator.play_reference(name, scenario, args.difficulty, args.start_emotion, args.max_turns, args.seed)
                                          for scenario in scenarios]) for name in simulator.REFERENCE_PLAYERS}
    transcripts, others = play(args, scenarios, make_user, client, settings)
    if client:
        more["simulator"] = client.take_counts()
    return transcripts, others, settings, more


def play(args, scenarios, make_user, client, settings):
    """Let the policy talk to every scenario; returns transcripts (dicts, see rollout.Dialogue.to_dict), and what else the file holds.

    --save-transcripts FILE grows with every dialogue that ends. What stands in it, played with the same settings, is not
    played again, unless its user had failed; what a smaller --limit or --seeds does not ask for stays in it.
    """
    import rollout  # here: scoring files needs no torch
    # what chooses among dialogues, reads them, or names the same weights, changes none
    by_hash = {name for name in ("model", "scenarios") if f"{name}_sha256" in settings}
    played_with = {key: value for key, value in settings.items() if key not in {"limit", "seeds", "simulator_url"} | by_hash
                   and not key.startswith(("judge", "train_scenarios"))}
    path, known = args.save_transcripts and Path(args.save_transcripts), []
    if path and path.exists():
        if args.rerun:
            raise ValueError(f"{path} exists; a rerun plays everything again: name a new file")
        simulator.mend_last_line(path, b'{"scenario": ', "--save-transcripts")
        known = [*checked_transcripts(path)]
        if cut := next((row for row in known if None in (row.get("repetition"), row.get("seed"))), None):
            raise ValueError(f"{cut['where']}: no dialogue of evaluate.py (repetition or seed is missing); name another --save-transcripts")
        for row in known:
            was = row.get("played_with") or {}
            if other := differing(was, played_with, (was | played_with).keys() - NOTED):
                raise ValueError(f"{path} holds dialogues of other settings ({listed(other)}); name another --save-transcripts")
        for key in NOTED:
            if was := {str(row["played_with"].get(key)) for row in known} - {str(played_with.get(key))}:
                print(f"note: {key} was {', '.join(sorted(was))}, is {played_with.get(key)}")
        once = {(row["scenario"], row["seed"]): {key: value for key, value in row.items() if key != "where"}
                for row in reversed(known) if not failed(row)}       # two processes may have played the same dialogue
        known = [*once.values()][::-1]
        write_lines(path, known)
    with open(path or os.devnull, "a", encoding="utf-8", errors="backslashreplace") as file:
        def keep(dialogue):
            file.write(json.dumps(dialogue.to_dict() | {"played_with": played_with}, ensure_ascii=False) + "\n")
            file.flush()
        dialogues = rollout.play_scenarios(
            args.model, scenarios, make_user=make_user, pool=client and client.pool, max_failures=args.max_simulator_failures, think=args.think,
            temperature=args.temperature, max_new_tokens=args.max_new_tokens, max_turns=args.max_turns,
            start_emotion=args.start_emotion, repetitions=args.repetitions, seed=args.seed, desc="evaluate", engine=args.engine,
            seeds=args.seeds, done={(row["scenario"], row["seed"]) for row in known}, on_end=keep)
    played = [dialogue.to_dict() | {"played_with": played_with} for dialogue in dialogues]
    place = {scenario.id: number for number, scenario in enumerate(scenarios)}
    asked = lambda row: row["scenario"] in place and row["repetition"] < args.repetitions * args.seeds
    wanted, others = [row for row in known if asked(row)], [row for row in known if not asked(row)]
    return sorted(wanted + played, key=lambda row: (row["repetition"], place[row["scenario"]])), others


def of_unseen_personas(transcripts, scenarios, train_scenarios):
    """The dialogues whose persona no scenario of the training file has (54 of the 100 official test profiles share one)."""
    seen = {scenario.persona for scenario in simulator.load_scenarios(train_scenarios)}
    personas = {scenario.id: scenario.persona for scenario in simulator.load_scenarios(scenarios)}
    if strange := next((t["scenario"] for t in transcripts if t["scenario"] not in personas), None):
        raise ValueError(f"--train-scenarios compares personas, but scenario {strange!r} is not in --scenarios {scenarios}")
    return [transcript for transcript in transcripts if personas[transcript["scenario"]] not in seen]


# ---- settings: what must be known to get the same numbers again ----

def settings_of_run(args):
    import rollout
    settings = {name: getattr(args, name) for name in PLAYED_WITH} | {"clamp": 10, "end_rules": END_RULES}
    for name in ("scenarios", "train_scenarios"):  # a path inside this folder is stored as such, so that another clone finds it
        path = Path(settings[name]) if settings[name] else None
        if path and path.is_absolute() and path.is_relative_to(ROOT):
            settings[name] = str(path.relative_to(ROOT))
    settings["engine"] = "vllm" if rollout.uses_vllm(args.engine) else "hf"
    settings["threads"] = rollout.torch.get_num_threads()      # rounding, and so a rare token, may differ with their number
    if args.simulator == "scripted":
        settings |= dict.fromkeys(("simulator_model", "simulator_url", "simulator_format", "simulator_max_tokens"), "")
    else:
        settings["simulator_sampling"] = "temperature 0, a seed for every call"
    if args.judge:
        settings |= {"judge_sampling": "temperature 0, a seed for every call", "judge_prompts_sha256": judge_prompts()}
    prompts = [path for path in sorted((ROOT / "prompts").rglob("*")) if path.suffix in (".txt", ".json")]
    user = [path for path in prompts if not path.name.startswith(("judge.", "policy."))]
    agent = [path for path in prompts if path.name == f"policy.{'think' if args.think else 'plain'}.txt"]
    weights = sorted(path for path in Path(args.model).glob("*.*") if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"))
    for name, paths in (("scenarios", [args.scenarios]), ("prompts", user), ("system_prompt", agent), ("model", weights),
                        ("train_scenarios", [args.train_scenarios] * bool(args.train_scenarios))):
        if paths:  # a model by its hub name has no files here
            settings[f"{name}_sha256"] = hash_files(paths)
    if shutil.which("git"):
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        settings["code_version"] = git.stdout.strip() or None
    return settings | {"benchmark": hash_of([settings.get(key) for key in SIMULATOR_SIDE])[:8]}


def hash_files(paths):
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def hash_of(settings):
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def judge_prompts():
    return hash_files(sorted((ROOT / "prompts" / "en").glob("judge.*.txt")))


def check_unchanged(path, settings):
    """A rerun needs the files that made the result; another code version is said, not refused."""
    old = read_result(path)["settings"]
    changed = [key for key, value in old.items() if key.endswith("_sha256") and settings.get(key) != value]
    if changed:
        raise ValueError(f"--rerun {path}: {', '.join(key.removesuffix('_sha256') for key in changed)} changed since, or not here; "
                         f"the result cannot be had again from what is here (it was made with code {old.get('code_version')})")
    for key in NOTED:
        if old.get(key) != settings.get(key):
            print(f"note: {key} was {old.get(key)}, is {settings.get(key)}")


def settings_of_file(path, transcripts, force=False):
    """What the dialogues of a file say of how they were played and judged; SAGE names its user in the file name.

    ValueError: dialogues of several settings, which have no common score; forced, they are named as "mixed".
    """
    user, found, _ = Path(path).name.partition("_based_simulator__")
    settings, mixed = {"transcripts": str(path), "simulator": user if found else None, "clamp": 10}, []
    said = [(t.get("played_with") or {}) | {key: t[key] for key in ("start_emotion", "max_turns", "benchmark") if t.get(key) is not None}
            for t in transcripts]
    judged = [t["judged_by"] for t in transcripts if t.get("judged_by")]
    for rows in (said, judged):
        for key in dict.fromkeys(key for row in rows for key in row):
            values = list({json.dumps(row.get(key), sort_keys=True): row.get(key) for row in rows}.values())
            settings[key] = values[0] if len(values) == 1 else values
            if len(values) > 1 and rows is said and key not in NOTED:    # judges change no score; labelled_by() names them
                mixed.append(key)
    if mixed and not force:
        raise ValueError(f"{path} holds dialogues of different settings ({', '.join(mixed)}), which have no common score; split the file "
                         "(--force scores it all the same)")
    return settings | ({"mixed": mixed} if mixed else {})


# ---- what a file must hold, so that nothing after it meets anything else ----

# what scoring and verifying need of a transcript, and of its turns
FIELDS = {"scenario": str, "intention": str, "start_emotion": int, "max_turns": int, "final_emotion": int, "turns": list}
TURN_FIELDS = {"reply": str, "user": str, "change": int, "emotion": int, "raw": list, "flags": list}
# what may be absent or null, and must be of its kind where it is not
OPTIONAL = {"opening": str, "character": str, "kind": str, "event": str, "error": str, "judged_by": dict, "played_with": dict, "benchmark": str,
            "repetition": int, "seed": int, "judge": dict}
TURN_OPTIONAL = {"thought": str, "inner": str, "act": str, "format_ok": bool, "tokens": int, "thought_tokens": int}
# what a result holds, by example: all members of a list of one, or of a dict with the key ..., are like the one shown; 1 is a
# number, 0 a number or null, [0] a list of these or null, [1, 1] two numbers or null
RATES = {"n": 0, "score_se": 0} | {name + end: example for name in METRICS for end, example in (("", 0), ("_ci", [1, 1]))}
RESULT = RATES | dict.fromkeys((*BEHAVIOUR, "failed"), 0) | dict.fromkeys(GROUPS, {...: RATES}) | {
    "collapse_rate_ci": [1, 1], "incomplete": 1, "strategies": {...: {"turns": 1, "per_dialogue": 1, "contribution": 1}},
    **dict.fromkeys(("end_reasons", "flags", "references", "per_seed", "simulator"), {...: 0}), "unseen_persona": RATES,
    "settings": {"mixed": [""]}, "dialogues": [["", 0, 0, ""]],
    "judge": {"model": "", "asked": 0, "failed": 0, "abilities": {...: {"mean": 0, "se": 0, "n": 0}}, "points": [["", 0, 0]], "empathy": 0,
              "creative": 0, "tracking_r": 0, "tracking_error": 0}}
JUDGED = {"abilities": {...: [1, ""]}, "strategies": [[""]], "plane": [1, 1], "tracking": [0]}         # transcript["judge"]
MAY_LACK = ("per_seed", "simulator", "unseen_persona", "judge", "mixed", *JUDGED)


def is_kind(value, kind):
    return type(value) is kind and (kind is not int or abs(value) < 1e15)


def fits(value, example):
    """Whether a stored value has the shape of an example, so that no table meets anything else."""
    if isinstance(example, dict):
        if not isinstance(value, dict):
            return False
        if ... in example:
            return all(fits(member, example[...]) for member in value.values())
        return all(fits(value[key], like) if key in value else key in MAY_LACK for key, like in example.items())
    if value is None:
        return example in (0, [0], [1, 1])
    if isinstance(example, list):
        like = example * len(value) if isinstance(value, list) and len(example) == 1 else example
        return isinstance(value, list) and len(value) == len(like) and all(map(fits, value, like))
    return type(value) is str if example == "" else type(value) in (int, float, bool) and abs(value) < 1e15


# ---- transcripts: ours, and the published SAGE files as if they were ours ----

def read_transcripts(path):
    """Every line of the file as a transcript; "where" is added (file:line). ValueError names a line that is not one."""
    transcripts, seen = [*checked_transcripts(path)], {}
    if not transcripts:
        raise ValueError(f"{path}: no dialogue in it")
    for transcript in transcripts:
        first = seen.setdefault(json.dumps([transcript.get(key) for key in ("scenario", "repetition", "seed", "played_with")]), transcript["where"])
        if first != transcript["where"]:
            raise ValueError(f"{transcript['where']}: the dialogue of {first} once more (scenario, repetition and seed are equal); "
                             "it would count twice")
    return transcripts


def checked_transcripts(path):
    """The transcripts of a file that may be empty."""
    for where, row in read_jsonl(path):
        try:
            yield check_transcript(from_sage(row) if "emo_point" in row else row) | {"where": where}
        except KeyError as error:
            raise ValueError(f"{where}: field {error} is missing") from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: no transcript: {error}") from None


def write_lines(path, rows):
    simulator.write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path, growing=False):
    """The (file:line, object) pairs of a JSONL file; of a growing one without a last line that has no end yet."""
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1] if growing else lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", dict(json.loads(line))
            except (TypeError, ValueError, RecursionError) as error:  # broken JSON, broken UTF-8, or no object
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
    return {"scenario": row["id"], "intention": simulator.intention_of(row["task"]),
            "character": simulator.CHARACTERS.get(row.get("character"), row.get("character")),
            "benchmark": "SAGE", "start_emotion": opening["emotion-point"], "max_turns": 9, "opening": opening["content"], "turns": turns,
            "final_emotion": row["emo_point"], "end_reason": end or "farewell"}  # not stored; SAGE: a farewell word anywhere


def check_transcript(transcript):
    """The transcript, if each field that scoring and verifying need is there and of its kind."""
    if transcript["end_reason"] not in simulator.END_REASONS:
        raise ValueError(f"unknown end_reason {transcript['end_reason']!r}")
    lost = transcript["end_reason"] in ("simulator_failed", "context_full")  # then the last reply has no emotion
    for row, fields in [(transcript, FIELDS), *((turn, TURN_FIELDS) for turn in transcript["turns"])]:
        for field, kind in fields.items():
            if not is_kind(row[field], kind) and not (lost and row[field] is None and field in ("change", "emotion")):
                raise ValueError(f"field {field!r} cannot be {row[field]!r}")
    for row, fields in [(transcript, OPTIONAL), *((turn, TURN_OPTIONAL) for turn in transcript["turns"])]:
        for field, kind in fields.items():
            if row.get(field) is not None and not is_kind(row[field], kind):
                raise ValueError(f"field {field!r} cannot be {row[field]!r}")
    for row, field, example in [(transcript, "judge", JUDGED), *((turn, field, [""]) for turn in transcript["turns"] for field in ("raw", "flags"))]:
        if row.get(field) is not None and not fits(row[field], example):
            raise ValueError(f"field {field!r} cannot be {row[field]!r}")
    transcript |= {"intention": simulator.intention_of(transcript["intention"])}
    if not 0 <= transcript["final_emotion"] <= 100:
        raise ValueError(f"final_emotion {transcript['final_emotion']} is not in 0..100")
    return transcript


def without_judge(transcripts):
    return [{key: value for key, value in transcript.items() if key not in ("judge", "judged_by")} for transcript in transcripts]


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
    turns = [turn for transcript in scored for turn in scored_turns(transcript)]
    replies = [[turn["reply"].strip() for turn in scored_turns(transcript)] for transcript in scored]
    split = [turn for turn in turns if None not in (turn.get("tokens"), turn.get("thought_tokens"))]
    thoughts = [hit for transcript in scored for hit in thought_hits(transcript)]
    lost_hold = [100 * collapsed(transcript) for transcript in scored]
    judged = {}
    if any(transcript.get("judge") is not None for transcript in scored):
        import judge  # here: it imports this file
        judged = {"judge": judge.findings_of(scored)}
    return judged | {
        **rates(scored), "failed": lost, "incomplete": lost > 0,
        **{key: grouped(scored, field) for key, field in GROUPS.items()},
        "mean_turns": mean([len(scored_turns(transcript)) for transcript in scored]),
        "reply_tokens": mean([turn["tokens"] - turn["thought_tokens"] for turn in split]),
        "thought_tokens": mean([turn["thought_tokens"] for turn in split]),
        "format_rate": percent([turn["format_ok"] for turn in turns if turn.get("format_ok") is not None]),
        "repeat_rate": percent([reply in said[:place] for said in replies for place, reply in enumerate(said)]),
        "collapse_rate": mean(lost_hold), "collapse_rate_ci": share_ci(lost_hold, [transcript["scenario"] for transcript in scored]),
        "need_named": percent([need for need, _ in thoughts]), "hint_named": percent([hint for _, hint in thoughts]),
        "strategies": strategy_table(scored), "strategies_by": labelled_by(scored),
        "end_reasons": dict(Counter(t["end_reason"] for t in transcripts).most_common()),
        "flags": dict(Counter(flag for t in transcripts for turn in t["turns"] for flag in turn["flags"]).most_common()),
        "references": references or {}, "settings": settings or {},
        "dialogues": [[t["scenario"], t.get("repetition", 0), None if failed(t) else t["final_emotion"], t["end_reason"]]
                      for t in transcripts],
    }


def grouped(transcripts, field):
    """Rates of each intention (in the paper's order), character type, or kind of pressure."""
    names = {t.get(field) for t in transcripts if t.get(field)}
    order = [name for name in simulator.INTENTIONS if name in names] + sorted(names - simulator.INTENTIONS.keys())
    return {name: rates([t for t in transcripts if t.get(field) == name]) for name in order}


def collapsed(transcript):
    """Whether the dialogue collapsed: it ends 20 points or more below its start, or at least half of the agent's replies are
    empty or said before, word for word. Our definition, from the transcript alone, so that every user has the same one."""
    said = [turn["reply"].strip() for turn in scored_turns(transcript)]
    lost = sum(not reply or reply in said[:place] for place, reply in enumerate(said))
    return transcript["final_emotion"] <= transcript["start_emotion"] - 20 or 2 * lost >= len(said)


def thought_hits(transcript):
    """(need, hint) of each thought in the scripted world: whether it says "need X" with X the user's true wish, and whether it
    names the keyword of a hint that the user has given. This is how we measure that a thought reads the user; it knows no
    synonyms, so it means nothing for free text (there the judge asks for a number; judge.py)."""
    heard = [transcript.get("opening") or ""]
    for turn in scored_turns(transcript):
        if turn.get("thought") and scripted_heard(turn):
            words = set(simulator.words_of(turn["thought"]))
            yield (re.findall(r"\bneeds? (\w+)", turn["thought"]) == [transcript["intention"]],
                   any(keyword in words for text in heard for _, _, keyword in simulator.hints_in(text)))
        heard.append(turn["user"])


def scripted_heard(turn):
    """Whether the scripted user heard the reply: it names the act, and gives its verdict as a flag where it knows none."""
    return bool(turn.get("act") or simulator.lines("user")["thoughts"].keys() & turn["flags"])


def labelled_by(transcripts):
    """Who named the strategies: the judges, or else the scripted user; None where nobody did."""
    who = [t.get("judged_by") or {} for t in transcripts if (t.get("judge") or {}).get("strategies")]
    judges = sorted({f"{by.get('judge', 'an unknown judge')} {str(by.get('judge_prompts_sha256', ''))[:8]}".strip() for by in who})
    heard = any(scripted_heard(turn) for t in transcripts for turn in scored_turns(t))
    return " and ".join(judges) or ("the scripted user" if heard else None)


def strategy_table(transcripts):
    """strategy -> turns that use it, uses a dialogue, and its contribution: the mean change of the user's emotion (points)
    over the turns that use it (RLVER sec. 4; facts 5.7). A turn that uses two counts for both.

    Labels are the judge's, if it has read any of the dialogues, else the acts that the scripted user recognised: the two have
    different words, so a dialogue that lacks the labels of the others is left out.
    """
    judged = any((transcript.get("judge") or {}).get("strategies") for transcript in transcripts)
    changes, dialogues = defaultdict(list), 0
    for transcript in transcripts:
        turns = scored_turns(transcript)
        labels = (transcript.get("judge") or {}).get("strategies") if judged else any(map(scripted_heard, turns)) and [
            turn["act"].split(" and ") if turn.get("act") else ["(none)"] for turn in turns]
        if labels:
            dialogues += 1
            for turn, used in zip(turns, labels):
                for label in used:
                    changes[label].append(int(np.clip(turn["change"], -10, 10)))
    return {label: {"turns": len(values), "per_dialogue": len(values) / dialogues, "contribution": mean(values)}
            for label, values in sorted(changes.items(), key=lambda item: -len(item[1]))}


def rates(transcripts):
    """Score, success and failure with their intervals (module docstring, 1). By hand: 50 x 0 and 50 x 100 -> SE 5.03."""
    scenarios, result = [transcript["scenario"] for transcript in transcripts], {"n": len(transcripts)}
    for name, metric in METRICS.items():
        values = [metric(transcript["final_emotion"]) for transcript in transcripts]
        centre, ci = mean(values), share_ci(values, scenarios)
        if name == "score":
            result["score_se"] = se = clustered_se(values, scenarios)[0]
            half = se and student(len(set(scenarios)) - 1) * se
            ci = [max(0.0, centre - half), min(100.0, centre + half)] if half else None       # all equal: nothing is known
        result |= {name: centre, f"{name}_ci": ci}
    return result


def student(freedom):
    """The 97.5 % quantile of Student's t: a table, then its expansion in 1/freedom (0.1 % off at most)."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[freedom - 1] if freedom <= len(table) else 1.96 + 2.372 / freedom + 2.822 / freedom ** 2


def share_ci(values, scenarios):
    """Wilson's interval of the mean of zeros and hundreds, with as many independent values as the clusters leave."""
    return wilson(mean(values), clustered_se(values, scenarios)[1]) if values else None


def mean(values):
    """Exact quotient of integers, as half_up() needs; None of nothing."""
    return sum(values) / len(values) if values else None


def percent(hits):
    return mean([100 * hit for hit in hits])


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


def differing(a, b, keys):
    """{setting: (in a, in b)} where two settings differ."""
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def check_same_users(a, b, force=False):
    """{setting: (in a, in b)} that makes the simulated users of two results different people: ValueError, unless forced."""
    pairs = differing(a["settings"], b["settings"], (*SIMULATOR_SIDE, "benchmark"))
    mixed = {key: pair for key, pair in pairs.items() if None not in pair}
    if mixed and not force:
        raise ValueError(f"not comparable, the simulated users differ: {listed(mixed)} (--force compares all the same)")
    return mixed


def listed(pairs):
    return ", ".join(f"{key} {str(x)[:24]} / {str(y)[:24]}" for key, (x, y) in pairs.items())


def compare(a, b, force=False, names=("A", "B"), resamples=10_000, seed=0):
    """b - a on the scenarios that both have: paired bootstrap over scenarios, whose repetitions are averaged first.

    a, b: results of summarize(). p: twice the smaller share of resampled differences on one side of 0; at most 1, never 0, and
    never below 2 / 2^n, which is all that the signs of n differences can tell. No p and no interval below FEWEST scenarios,
    where that is above 0.05; no interval where all differences are equal, since it would have no width. Of pairs that do not
    differ, p < 0.05 calls 11 % different with 8 scenarios and 6 % with 64 (measured): trust few scenarios less.
    ValueError if the users were different people (SIMULATOR_SIDE), unless forced, or if nothing is shared.
    """
    mixed = check_same_users(a, b, force)
    agents, judges = (differing(a["settings"], b["settings"], keys) for keys in (AGENT_SIDE, JUDGE_SIDE))
    unknown = [key for key in SIMULATOR_SIDE if None in (a["settings"].get(key), b["settings"].get(key))]
    if None not in (known := (a["settings"].get("benchmark"), b["settings"].get("benchmark"))) and "SAGE" not in known:  # a hash of all these
        unknown = []
    sides = defaultdict(list), defaultdict(list)
    for side, result in zip(sides, (a, b)):
        for scenario, _, emotion, _ in result["dialogues"]:
            if emotion is not None:
                side[scenario].append(emotion)
    shared = sorted(sides[0].keys() & sides[1].keys())
    left_out = [len(side) - len(shared) for side in sides]
    if not shared:
        raise ValueError("nothing to compare: the two results share no scored scenario")
    notes = [mixed and f"WARNING: THE SIMULATED USERS DIFFER, no fair comparison: {listed(mixed)}",
             unknown and f"not recorded, so not checked: {', '.join(unknown)}",
             agents and f"the policies' settings differ: {listed(agents)}",
             a.get("judge") and b.get("judge") and judges and f"THE JUDGES DIFFER: {listed(judges)}",
             (a["incomplete"] or b["incomplete"]) and "INCOMPLETE: failed dialogues are left out",
             len(shared) < FEWEST and f"too few scenarios for an interval: {FEWEST} are the fewest that can tell anything",
             f"{len(shared)} scenarios in both; left out: {left_out[0]} only in {names[0]}, {left_out[1]} only in {names[1]}"]
    comparison = {"n": len(shared), "left_out": left_out, "notes": [note for note in notes if note]}
    picks = np.random.default_rng(seed).integers(0, len(shared), (resamples, len(shared)))
    for name, metric in METRICS.items():
        before, after = (np.array([mean([*map(metric, side[scenario])]) for scenario in shared]) for side in sides)
        difference, resampled = float((after - before).mean()), (after - before)[picks].mean(axis=1)
        comparison[name] = {"a": float(before.mean()), "b": float(after.mean()), "difference": difference, "ci": None, "p": None}
        if len(shared) >= FEWEST:
            tail = 1 + min((resampled <= 0).sum(), (resampled >= 0).sum())
            comparison[name]["ci"] = np.percentile(resampled, [2.5, 97.5]).tolist() if np.ptp(after - before) else None
            comparison[name]["p"] = min(1.0, max(2 * float(tail) / (1 + resamples), 2 / 2 ** len(shared)))
    return comparison


def read_result(path, force=False):
    """A --json file, or any transcript file, as a summary. ValueError: neither, or dialogues of mixed settings (unless forced)."""
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, like {Path(path) / 'after.json'}")
    try:
        result = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):  # many lines: transcripts
        result = None
    if isinstance(result, dict) and "dialogues" in result:
        if "strategies_by" not in result:  # an earlier version, whose shares were no percentages
            result = {key: value for key, value in result.items() if key not in BEHAVIOUR[3:]}
        whole = {*rates([]), "failed", "incomplete", "per_intention", "settings"} <= result.keys()
        result = summarize([]) | result  # an older file holds fewer numbers
        if not whole or not fits(result, RESULT):
            raise ValueError(f"{path}: not a whole result of evaluate.py --json")
        return result
    transcripts = read_transcripts(path)
    return summarize(transcripts, settings_of_file(path, transcripts, force))


# ---- printing: the same tables on the terminal and in the report ----

def half_up(value, digits=1):
    """61.25 -> 61.3 as on the leaderboard. repr of a quotient of integers shows a half as a half (28.95, not 28.9499...)."""
    if value is None:
        return "-"
    return str(Decimal(repr(float(value))).quantize(Decimal(10) ** -digits, ROUND_HALF_UP) + 0)      # + 0: no "-0.0"


def with_interval(value, ci):
    return f"{half_up(value)} ({half_up(ci[0])} to {half_up(ci[1])})" if ci else half_up(value)


def with_se(row):
    return f"{half_up(row['mean'], 2)} (SE {half_up(row['se'], 2)}, n {row['n']})" if row and row["n"] else "-"


def headline(summary):
    if summary["score"] is None:
        return f"no score: all {summary['failed']} dialogues failed"
    text = " / ".join([half_up(summary["score"]), *(half_up(summary[key]).removesuffix(".0") for key in ("success", "failure"))])
    lost = f"  INCOMPLETE: {summary['failed']} more dialogues failed" if summary["incomplete"] else ""
    mixed = f"  MIXED SETTINGS, no common score: {', '.join(summary['settings']['mixed'])}" if summary["settings"].get("mixed") else ""
    return f"score / success / failure: {text}{lost}{mixed}"


def summary_tables(summary):
    """Tables as rows of text: all and each hidden intention; reference players; behaviour and counters."""
    groups = [("", "all", summary), *([("", "persona not in training", summary["unseen_persona"])] if summary.get("unseen_persona") else [])] + [
        (field if place == 0 else "", name, row) for key, field in GROUPS.items() for place, (name, row) in enumerate(summary[key].items())]
    yield [("", "", "n", "SE", "score (95 %)", "success % (>= 100)", "failure % (< 10)")] + [
        (field, name, str(row["n"]), half_up(row["score_se"], 2), *(with_interval(row[key], row[key + "_ci"]) for key in METRICS))
        for field, name, row in groups]
    if summary.get("per_seed"):
        seeds = [*summary["per_seed"].values()]
        spread = half_up(float(np.std(seeds, ddof=1)) if len(seeds) > 1 else None, 2)
        yield [("seed", "score"), *((seed, half_up(value)) for seed, value in summary["per_seed"].items()),
               ("spread: sd, lowest to highest", f"{spread}, {half_up(min(seeds))} to {half_up(max(seeds))}")]
    if summary["strategies"]:
        yield [(f"strategy, as {summary.get('strategies_by')} labels", "turns", "uses a dialogue", "contribution (mean change, points)")] + [
            (name, str(row["turns"]), half_up(row["per_dialogue"], 2), ("+" if row["contribution"] > 0 else "") + half_up(row["contribution"], 2))
            for name, row in summary["strategies"].items()]
    if judged := summary.get("judge"):
        yield [(f"as {judged['model']} judges", "")] + [(name, with_se(row)) for name, row in judged["abilities"].items()] + [
            (name, half_up(judged[key], 2)) for name, key in (("solution -5 to empathy 5", "empathy"), ("structured -5 to creative 5", "creative"),
                                                              ("emotion tracking: Pearson's r", "tracking_r"), ("emotion tracking: mean error, points", "tracking_error"))
        ] + [("answers that could not be used", f"{judged['failed']} of {judged['asked']}")]
    if summary["references"]:
        yield [("reference player", "score")] + [(name, half_up(value)) for name, value in summary["references"].items()]
    yield ([("behaviour and counters", "")] + [(key, with_interval(summary[key], summary.get(f"{key}_ci"))) for key in BEHAVIOUR]
           + [(f"{kind}: {name}", str(count)) for kind in ("end_reasons", "flags") for name, count in summary[kind].items()]
           + [(name, str(count)) for name, count in summary.get("simulator", {}).items()])


def comparison_table(comparison):
    return [("", "A", "B", "B - A (95 %)", "p")] + [
        (name, half_up(row["a"]), half_up(row["b"]), with_interval(row["difference"], row["ci"]), half_up(row["p"], 4))
        for name, row in ((name, comparison[name]) for name in METRICS)]


def print_summary(summary):
    print(headline(summary))
    for table in summary_tables(summary):
        print_table(table)
    print(textwrap.fill("settings: " + ", ".join(f"{key} {str(value)[:8] if 'sha256' in key else value}" for key, value in summary["settings"].items()
                                                 if value not in (None, "")), 120, break_on_hyphens=False, break_long_words=False))
    if "rerun_differs" in summary:
        print(f"rerun: {'differs in ' + ', '.join(summary['rerun_differs']) if summary['rerun_differs'] else 'identical to the stored result'}")
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
    what.add_argument("--rerun", metavar="RESULT", help="play again exactly what this --json file was made with; exit code 1 if a number differs")
    what.add_argument("--report", metavar="WHAT", nargs="+", help="write an HTML page: of a run folder, or of one or two result or transcript files")
    what.add_argument("--watch", metavar="RUN", help="write RUN/report.html again and again while the run trains")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--verify", action="store_true", help="derive every emotion again from the recorded changes; exit code 1 if one differs")
    out.add_argument("--json", metavar="FILE", help="write the numbers to FILE, for machines")
    out.add_argument("--save-transcripts", metavar="FILE", help="write each dialogue to FILE as it ends; what stands in it already, with the same settings, is not played again")
    out.add_argument("--out", metavar="FILE", help="where --report and --watch write (default: report.html in the folder, or the first file's name with .html)")
    out.add_argument("--force", action="store_true", help="also score, compare and show together what met different simulated users, and say so")
    user = parser.add_argument_group("the simulated user (start and replies as in SAGE)")
    user.add_argument("--scenarios", default=str(ROOT / "prompts/en/test.jsonl"), metavar="FILE", help="scenario file (default: the held-out events of prompts/en/test.jsonl)")
    simulator.add_simulator_flags(user)
    user.add_argument("--start-emotion", type=int, choices=range(10, 100), default=40, metavar="POINTS", help="emotion at the start (default: 40, SAGE; RLVER trains from 30)")
    user.add_argument("--max-turns", type=positive, default=9, metavar="N", help="scored replies at most (default: 9, SAGE; RLVER trains with 8)")
    agent = parser.add_argument_group("the policy")
    agent.add_argument("--think", action=argparse.BooleanOptionalAction, help="think first, then say (default: as the model's policy.json says, else no)")
    agent.add_argument("--greedy", action="store_true", help="always the likeliest token (default: sample; the papers do not state it)")
    agent.add_argument("--temperature", type=temperature, help="sampling temperature, 0 = greedy (default: the model's policy.json, else 1.0, RLVER's rollouts)")
    agent.add_argument("--max-new-tokens", type=positive, metavar="N", help="tokens of a reply with its thought (default: the model's policy.json, else 1024; RLVER: 5000)")
    agent.add_argument("--engine", choices=("auto", "hf", "vllm"), default="auto", help="vllm, or hf (plain transformers) (default: auto, vllm where there is a GPU and vllm)")
    run = parser.add_argument_group("the run")
    run.add_argument("--repetitions", type=positive, default=1, metavar="N", help="dialogues of each scenario (default: 1, SAGE)")
    run.add_argument("--limit", type=positive, metavar="N", help="only the first N scenarios (default: all)")
    run.add_argument("--seed", type=int, default=0, help="of the sampling and of the simulator (default: 0)")
    run.add_argument("--seeds", type=positive, default=1, metavar="N", help="play with N seeds from --seed on and print their spread (default: 1, SAGE)")
    run.add_argument("--train-scenarios", default="", metavar="FILE", help="also score the scenarios of --scenarios whose persona does not occur in FILE (default: none)")
    judge = parser.add_argument_group("the judge: abilities, strategies, social-cognition plane, emotion tracking (RLVER 3.1, 4)")
    judge.add_argument("--judge", default="", metavar="MODEL", help="an LLM that reads every dialogue, four calls each (default: none; the paper's is DeepSeek-V3)")
    judge.add_argument("--judge-url", default="", metavar="URL", help="its OpenAI-compatible endpoint; its key is read from JUDGE_API_KEY or OPENAI_API_KEY (default: --simulator-url with its key, else OPENAI_BASE_URL, else OpenAI's)")
    judge.add_argument("--judge-cache", default="", metavar="FILE", help="keeps every answer; what stands in it is never asked again (default: none)")
    args = parser.parse_args(argv)
    if len(args.report or ()) > 2:
        parser.error("--report compares at most two files")
    given = {name: value for name, value in vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args))))).items() if value is not None}
    action = next(name for name in ("model", "rerun", *TAKES) if name in given)
    for name in given.keys() - {action}:
        if name not in TAKES[action] if action in TAKES else name in ("out", "force"):
            parser.error(f"--{name.replace('_', '-')} does nothing beside --{action}")
    for name in given if not args.rerun else ():
        users = name.startswith("simulator_") and args.simulator == "scripted" and not (args.judge and name in TAKES["transcripts"])
        for_judge = name in ("judge_url", "judge_cache") or args.transcripts and (name == "seed" or name.startswith("simulator_"))
        lacks = ("--judge" if for_judge and not args.judge else
                 "--train-scenarios" if name == "scenarios" and args.transcripts and not args.train_scenarios else
                 "--simulator llm" if users else "")
        if lacks:
            parser.error(f"--{name.replace('_', '-')} does nothing without {lacks}")
    if args.greedy and "temperature" in given and not args.rerun:
        parser.error("--temperature does nothing beside --greedy")
    if args.rerun:
        return rerun_args(args, given, parser)
    how = {"think": False, "temperature": 1.0, "max_new_tokens": 1024}
    if args.model and (checkpoints := sorted(Path(args.model).glob("checkpoints/step-*[0-9]"))):  # a run folder
        args.model = str(checkpoints[-1])
    if args.model and (Path(args.model) / "policy.json").exists():  # how train.py let this policy speak
        how = how_it_speaks(Path(args.model) / "policy.json", how)
    for name, value in how.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.greedy:
        args.temperature = 0.0
    return args


def how_it_speaks(path, how):
    """policy.json over these defaults."""
    try:
        stored = {name: value for name, value in dict(json.loads(path.read_bytes())).items() if name in how}
        if type(stored.get("think", False)) is bool:
            checks = {"think": bool, "temperature": temperature, "max_new_tokens": positive}
            return how | {name: value if name == "think" else checks[name](str(value)) for name, value in stored.items()}
    except (TypeError, ValueError, RecursionError, argparse.ArgumentTypeError):
        pass
    raise ValueError(f"{path}: not the policy.json of train.py; remove it, or give the model's folder anew")


def rerun_args(args, given, parser):
    """The flags of the stored result. Only what does not change a number may stand beside --rerun."""
    settings = read_result(args.rerun)["settings"]
    if not isinstance(settings.get("model"), str):
        raise ValueError(f"--rerun {args.rerun}: it was not played by a model, so there is nothing to play again")
    if given_too := [name for name in PLAYED_WITH if name in given]:
        raise ValueError(f"--rerun plays with the stored settings; leave out --{given_too[0].replace('_', '-')}")
    if lacks := [name for name in PLAYED_WITH if settings.get(name) is None and name != "limit"]:
        raise ValueError(f"--rerun {args.rerun}: its settings lack {', '.join(lacks)}, so nobody knows what was played")
    stored = [f"--{'' if value is not False else 'no-'}{name.replace('_', '-')}" + (f"={value}" if type(value) is not bool else "")
              for name, value in ((name, settings.get(name)) for name in PLAYED_WITH) if value not in (None, "") and (name, value) != ("greedy", False)]
    args = parser.parse_args(stored, args)       # as flags, so that they are checked like these
    for name in ("scenarios", "train_scenarios", "model"):
        if getattr(args, name) and not Path(getattr(args, name)).exists() and (ROOT / getattr(args, name)).exists():
            setattr(args, name, str(ROOT / getattr(args, name)))
    return args


def temperature(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value == 0 or 0.01 <= value <= 100):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor a number from 0.01 to 100")
    return value


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")        # a console that knows no Chinese ends nothing
    code = main()
    if code == 130:
        os._exit(code)                       # threads still wait for an endpoint, and would go on asking it
    sys.exit(code)
