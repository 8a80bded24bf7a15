"""The judge: an LLM reads finished dialogues and says how they were led, where the user's emotion says only how they ended.

Source: RLVER (arXiv 2507.03112) sec. 3.1 and 4 (five core abilities, strategies and their contribution, the social-cognition
plane); the emotion tracking is ours, after the idea of arXiv 2605.07138. The prompts (prompts/en/judge.*.txt) are ours.
Four calls a dialogue, at temperature 0; only what was said aloud is shown, quoted as data, so that no reply can give orders:
  abilities   five grades from 1 to 5, each with words of the agent as evidence; words it never said make the answer void
  strategies  one or two labels for every scored turn
  plane       two numbers from -5 to 5: solution/empathy, structured/creative
  tracking    the mood (0 to 100) that each thought ascribes to the user, to be held against the true one; thinking agents only
An answer that cannot be used is asked for again, TRIES in all, then counted as failed and left out: never a default grade.
Differs from the paper: it asks its plane from -1 to 1 and draws it from -5 to 5 (facts 5.8); how it labels turns is not stated.
Known weakness: a judge likes its own kind, and its grades mean little across judges; so its name goes into every result.
Run: python evaluate.py --model runs/NAME --judge deepseek-chat --judge-url https://api.deepseek.com/v1
"""
import os
import re
import string
import zlib

import numpy as np
from tqdm import tqdm

import evaluate
import simulator

ABILITIES = ("Empathic Depth", "Core Insight", "Solution Crafting", "Dialogue Guidance", "Style Adaptability")
STRATEGIES = ("praise", "empathy", "listening", "advice", "analysis", "other")
AXES = ("Focus", "Manner")      # -> "empathy", "creative"
TRIES = 3
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
# the number, "/5" or "of 5" or "out of 5" after it, and then neither a letter nor another number
NUMBER = re.compile(r"[\[(*\"“ ]{0,4}([+-]?\d{1,3}(?:\.\d{1,3})?)(?:\s{0,3}(?:/|(?:out )?of)\s{0,3}(\d{1,4}))?"
                    r"(?!\w|%|[.,]\d|\s{0,3}(?:[-–—~,/…]|\.\.\.|to\b|or\b|and\b|of\b|out\b)?\s{0,3}\d)")


class Unusable(ValueError):
    """The answer is not in the form that was asked for, or its evidence is invented."""


def client_of(args):
    """The judge's endpoint, asked once; without --judge-url it is the LLM user's, with its key. ValueError if it does not answer."""
    role = "simulator" if args.simulator == "llm" and args.simulator_url and args.judge_url in ("", args.simulator_url) else "judge"
    args.judge_url = args.judge_url or role == "simulator" and args.simulator_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    client = simulator.LLMClient(args.judge, args.judge_url, "sections", args.judge_cache, args.simulator_concurrency, args.simulator_timeout,
                                 args.simulator_max_tokens, role=role)
    try:
        client.probe()
    except ValueError as error:
        raise ValueError(f"--judge {args.judge}: {error}") from None
    return client


def judge_dialogues(client, transcripts, seed=0):
    """Judge every dialogue that has a score; the findings are written into transcript["judge"], and whose they are.

    client: anything with ask(text, headings, seed, form) -> text, a `model` and a thread `pool` (simulator.LLMClient).
    """
    wanted = [transcript for transcript in transcripts if not evaluate.failed(transcript)]
    by = {"judge": client.model, "judge_prompts_sha256": evaluate.judge_prompts()}
    for transcript, found in zip(wanted, tqdm(client.pool.map(lambda t: judge_one(client, t, seed), wanted), total=len(wanted),
                                              desc="judge", unit="dialogue", disable=None)):
        transcript |= {"judge": found, "judged_by": by}


def judge_one(client, transcript, seed):
    """-> {name of the call: what it found}, without the calls that failed."""
    turns = evaluate.scored_turns(transcript)
    replies = [turn["reply"] for turn in turns]
    thoughts = [turn.get("thought") or "" for turn in turns]
    chat = [f'{{"person": {simulator.quoted(transcript.get("opening") or "")}}}']
    numbered = list(chat)
    for number, turn in enumerate(turns, 1):
        chat += [f'{{"agent": {simulator.quoted(turn["reply"])}}}', f'{{"person": {simulator.quoted(turn["user"])}}}']
        numbered += [f'{{"agent, turn {number}": {simulator.quoted(turn["reply"])}}}', chat[-1]]
    calls = {
        "abilities": (dict(chat="\n".join(chat), wish=simulator.INTENTIONS[transcript["intention"]][0]), lambda text: parse_abilities(text, replies)),
        "strategies": (dict(chat="\n".join(numbered), turns=len(turns)), lambda text: parse_strategies(text, len(turns))),
        "plane": (dict(chat="\n".join(chat)), parse_plane),
    }
    if any(thoughts):
        lines = "\n".join(f'{{"thought {number}": {simulator.quoted(thought)}}}' for number, thought in enumerate(thoughts, 1))
        calls["tracking"] = dict(thoughts=lines, turns=len(turns)), lambda text: parse_tracking(text, len(turns))
    answers = {name: ask(client, name, places, read, f"{seed}/{transcript['scenario']}") for name, (places, read) in calls.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def ask(client, name, places, read, seed):
    """What `read` makes of the answer, or None after TRIES answers that it could not use, or where the endpoint failed."""
    text = string.Template((simulator.PROMPTS / "en" / f"judge.{name}.txt").read_text(encoding="utf-8").strip()).substitute(places)
    for attempt in range(TRIES):
        try:
            return read(client.ask(text, [], zlib.crc32(f"{seed}/{name}/{attempt}".encode()) >> 1, "sections"))
        except Unusable:
            continue
        except simulator.SimulatorFailed:        # the client has retried already
            return None
    return None


# ---- reading the answers: tolerant of marks and spaces, strict about what may become a number -------------------------------

def fields(text, names, key):
    """{key(match): rest of the line} of the lines "NAME: ...". A name that stands twice with different words is no answer."""
    if text.endswith(simulator.CUT):
        raise Unusable("cut at the token limit")
    text = text.rpartition("</think>")[2]                                        # a reasoning judge's own thinking
    found = {}
    for match in re.finditer(rf"^[\W_]{{0,12}}({names})[\W_]{{0,6}}?[:：]([^\n]*)$", text, re.M | re.I):
        name, rest = key(match[1]), match[2].strip(" \t*_`")
        if found.setdefault(name, rest) != rest:
            raise Unusable(f"{name} stands twice")
    return found


def number(text, low, high):
    """The number that opens a line, with "/HIGH" or "of HIGH" after it at most; 45, 4-5, "4 or 5" and 7/10 are none."""
    match = NUMBER.match(text.translate(simulator.FORMS))
    if not match or not low <= float(match[1]) <= high or match[2] and int(match[2]) != high:
        raise Unusable(f"no number from {low} to {high}: {text[:60]!r}")
    return float(match[1])


def plain(text):
    """Words only, in lower case, each between spaces: a quotation may differ in marks and spaces, not in words. Chinese, Japanese,
    Thai, Lao, Khmer and Burmese have no spaces between words, so there each sign stands for one."""
    return " " + " ".join(re.findall(f"[{NO_SPACES}]|[^\\W{NO_SPACES}]+", text.lower())) + " "


def parse_abilities(text, replies):
    """{ability: [grade, evidence]}; the evidence must be words that the agent said, if it said any."""
    lines = fields(text, "|".join(ABILITIES), lambda name: " ".join(name.split()).title())
    said, found = [plain(form) for reply in replies for form in (reply, simulator.quoted(reply))], {}       # as said, and as the judge read it
    for ability in ABILITIES:
        grade = number(lines.get(ability, ""), 1, 5)
        quote = re.search(r"[\"“「«](.+)[\"”」»]", lines[ability])
        shown = quote and plain(quote[1]).strip() and any(plain(quote[1]) in reply for reply in said)
        if grade != int(grade) or any(plain(reply).strip() for reply in replies) and not shown:
            raise Unusable(f"{ability}: no whole grade with words that the agent said")
        found[ability] = [int(grade), quote[1] if quote else ""]
    return found


def parse_strategies(text, turns):
    """[[label, ...] for every turn]."""
    lines = fields(text, r"turn\s{0,3}\d{1,3}", lambda name: int(re.sub(r"\D", "", name)))
    if sorted(lines) != list(range(1, turns + 1)):
        raise Unusable(f"expected turns 1 to {turns}, found {sorted(lines)}")
    labels = [[label for label in re.split(r"[^a-z]+", lines[turn].lower()) if label] for turn in range(1, turns + 1)]
    if any(not 1 <= len(row) <= 2 or set(row) - set(STRATEGIES) for row in labels):
        raise Unusable(f"unknown labels, or more than two: {labels}")
    return [list(dict.fromkeys(row)) for row in labels]


def parse_plane(text):
    """[focus, manner], each from -5 to 5."""
    lines = fields(text, "|".join(AXES), str.title)
    return [number(lines.get(axis, ""), -5, 5) for axis in AXES]


def parse_tracking(text, turns):
    """[mood from 0 to 100, a whole number, or None where the thought says none, for every turn]."""
    lines = fields(text, r"thought\s{0,3}\d{1,3}", lambda name: int(re.sub(r"\D", "", name)))
    if sorted(lines) != list(range(1, turns + 1)):
        raise Unusable(f"expected thoughts 1 to {turns}, found {sorted(lines)}")
    moods = [None if re.match(r"\W{0,3}none\b", lines[turn], re.I) else number(lines[turn], 0, 100) for turn in range(1, turns + 1)]
    if any(mood is not None and mood != int(mood) for mood in moods):
        raise Unusable(f"a mood on another scale than 0 to 100: {moods}")
    return moods


# ---- the numbers -------------------------------------------------------------------------------------------------------------

def findings_of(transcripts):
    """What result["judge"] holds, from the transcripts alone: means over dialogues, with the standard error that clusters the
    repetitions of a scenario (evaluate.clustered_se). asked: questions put, four a dialogue, or three where nothing was thought."""
    found = [(transcript, transcript["judge"]) for transcript in transcripts if transcript.get("judge") is not None]
    asked = sum(3 + any(turn.get("thought") for turn in evaluate.scored_turns(transcript)) for transcript, _ in found)
    judges = sorted({str((transcript.get("judged_by") or {}).get("judge", "an unknown judge")) for transcript, _ in found})
    result = {"model": " and ".join(judges), "asked": asked, "failed": asked - sum(len(judge) for _, judge in found), "abilities": {}}
    for ability in ABILITIES:
        grades = [(judge["abilities"][ability][0], transcript["scenario"]) for transcript, judge in found if ability in judge.get("abilities", {})]
        values, scenarios = [grade for grade, _ in grades], [scenario for _, scenario in grades]
        se = evaluate.clustered_se(values, scenarios)[0] if values else None
        result["abilities"][ability] = {"mean": evaluate.mean(values), "se": se, "n": len(values)}
    result["points"] = [[transcript["scenario"], *judge["plane"]] for transcript, judge in found if judge.get("plane")]
    for axis, key in enumerate(("empathy", "creative"), 1):
        result[key] = evaluate.mean([point[axis] for point in result["points"]])
    return result | tracking_of(found)


def tracking_of(found):
    """How well the thoughts follow the user's mood: Pearson's r and the mean error (points) between the mood that a thought
    ascribes to the user and the true emotion before that reply, over all thoughts that speak of it. r is None where either
    never varies: then nothing can be followed."""
    pairs = []
    for transcript, judge in found:
        felt = [transcript["start_emotion"], *(turn["emotion"] for turn in evaluate.scored_turns(transcript))]
        pairs += [(said, true) for said, true in zip(judge.get("tracking") or (), felt) if said is not None]
    said, true = (np.array(side, float) for side in zip(*pairs)) if pairs else (np.zeros(0), np.zeros(0))
    varied = len(pairs) > 2 and said.std() > 0 and true.std() > 0
    return {"tracking_r": float(np.corrcoef(said, true)[0, 1]) if varied else None,
            "tracking_error": float(np.abs(said - true).mean()) if pairs else None, "tracking_n": len(pairs)}
