"""The simulated user: a persona with a story and a hidden wish, whose emotion moves after every reply.

Source: RLVER (arXiv 2507.03112) sec. 2.1 and 3.4, app. B.3 and D; SAGE (arXiv 2505.02847) app. E.
    emotion' = clip(emotion + clip(change, -10, 10), 0, 100)          reward R = final emotion / 100
Two users share these rules:
  LLMSimulator       the paper's: an LLM appraises every reply, then answers (two calls a turn);
  ScriptedSimulator  ours: no LLM, no download. It recognises dialogue acts (praise, empathy, ..., advice) and whether
                     a reply names something this person told it. It is the CartPole of empathy and claims no more.
Differs from the released code: one emotion, never a stale copy; exactly `max_turns` scored replies; a farewell counts
only as a message's close; emotions >= 100 and < 10 end training dialogues too, as they end the published evaluation.
Run: python simulator.py --scenario divorce/praise         # you are the agent; --list shows the scenarios
     python simulator.py --scenario divorce/praise --simulator llm --simulator-model M --simulator-url http://localhost:8000/v1
"""
import argparse
import hashlib
import json
import math
import os
import random
import re
import string
import sys
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

PROMPTS = Path(__file__).parent / "prompts"

# The eight hidden intentions (RLVER Table 5): our name, our wording, and the word that marks it in the official files.
INTENTIONS = {
    "praise": ("You hope to be praised sincerely for what you did.", "夸奖"),
    "empathy": ("You hope the other truly feels with you instead of soothing you.", "共情"),
    "listening": ("You hope the other listens closely while you let it all out.", "倾听"),
    "support": ("You feel you did nothing wrong and hope the other agrees.", "没有错"),
    "advice": ("You hope for advice that really helps in your situation.", "建议"),
    "analysis": ("You hope the other looks at the matter from all sides with you.", "辩证"),
    "motives": ("You hope to understand why the other people acted as they did.", "其他人物"),
    "reflection": ("You hope to be guided to reflect on yourself and grow.", "自我反思"),
}
CHARACTERS = {"负面型": "negative", "被动型": "passive", "回避型": "avoidant"}
# kinds of pressure of the adversarial users (after arXiv 2605.07138; prompts/en/adversarial.jsonl)
PRESSURES = ("gaslighting", "escalation", "agreement", "reversal", "testing", "withdrawal")
END_REASONS = ("satisfied", "gave_up", "farewell", "max_turns", "context_full", "simulator_failed")


# ---- scenarios ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Scenario:
    """A persona, its story and its hidden intention. `event` is shared by the scenarios of one story."""
    id: str
    event: str
    persona: str
    background: str
    character: str
    traits: tuple
    intention: str                  # a key of INTENTIONS
    first_message: str = ""         # "" = the simulator invents the opening
    script: dict | None = None      # {"details": [[word, sentence], ...]}: what the scripted user can tell, bit by bit


def load_scenarios(path):
    """JSONL in the official RLVER/SAGE schema: id, player, scene, main_cha, cha_group, task [, first_talk, script].

    Our own files write "task": "all" and stand for eight scenarios, one per intention (ids EVENT/INTENTION).
    Raises ValueError "FILE:LINE: FIELD: what is wrong".
    """
    scenarios, seen = [], {}
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); give a JSONL file of scenarios") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from None
        if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
            raise ValueError(f"{where}: holds half a character (a lone surrogate, \\ud800 to \\udfff)")
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
        for scenario in _scenarios_of_row(row, where):
            if scenario.id in seen:
                raise ValueError(f"{where}: id: {scenario.id!r} already stands on line {seen[scenario.id]}")
            seen[scenario.id] = number
            scenarios.append(scenario)
    if not scenarios:
        raise ValueError(f"{path}: holds no scenario")
    return scenarios


def _scenarios_of_row(row, where):
    for name in ("id", "player", "scene", "main_cha", "task"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ValueError(f"{where}: {name}: must be a non-empty string")
    traits = row.get("cha_group", [])
    if not isinstance(traits, list) or not all(isinstance(trait, str) for trait in traits):
        raise ValueError(f"{where}: cha_group: must be a list of strings")
    if not isinstance(row.get("first_talk", ""), str | None):
        raise ValueError(f"{where}: first_talk: must be a string")
    script, event = row.get("script"), row["id"]
    if script is not None:
        details = script.get("details") if isinstance(script, dict) else None
        if not (isinstance(details, list) and details and all(
                isinstance(d, list) and len(d) == 2 and all(isinstance(s, str) and s for s in d) for d in details)):
            raise ValueError(f'{where}: script: must be {{"details": [[word, sentence], ...]}}')
        pressure = script.get("pressure", {})
        if script.get("kind", PRESSURES[0]) not in PRESSURES or not isinstance(pressure, dict) or not all(
                turn.isdecimal() and isinstance(line, str) and line for turn, line in pressure.items()) or pressure and "kind" not in script:
            raise ValueError(f'{where}: script: kind must be one of {", ".join(PRESSURES)}, pressure {{"turn": line, ...}}')
    every = row["task"] == "all"
    for intention in INTENTIONS if every else [intention_of(row["task"], where)]:
        yield Scenario(f"{event}/{intention}" if every else event, event, row["player"], row["scene"],
                       CHARACTERS.get(row["main_cha"], row["main_cha"]), tuple(traits), intention,
                       row.get("first_talk") or "", script)


def intention_of(task, where="task"):
    """Our short name for a task: the short name itself, our wording, or an official (Chinese) sentence."""
    found = [name for name, (ours, mark) in INTENTIONS.items() if task in (name, ours) or mark in task]
    if len(found) != 1:
        raise ValueError(f"{where}: task: unknown intention {task[:60]!r}; expected one of {', '.join(INTENTIONS)}")
    return found[0]


# ---- the rules of emotion -------------------------------------------------------------------------------------------

def move_emotion(emotion, change):
    """SAGE app. E.1: a reply moves emotion by at most 10 points; the scale is 0 to 100."""
    return min(100, max(0, emotion + min(10, max(-10, change))))


def tier(emotion):
    """S >= 100, A >= 70, B >= 40, C >= 10, F below (released code, hard_player_simulator: get_state)."""
    return "S" if emotion >= 100 else "A" if emotion >= 70 else "B" if emotion >= 40 else "C" if emotion >= 10 else "F"


def end_of(emotion, scored_replies, max_turns, user_text=""):
    """Why the dialogue is over after `scored_replies` agent replies, or None when it goes on."""
    if emotion >= 100:
        return "satisfied"
    if emotion < 10:
        return "gave_up"
    if scored_replies >= max_turns:
        return "max_turns"
    return "farewell" if farewell(user_text) else None


@dataclass
class Reaction:
    """What one reply did to the user."""
    change: int                     # points, after clipping to [-10, 10]
    emotion: int                    # points 0-100, after this reply
    message: str                    # what the user says next; the last words when the dialogue is over
    inner: str                      # the user's unspoken thought
    end_reason: str | None
    act: str | None = None          # the dialogue act that was recognised (scripted user only)
    raw: list = field(default_factory=list)      # every text the simulator produced, failed attempts included
    flags: list = field(default_factory=list)    # countable facts: "unparsed", "out_of_range", "repeat", "garbled", ...


def seed_of(*parts):
    """A 32-bit seed from whatever identifies it: the same parts give the same numbers on every machine."""
    return zlib.crc32("/".join(map(str, parts)).encode())


# ---- reading what an LLM user writes -----------------------------------------------------------------------------------
# Tolerant of form, strict about what may become a number or a message (the table in tests/test_simulator.py shows each rule).
#  1) A heading counts only at a line's start. The closing section (Change, or Response) must come last; where it stands
#     twice, the last one wins. So an echo of the agent's text never decides: the user's own verdict follows it.
#  2) A Change is a number that opens its section, or else the only SIGNED number of the first line with a digit.
#     Ranges, alternatives, sums, percentages, a second signed number, or words only ("no change") are no Change.
#  3) Decimals are rounded half away from zero (+2.5 -> 3, -0.5 -> -1). Beyond +-10 is clipped, and marked.
#  4) Text without any heading is read only if it is one unquoted line that ends in "... sentence. Change: +8".
#  5) Everything else raises ParseError, and is asked for again.

class ParseError(ValueError):
    """The text holds no reading that can be trusted."""


class PrivateLeak(ParseError):
    """A private section would have become the user's message."""


@dataclass(frozen=True)
class Appraisal:
    content: str
    reason: str
    activity: str
    analysis: str
    change: int               # points, within [-10, 10]
    out_of_range: bool = False


CUT = "\n[cut at the token limit]"       # marks a text that the endpoint did not finish: "Change: +1" may have been +10

# in the order of the prompts: English name first, Chinese last; TargetCompletion and Analyse are SAGE's names
APPRAISAL = ("Content|内容", "Reason|Target ?Completion|原因", "Activity|心理活动|活动", "Analysis|Analyse|Analyze|分析",
             "Change|Emotion Change|情绪变化|变化")
REPLY = ("Thinking|思考", "Origin|初稿", "Change|修改", "Response|回复")
# every repetition is bounded, so each regex is linear in the text. No quote mark and no ">" opens a heading: those are
# echoes. A heading without a colon needs a mark (#, ** or a bracket).
HEADINGS = {order: re.compile(
    r"^[ \t\u3000\xa0\ufeff]{0,8}(?:\d{1,2}[.)、][ \t]{0,3})?(?P<open>[-#*_`\[【(（ \t]{0,12})"
    rf"(?:{'|'.join(f'(?P<s{i}>{names})' for i, names in enumerate(order))})"
    r"[ \t]{0,4}(?:[(（][^()（）\n]{0,30}[)）])?[ \t*_`\]】)）]{0,8}(?P<colon>[:：=]|(?<=[\]】])|$)", re.M | re.I)
    for order in (APPRAISAL, REPLY)}
PRIVATE = re.compile(r"(?:^|[\s*\[【(])(?:Content|Reason|TargetCompletion|Activity|Analysis|Analy[sz]e|Thinking|Origin|"
                     r"Change|Response|思考|初稿|修改|心理活动|变化|回复)[\]】*]{0,3}[:：]|(?i:</?think)")
ONE_LINE = re.compile(r"[^\n:：\"'`“”‘’「」『』«»<>{}]*[.!?。！？][ *]{0,4}(?:Change|变化)[ *]{0,4}[:：]([^:：.!?。！？]+)[.。]?")

FORMS = str.maketrans("０１２３４５６７８９＋－−–‒﹣．：", "0123456789+-----.:")
OPENING_NUMBER = re.compile(r"[\s\[\]【】()（）*_`\"'“”「」<>$:=]*([+-]? ?\d{1,12}(?:\.\d{1,12})?)", re.A)
SIGNED_NUMBER = re.compile(r"(?<![A-Za-z0-9+/±.-])([+-]\d{1,12}(?:\.\d{1,12})?)", re.A)
NOT_ALONE = re.compile(r"\d|[ \u202f]\d|[A-Za-z.][+-]?\d|\s{0,9}(?:points?|pts|分|点)?\s{0,9}(?:[%％]|per ?cent|"
                       r"(?:(?:out )?of|or|to|and|至|到|或|和|->|→|\.\.+|…|[-+=~～/,，、|:^×*])\s{0,9}[+-]?\d)", re.A | re.I)


def parse_appraisal(raw) -> Appraisal:
    """The five sections of an appraisal, as free text or as a JSON object. Only Change must be there."""
    text = without_wrapping(raw)
    fields = json_fields(text, APPRAISAL) or sections(text, APPRAISAL)
    if not fields and len(text.strip()) <= 400:                # rule 4
        line = ONE_LINE.fullmatch(text.strip())
        fields = line and [None, None, None, None, line[1]]
    if not fields or fields[-1] is None:
        raise ParseError("no Change section at the end")
    if (json_fields(text, REPLY) or [None])[-1] is not None or re.search(
            r"^[ \t*#\[【]{0,9}(?:Response|回复)[\]】* \t]{0,9}[:：]", str(fields[-1]), re.M):
        raise ParseError("this is a reply: its Change says how the draft was altered")
    number = read_number(fields[-1])
    change = int(math.copysign(math.floor(min(abs(number), 1e6) + 0.5), number))      # rule 3
    return Appraisal(*map(clean, fields[:-1]), max(-10, min(10, change)), out_of_range=abs(change) > 10)


def parse_reply(raw) -> str:
    """The Response section only: what the user says aloud. Thinking, Origin and Change stay private."""
    text = without_wrapping(raw)
    fields = json_fields(text, REPLY) or sections(text, REPLY)
    if not fields or fields[-1] is None:
        raise ParseError("no Response section at the end")
    message = clean(fields[-1])
    if not message:
        raise ParseError("the Response is empty")
    if PRIVATE.search(message):
        raise PrivateLeak("a private section stands inside the Response")
    return message


def without_wrapping(raw):
    """Drops a reasoning model's leading think block, and code fences. What was cut off is not read at all."""
    if str(raw or "").endswith(CUT):
        raise ParseError("cut at the token limit")
    text = str(raw or "").replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff \t\n")
    if text[:6].lower() == "<think":
        end = re.search(r"</think[^>\n]{0,9}>", text, re.I)
        if not end:
            raise ParseError("the thinking never ended")
        text = text[end.end():]
    return re.sub(r"^[ \t]{0,8}`{3,9}\w{0,12}[ \t]{0,8}$", "", text, flags=re.M)


def sections(text, order):
    """Bodies by position in `order`, None where missing; [] when no heading opens a line.

    A heading that stands earlier in the order is text of the section we are in. Only after the closing section does
    it count: then that closing section was an echo, and the real one is still to come.
    """
    bodies, position, closing = [None] * len(order), -1, len(order) - 1
    start = stars = 0
    for match in HEADINGS[order].finditer(text):
        here = next(i for i in range(len(order)) if match[f"s{i}"])
        if not match["colon"] and not re.search(r"[#*\[【]", match["open"]):
            continue
        if position < here or position == closing:
            if position >= 0:
                bodies[position] = body(text[start:match.start()], stars)
            position, start = here, match.end()
            stars = match["open"].count("*") if match["open"].count("*") == match[0].count("*") else 0
    if position >= 0:
        bodies[position] = body(text[start:], stars)
    if position not in (-1, closing) and bodies[closing] is not None:
        raise PrivateLeak("sections go on after the closing one")
    return bodies if position >= 0 else []


def body(text, stars):
    return text.strip().removeprefix("*" * stars)              # "**Change:** +5": the marks close after the colon


def json_fields(text, order):
    """The same fields from a JSON object, or None. An object beside sections, or beside another object, is an echo."""
    brace = re.search(r"^[ \t]{0,8}\{", text, re.M)
    if not brace or HEADINGS[order].search(text[:brace.start()]):
        return None
    text = re.sub(r":\s{0,9}\+(\d)", r": \1", text[brace.end() - 1:])                 # +5 is no JSON number
    try:
        found, end = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if "{" in text[end:] or HEADINGS[order].search(text[end:]):
        return None
    fields = [None] * len(order)
    for key, value in found.items():
        for i, names in enumerate(order):
            if re.fullmatch(names, key.strip(), re.I):
                fields[i] = value if isinstance(value, (str, int, float)) else None
    return fields if any(field is not None for field in fields) else None


def read_number(change):
    """The number of a Change section (rule 2)."""
    if isinstance(change, (int, float)) and not isinstance(change, bool):             # from JSON
        if not abs(change) < 1e300:                                                   # also refuses NaN
            raise ParseError("Change is not finite")
        return change
    rows = str(change).translate(FORMS).split("\n")
    first = next((i for i, row in enumerate(rows) if re.search("[0-9]", row)), 0)  # skips a left-over label
    line, text = rows[first], "\n".join(rows[first:])
    number = OPENING_NUMBER.match(line) or SIGNED_NUMBER.search(line)
    if not number:
        raise ParseError("Change holds no number that can be trusted")
    if NOT_ALONE.match(text, number.end()):
        raise ParseError("Change holds a range, a sum or a share")
    value = float(number[1].replace(" ", ""))
    if any(float(other) != value for other in SIGNED_NUMBER.findall(text)) or re.search(r"±|\+\s?/\s?-", line):
        raise ParseError("Change holds two different numbers")
    return value


def clean(field):
    """Without what templates leave behind: a bracketed label on a line of its own, brackets or quotes around it all."""
    text = str(field if field is not None else "").strip()
    label = re.match(r"[\[【]?[^\n\[\]【】]{0,40}[\]】][*:：]{0,3}[ \t]{0,8}\n", text)
    text = text[label.end():].strip() if label and text[label.end():].strip() else text
    inner = text.strip("[]【】 \n")
    text = text if re.search(r"[\[\]【】]", inner) else inner
    quoted = re.fullmatch(r"\"([^\"]*)\"|“([^“”]*)”|「([^「」]*)」", text)
    return next((part for part in quoted.groups() if part is not None), "").strip() if quoted else text


# a farewell is a clause of its own that closes the message; the clause before it must not say who else said it
FAREWELL = re.compile(
    r"(?:^|[.!?…,;)\n。！？，；～）—])[\s*]{0,9}"
    r"(?:(?:(?:ok|okay|well|so|then|right|alright|anyway|and|now|fine|thanks|thank you)[ ,]{1,3}){0,3}"
    r"(?:good[ -]?bye|(?:bye[ -]?){1,2}|farewell|see (?:you|ya)(?: (?:later|around|soon|tomorrow))?|good ?night)"
    r"(?:,? (?:then|now|for now|everyone|all|(?:my )?friend|and thanks?(?: you)?|thanks|thank you)|, \w{1,20}){0,2}"
    r"|(?:那就?|好的?|好了|嗯|行|吧|[就先]这样|我先?[走撤下睡]了|谢谢[你您]?){0,6}(?:再见|拜拜|再会|回见|晚安)"
    r"(?:了|啦|吧|哦|喽|咯|呀)?(?:[，, ]?谢谢(?:你|您)?了?)?)"
    r"[\s.!。！~～…)）*\U0001F300-\U0001FAFF]*$", re.I)
REPORTED = re.compile(r"(?:\b(?:said|says|told \w{1,20}|wrote|whispered|shouted|yelled|texted|replied|goes)|[说道写喊回]|告诉[我他她])"
                      r"[\s,，*]{0,4}$", re.I)


def farewell(text) -> bool:
    """True when the message closes with a goodbye: "Okay, goodbye!", not "She said goodbye and left me."."""
    tail = str(text).strip().strip("\"“”「」")[-120:]
    match = FAREWELL.search(tail)
    return bool(match) and not REPORTED.search(tail[:match.start() + 1])


class SimulatorFailed(Exception):
    """The user could not answer; its dialogue ends as simulator_failed and never becomes a reward.

    raw: what the user had written in this turn by then. status: the endpoint's HTTP status, if there was one.
    """

    def __init__(self, message, raw=(), status=None):
        super().__init__(message)
        self.raw, self.status = list(raw), status


# ---- the LLM user: prompts ---------------------------------------------------------------------------------------------

@lru_cache
def prompt(language, name):
    """A prompt of prompts/LANGUAGE as a template; its places are $persona, $history, ..."""
    return string.Template((PROMPTS / language / f"{name}.txt").read_text(encoding="utf-8").strip())


@lru_cache
def names(language):
    """prompts/LANGUAGE/names.json: the two speakers, what a tier means, and (zh) the intentions and characters."""
    return json.loads((PROMPTS / language / "names.json").read_text(encoding="utf-8"))


def language_of(scenario):
    """zh where the persona is written in Chinese, as in the official files, else en."""
    return "zh" if re.search("[\u4e00-\u9fff]", scenario.persona) else "en"


def language_of_all(scenarios):
    """The one language of these scenarios, in which the policy is told what to do. ValueError where there are two."""
    found = {language_of(scenario): scenario.id for scenario in scenarios}
    if len(found) > 1:
        raise ValueError(f"the scenarios are in different languages ({', '.join(f'{scenario} in {name}' for name, scenario in found.items())}), "
                         "and a policy is instructed in one; split the file")
    return next(iter(found))


def quoted(text):
    """A JSON string on one line. "<", "[" and odd line ends are escaped too, so it holds no control token of a chat
    template (<|im_end|>, </s>, [INST]), no tag and no line start, whatever the policy wrote."""
    text = json.dumps(str(text).encode("utf-8", "replace").decode(), ensure_ascii=False)
    return re.sub("[<\\[\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def schema_of(headings):
    """What --simulator-format json asks the endpoint to enforce: the same fields in the same order."""
    fields = {heading: {"type": "string"} for heading in headings}
    if len(headings) == len(APPRAISAL):
        fields[headings[-1]] = {"type": "integer", "minimum": -10, "maximum": 10}
    return {"type": "json_schema", "json_schema": {"name": "notes", "strict": True, "schema": {
        "type": "object", "properties": fields, "required": list(headings), "additionalProperties": False}}}


class LLMSimulator:
    """The paper's user for one dialogue: an LLM appraises each reply, then answers it. Source: RLVER app. D, SAGE app. E.

    T turns cost 2T calls: +1 where the story has no first message, -1 where the appraisal ends the dialogue (then nothing is
    left to say, and the last message is empty). A text that cannot be read is asked for again, TRIES in all; after that
    an appraisal counts as change 0, flag "unparsed", and a message that never comes raises SimulatorFailed.
    """

    TRIES = 3

    def __init__(self, scenario, client, difficulty="challenging", start_emotion=40, max_turns=9, seed=0):
        self.scenario, self.client, self.difficulty, self.max_turns, self.seed = scenario, client, difficulty, max_turns, seed
        self.language, self.emotion = language_of(scenario), start_emotion
        self.messages = []                      # user, agent, user, ...: what was said aloud
        self.opening_raw = []                   # what the LLM wrote for an invented opening

    def opening(self):
        message = self.scenario.first_message
        if not message:                         # dialogues of one story and seed (a GRPO group) share it, and its one call
            try:
                message, self.opening_raw = self.client.once((self.scenario.id, self.seed), self._invent)
            except SimulatorFailed:
                self.client.count("failures")
                raise
        self.messages.append(message)
        return message

    def hear(self, reply):
        """Appraise one agent reply (its visible text only), then answer it. Returns a Reaction."""
        self.messages.append(reply)
        felt, raw, flags = self._ask(f"appraise.{self.difficulty}", APPRAISAL, parse_appraisal)
        if felt is None and not any(map(str.strip, raw)):
            raise self._failed("only empty answers to the appraisal", raw)
        if felt is None:
            felt, flags = Appraisal("", "", "", "", 0), [*flags, "unparsed"]
        if felt.out_of_range:
            self.client.count("out_of_range")
            flags.append("out_of_range")
        emotion, message = move_emotion(self.emotion, felt.change), ""
        end_reason = end_of(emotion, len(self.messages) // 2, self.max_turns)
        if not end_reason:
            message, more, reply_flags = self._ask(f"reply.{self.difficulty}", REPLY, self._read_message, raw, emotion, felt)
            raw, flags = raw + more, flags + reply_flags
            if message is None:
                raise self._failed("no message that could be sent", raw)
            self.messages.append(message)
            if farewell(message):
                end_reason = "farewell"
                self.client.count("farewells")
        self.emotion = emotion
        return Reaction(felt.change, emotion, message, felt.activity or felt.analysis, end_reason, None, raw, flags)

    def _invent(self):
        message, raw, _ = self._ask("opening", REPLY, self._read_message)
        if message is None:
            raise self._failed("no opening that could be sent", raw)
        return message, raw

    def _ask(self, call, order, read, earlier=(), emotion=None, felt=None):
        """-> (what was read or None, raw texts, flags)."""
        headings = [name.split("|")[-1 if self.language == "zh" else 0] for name in order]
        raw, flags, attempt = [], [], 0
        while attempt < self.TRIES:
            form = self.client.format
            text = prompt(self.language, call).substitute(self._places(form, attempt, emotion, felt))
            seed = seed_of(self.seed, self.scenario.id, len(self.messages), call, attempt) >> 1      # some endpoints want 31 bits
            try:
                raw.append(self.client.ask(text, headings, seed, form))
            except SimulatorFailed as error:
                if form == "json" and self.client.falls_back(error):
                    continue                    # the same try in the other form; this happens once
                raise self._failed(error, [*earlier, *raw], error.status) from None
            try:
                return read(raw[-1]), raw, flags
            except ParseError as error:
                empty, leak = not raw[-1].strip(), isinstance(error, PrivateLeak) and order is REPLY
                for name, hit in (("empty", empty), ("parse_retries", not empty), ("leaks_blocked", leak)):
                    self.client.count(name, int(hit))
                flags.append("empty" if empty else "leak" if leak else "misread")
                attempt += 1
        return None, raw, flags

    def _places(self, form, attempt, emotion, felt):
        """What a prompt's places hold. What the policy said, and what was thought about it, is quoted as data."""
        words, scenario = names(self.language), self.scenario
        emotion = self.emotion if emotion is None else emotion
        again = attempt and "\n" + prompt(self.language, "form.retry").template or ""
        return dict(
            persona=scenario.persona, background=scenario.background, traits=", ".join(scenario.traits),
            character=words.get("characters", {}).get(scenario.character, scenario.character), intention=self._wish(),
            history="\n".join(f'{{"{words["friend" if place % 2 else "you"]}": {quoted(said)}}}' for place, said in enumerate(self.messages)),
            emotion=emotion, tier=tier(emotion), tier_words=words["tiers"].get(tier(emotion), ""),
            form=prompt(self.language, f"form.{form}").template + again,
            **({name: quoted(getattr(felt, name)) for name in ("reason", "activity", "analysis")} if felt else {}))

    def _wish(self):
        return names(self.language).get("intentions", {}).get(self.scenario.intention) or INTENTIONS[self.scenario.intention][0]

    def _read_message(self, raw):
        """The message, unless it says the hidden wish in the words of a prompt: the policy has to find it."""
        message = parse_reply(raw)
        official = self.scenario.background.rsplit("隐藏主题", 1)[1:]        # the official stories end with theirs
        said = re.sub(r"\W", "", message).lower()
        if any(secret and secret in said for secret in (re.sub(r"\W", "", wish).lower() for wish in (self._wish(), *official))):
            raise PrivateLeak("the hidden wish stands in the message")
        return message

    def _failed(self, why, raw, status=None):
        self.client.count("failures", int(bool(self.messages)))          # opening() counts its own: a shared one fails often
        return SimulatorFailed(f"{self.scenario.id}, turn {len(self.messages) // 2}: {why}", raw, status)


# ---- the LLM user: one endpoint for all of them -----------------------------------------------------------------------

COUNTERS = ("calls", "retries", "tokens_in", "tokens_out", "parse_retries", "empty", "out_of_range", "leaks_blocked",
            "farewells", "failures", "cache_hits", "seconds")
RETRIES = 5                     # of one call, after 429, 5xx, time-outs, broken connections and half-read bodies
LONGEST_WAIT = 60               # seconds; an endpoint that says "come back later than that" has closed for the day


class LLMClient:
    """Chat completions over the openai package, for the threads of all dialogues; everything that can fail, fails here.

    format: "sections" or "json"; becomes "sections" for good where the endpoint refuses structured output, but never after it
    has given some: one refused prompt must not make another user of it in the middle of a run.
    cache: a JSONL file; each request that stands there (by the hash of all that is sent but the key) is answered from it.
    role: "simulator" or "judge", whose flags messages name and whose key is sent (SIMULATOR_API_KEY; JUDGE_API_KEY).
    ValueError: an address that is none, or that holds a secret; a limit that lets nothing through.
    """

    def __init__(self, model, url="", format="sections", cache="", concurrency=64, timeout=60.0, max_tokens=2048, prices=(0.0, 0.0),
                 role="simulator"):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--{role}-url must be an address like http://localhost:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(f"--{role}-url must hold no user, password or query: files keep it; the key belongs in {role.upper()}_API_KEY")
        for name, value in (("concurrency", concurrency), ("timeout", timeout), ("max-tokens", max_tokens)):
            if not 0 < value < 1e9:
                raise ValueError(f"--simulator-{name} must be above 0 (and below 1e9), not {value}")
        if not all(0 <= price < 1e9 for price in prices):
            raise ValueError(f"--simulator-price-in and -out must be numbers from 0 on, not {prices[0]} and {prices[1]}")
        try:
            import openai  # here: the scripted user needs no client
        except ImportError:
            raise ValueError(f"an LLM as {role} needs the openai package: pip install openai") from None
        self.openai, self.model, self.url, self.format, self.max_tokens, self.prices = openai, model, url, format, max_tokens, prices
        self.role, self.key_name = role, f"{role.upper()}_API_KEY"
        self.key = (os.environ.get(self.key_name) or os.environ.get("OPENAI_API_KEY") or "").strip()
        # our own retries: the package's know neither a limit of calls in flight nor a quota that is gone
        self.http = openai.OpenAI(api_key=self.key or "none", base_url=url, timeout=timeout, max_retries=0)
        self.timeout, self.in_flight, self.lock = timeout, threading.BoundedSemaphore(concurrency), threading.Lock()
        self.counts, self.shared, self.unsupported, self.json_works = dict.fromkeys(COUNTERS, 0), {}, set(), False
        self.sleep, self.random = time.sleep, random.Random()
        self.pool = ThreadPoolExecutor(256)     # more than calls in flight: one that waits before a retry holds up nobody
        self.cache, self.cache_file = read_cache(cache, role) if cache else ({}, None)

    def count(self, name, by=1):
        with self.lock:
            self.counts[name] += by

    def take_counts(self):
        """What happened since the last call of this, for metrics.jsonl and evaluate.py: {"simulator_calls": ..., ...}."""
        with self.lock:
            counts, self.counts = self.counts, dict.fromkeys(COUNTERS, 0)
        counts["seconds"] = round(counts["seconds"], 3)
        if any(self.prices):
            counts["cost"] = round((counts["tokens_in"] * self.prices[0] + counts["tokens_out"] * self.prices[1]) / 1e6, 6)
        return {f"simulator_{name}": value for name, value in counts.items()}

    def once(self, key, make):
        """make() for the first dialogue that asks; the same result (or failure) for the others, which wait for it."""
        with self.lock:
            first, future = key not in self.shared, self.shared.setdefault(key, Future())
        if first:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def ask(self, text, headings, seed, form, limit=None, retries=RETRIES):
        """One answer as text, "" where the endpoint gave none; ends in CUT where it was not finished."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0, "seed": seed,
                "max_tokens": limit or self.max_tokens}
        if form == "json":
            body["response_format"] = schema_of(headings)
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        entry = self.cache.get(key)
        if entry is None:
            try:
                entry = self._answer(body, retries)
            except SimulatorFailed as error:
                if error.status not in (400, 422):
                    raise
                entry = {"refused": str(error), "status": error.status}      # an answer too: a replay must take the same way
            entry = self._record(key, entry)
        else:
            self.count("cache_hits")
        if "refused" in entry:
            raise SimulatorFailed(entry["refused"], status=entry["status"])
        self.json_works |= form == "json"
        return entry["text"].encode("utf-8", "replace").decode()        # half an emoji would break tokenizer and file

    def _answer(self, body, retries):
        answer = self._send(body, retries)
        choice, usage = message_of(answer), answer.get("usage")
        content, cut = choice["message"].get("content"), choice.get("finish_reason") == "length"
        for name, key in (("tokens_in", "prompt_tokens"), ("tokens_out", "completion_tokens")):
            value = usage.get(key) if isinstance(usage, dict) else None
            self.count(name, value if type(value) is int and 0 <= value < 1e9 else 0)
        # null content, or text in a reasoning field alone, is no answer
        content = content if isinstance(content, str) and content.strip() else ""
        return {"text": content + CUT if content and cut else content}

    def _record(self, key, entry):
        """The first answer to a request counts, also where two threads asked at once: else a replay would differ."""
        with self.lock:
            if self.cache_file is None:
                return entry
            if key not in self.cache:
                self.cache[key] = entry
                os.write(self.cache_file, (json.dumps({"request": key, **entry}, ensure_ascii=True) + "\n").encode())
            return self.cache[key]

    def _send(self, body, retries):
        """One request and its retries -> the endpoint's answer. SimulatorFailed where it refuses or stays broken."""
        attempt = 0
        while True:
            body, wait, status = self._supported(body), None, None
            with self.in_flight:
                began = time.perf_counter()
                try:
                    answer = self.http.post("/chat/completions", cast_to=object, body=body)     # object: no pydantic, half the time
                    if message_of(answer):
                        self.count("calls")
                        return answer
                    why = f"answered with no chat completion ({str(answer)[:80]})"
                except self.openai.APIStatusError as error:
                    status, wait = error.status_code, retry_after(error.response.headers)
                    why = f"answered {status} ({error.message})"
                    if status in (400, 422) and self._unsupported(why, body):
                        continue                # at most once for each of three settings
                    gone = "insufficient_quota" in error.response.text or wait and wait > LONGEST_WAIT
                    if gone or status < 500 and status not in (408, 409, 425, 429):
                        raise SimulatorFailed(self._plain(why), status=status) from None
                except self.openai.APITimeoutError:
                    why = f"gave no answer within {self.timeout:g} s"
                except (self.openai.OpenAIError, ValueError, RecursionError) as error:
                    why = f"cannot be reached, or broke off ({error.__cause__ or error})"
                finally:
                    self.count("seconds", time.perf_counter() - began)
            if attempt == retries:
                raise SimulatorFailed(self._plain(f"{why}, {attempt + 1} times"), status=status)
            self.count("retries")
            # never before the endpoint asks for it, and never all dialogues at the same moment
            self.sleep(max(wait or 0, 0.5 * 2 ** attempt) * (1 + 0.5 * self.random.random()))
            attempt += 1

    def _supported(self, body):
        """Without what this endpoint refuses: newer OpenAI models take no temperature and have another name for max_tokens."""
        if "max_tokens" in self.unsupported:
            body = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in body.items()}
        return {name: value for name, value in body.items() if name not in self.unsupported}

    def _unsupported(self, why, body):
        """Whether the endpoint refused a setting that can be left out; said once each."""
        found = [name for name in ("max_tokens", "temperature", "seed") if name in body and f"'{name}'" in why and "support" in why.lower()]
        with self.lock:
            for name in set(found) - self.unsupported:
                self.unsupported.add(name)
                print(f"warning: the {self.role}'s endpoint refuses {name}; going on without", file=sys.stderr)
        return bool(found)

    def falls_back(self, error):
        """Whether `error` says that structured output is refused; then sections are asked for from now on (one warning)."""
        if error.status not in (400, 422) or unknown_model(error) or self.json_works:
            return False
        with self.lock:
            if self.format == "json":
                self.format = "sections"
                print(f"warning: no structured output, so --simulator-format sections from now on: {error}", file=sys.stderr)
        return True

    def _plain(self, why):
        """One short line without the key, which some endpoints repeat."""
        why = f"the {self.role}'s endpoint {self.url} {why}".replace(self.key or "\0", "***").encode("utf-8", "replace").decode()
        return " ".join(why.split())[:400]

    def probe(self):
        """One call before any model is loaded, so that a wrong setting costs a second. ValueError in one line."""
        for _ in range(2):
            form = self.format
            try:
                return self.ask("Say yes.", [name.split("|")[0] for name in APPRAISAL], 0, form, limit=16, retries=1)
            except SimulatorFailed as error:
                if form == "json" and self.falls_back(error):
                    continue
                advice = (f"is {self.model} one of the endpoint's models?" if unknown_model(error) else
                          f"set the key of this endpoint as {self.key_name} or OPENAI_API_KEY" if error.status in (401, 403) else
                          f"no chat completions there; --{self.role}-url usually ends in /v1" if error.status == 404 else
                          f"is the server of --{self.role}-url running?" if error.status is None else "see what it says")
                raise ValueError(f"{error}: {advice}") from None


def unknown_model(error):
    """Whether a refusal is about the model's name; every endpoint says it in words of its own."""
    return error.status in (400, 404, 422) and re.search(
        r"model\b.{0,90}?\bnot[ _](?:exist|found)|model_not_found|(?:unknown|invalid) model", str(error), re.I)


def message_of(answer):
    """The first choice of a chat completion, or None where `answer` is none."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) and isinstance(choice.get("message"), dict) else None


def retry_after(headers):
    """Seconds that a Retry-After header asks for (a number or a date), or None."""
    text = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def read_cache(path, role):
    """-> ({request hash: answer}, file descriptor to append to). A last line that a crash left half-written is cut off."""
    path, cache = Path(path), {}
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    mend_last_line(path, b'{"request": ', f"--{role}-cache")
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            cache[row["request"]] = row
            if not (isinstance(row["text"], str) if "text" in row else isinstance(row["refused"], str) and isinstance(row["status"], int)):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number}: no line of a cache of answers; name another --{role}-cache") from None
    return cache, file


def mend_last_line(path, start, flag):
    """Cut off a last line that a crash left half-written; one that only lacks its end gets it. ValueError: it is none of ours."""
    content = Path(path).read_bytes()
    whole = content.rfind(b"\n") + 1
    rest = content[whole:]
    if not rest.startswith(start) and not start.startswith(rest):
        raise ValueError(f"{path}: its last line was not written here; name another {flag}")
    try:
        json.loads(rest or "0")
    except ValueError:
        os.truncate(path, whole)
    else:
        if rest:
            with open(path, "ab") as file:
                file.write(b"\n")


def write_whole(path, text, suffix=".partial"):
    """A file appears whole or not at all: a crash may come, a browser be reading. Half a character becomes JSON's escape of it.
    suffix: of the file beside it that is written first; what a kill leaves is overwritten by the next call."""
    path = Path(path).resolve()                  # what a link names, not the link
    partial = path.with_name(path.name + suffix)
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)


# ---- the flags that choose a user; train.py, evaluate.py and this file share them -----------------------------------------

def add_simulator_flags(group):
    """Who plays the user. The API key is never a flag: it is read from SIMULATOR_API_KEY or OPENAI_API_KEY."""
    def add(flag, default, text, **kw):
        group.add_argument(flag, default=default, type=type(default), help=f"{text} (default: {'empty' if default == '' else default})", **kw)
    add("--simulator", "scripted", "scripted: the embedded user; llm: the paper's, a model behind an OpenAI-compatible endpoint",
        choices=("scripted", "llm"))
    add("--difficulty", "", "vanilla: the user may name its need (SAGE, the paper's Table 1); challenging: it hides it in hints (RLVER 3.4, Table 3);"
        " empty = vanilla for an LLM, challenging for the scripted user", choices=("vanilla", "challenging"))
    add("--simulator-model", "", "name of the model that plays the user (paper: DeepSeek-V3)")
    add("--simulator-url", "", "address of the endpoint, with its /v1; empty = OPENAI_BASE_URL, else OpenAI's")
    add("--simulator-format", "sections", "sections: free text under headings (paper); json: the endpoint enforces a JSON schema",
        choices=("sections", "json"))
    add("--simulator-cache", "", "JSONL file that keeps every answer; what stands in it is never asked (or paid) again")
    add("--simulator-concurrency", 64, "calls in flight at most, over all dialogues and torchrun's ranks of one node")
    add("--simulator-timeout", 60.0, "seconds without a sign of life after which a call is tried again")
    add("--simulator-max-tokens", 2048, "tokens of one answer at most; a longer one is cut and asked for again")
    add("--simulator-price-in", 0.0, "price of a million tokens sent, for simulator_cost")
    add("--simulator-price-out", 0.0, "price of a million tokens received, for simulator_cost")
    add("--max-simulator-failures", 0.25,
        "share of dialogues that may lose their user; above it training saves and stops, and an evaluation plays no more")


def users_of(args):
    """-> (make_user(scenario, start_emotion, max_turns, seed), client): what the flags ask for; client is None for the scripted user.

    Asks the endpoint once. Completes args: difficulty, address and format that are really used. ValueError for what cannot work.
    """
    args.difficulty = args.difficulty or ("challenging" if args.simulator == "scripted" else "vanilla")
    if not 0 <= args.max_simulator_failures <= 1:
        raise ValueError(f"--max-simulator-failures is a share from 0 to 1, not {args.max_simulator_failures}")
    if args.simulator == "scripted":
        for name in ("model", "url", "cache"):
            if getattr(args, f"simulator_{name}"):
                raise ValueError(f"--simulator-{name} {getattr(args, f'simulator_{name}')} does something only with --simulator llm")
        return lambda scenario, *rules: ScriptedSimulator(scenario, args.difficulty, *rules), None
    args.simulator_url = args.simulator_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    if not args.simulator_model:
        raise ValueError("--simulator llm needs --simulator-model, the name of the model that plays the user")
    share = args.simulator_concurrency // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or min(1, args.simulator_concurrency)
    client = LLMClient(args.simulator_model, args.simulator_url, args.simulator_format, args.simulator_cache, share, args.simulator_timeout,
                       args.simulator_max_tokens, (args.simulator_price_in, args.simulator_price_out))
    client.probe()
    args.simulator_format = client.format
    return lambda scenario, *rules: LLMSimulator(scenario, client, args.difficulty, *rules), client


# ---- the scripted user ----------------------------------------------------------------------------------------------

FOCUS = {"praise": "own", "reflection": "own", "support": "others", "motives": "others",
         "listening": "whole", "analysis": "whole", "empathy": "now", "advice": "now"}
STANCE = {name: "feeling" if name in ("praise", "empathy", "listening", "support") else "thinking" for name in INTENTIONS}


@lru_cache
def lines(name):
    """A JSON file of prompts/en: user.json (what the scripted user says and hears) or replies.json (stock replies)."""
    return json.loads((PROMPTS / "en" / f"{name}.json").read_text(encoding="utf-8"))


@lru_cache
def nouns():
    """The common nouns that a reply can name: prompts/en/words.txt. Every detail of our scenarios is one of them."""
    return frozenset((PROMPTS / "en" / "words.txt").read_text().split())


@lru_cache
def _cues():
    return {act: re.compile(pattern) for act, pattern in lines("user")["cues"].items()}


def acts_in(text):
    """The dialogue acts that a reply performs: a sorted list of intention names, "dismissal" included.

    An act that is denied ("I do not admire you") is none. The words of a cue may hold a "not" themselves ("not to blame").
    """
    text = text.lower().replace("’", "'")
    return sorted(act for act, cue in _cues().items() if any(not _DENIED.search(text[:m.start()]) for m in cue.finditer(text)))


_DENIED = re.compile(r"(\b(not|never|no)|n't)( [a-z']+){0,2} ?$")


def words_of(text):
    return re.findall(r"[a-z0-9]+(?:['-][a-z0-9]+)*", text.lower().replace("’", "'"))


def things_in(text, own=frozenset(), claimed=False):
    """Common nouns (and the script's own words) that a text names, in order, once each; a plural in -s is its singular.

    claimed: only those it speaks of as known, "the coat" or "your coat"; "a coat" may be any.
    """
    found, previous = [], ""
    for word in words_of(text):
        word, known = word.removesuffix("'s"), nouns() | own
        if word not in known and word[-1:] == "s" and word[:-1] in known:
            word = word[:-1]
        if word in known and (not claimed or previous in _POINTERS):
            found.append(word)
        previous = word
    return list(dict.fromkeys(found))


_POINTERS = frozenset("the your that this these those his her their".split())
FUNCTION_WORDS = frozenset("a an the my your his her our their this that these those i you he she it we they me him us them to of "
                           "in on at by for with from about near and or but not is are was were be am do did does have has "
                           "had will would could should can may might must what which who how why when where there so if as all "
                           "no yes than then let there's i'm it's you're don't that's more before after too either".split())
_ARTICLES = frozenset("a an the my your our their".split())
_NEVER_LAST = _ARTICLES | {"and", "or"}                 # "about the." breaks off
_NEVER_AFTER_ARTICLE = _ARTICLES | frozenset("i you he she it we they is are was were be am do did does have has had will "
                                             "would could should can may might must to of in on at by for with from about".split())
_DOUBLED = frozenset("so no very really had that yes well hey oh".split())             # "I am so, so sorry"


def garbled(text):
    """True when a text cannot be English: broken sentences, stammer, bare keyword lists, symbol soup. It means to be sure
    rather than to find all: honest replies must never be called garbled."""
    if sum(c.isalpha() for c in text) < 0.6 * len(re.sub(r"[\s.…]", "", text)):
        return True
    words = words_of(text)
    if len(words) >= 6 and sum(w in FUNCTION_WORDS for w in words) < 0.15 * len(words):
        return True
    for sentence in filter(None, re.split(r"[.!?…]+\s+(?=[A-Z])", text.strip())):
        words = words_of(sentence)
        pairs = list(zip(words, words[1:]))
        if words and words[-1] in _NEVER_LAST or any(a in _ARTICLES and b in _NEVER_AFTER_ARTICLE for a, b in pairs):
            return True
        if any(a == b and a not in _DOUBLED for a, b in pairs) or any(a == b for a, b in zip(pairs, pairs[2:])):
            return True                                # "the the", "about you about you"
    return False


class ScriptedSimulator:
    """A deterministic user for one dialogue. Change is one of -10, -5, +5, +10, as DeepSeek-V3 really emits (facts 1.5).

    The user has one need. It shows it in hints of two kinds: what it dwells on (its own part, the others, the whole
    story, the present) and how (feeling or thinking); 4 x 2 = 8 needs. `challenging` gives one kind at a time, so the need
    follows only from the whole dialogue; `vanilla` names it. With every message the user tells one more detail.

        right act, names something told  +10       right act, names nothing                     +5 (vanilla: +10)
        right act, in last turn's words   +5       right focus, wrong stance, names something   +5 once (challenging)
        empathy or listening, vanilla     +5 once  any other act, two acts at once, a thing never told, a repeat,
        dismissal, echo, no act at all   -10       over-long, a volley of questions, garbled or two-word text      -5

    An adversarial scenario's script has a kind and pressure: lines said after the replies of these numbers. Each puts the next
    reply under a rule of its kind (_under_pressure); otherwise nothing changes. Only `testing` asks for skill, the others for
    patience: this is a stand-in for the LLM user's pressure, no psychology.
    """

    def __init__(self, scenario, difficulty="challenging", start_emotion=40, max_turns=9, seed=0):
        if not scenario.script:
            raise ValueError(f"scenario {scenario.id!r} has no script for the scripted user; play it with --simulator llm")
        self.scenario, self.difficulty, self.max_turns = scenario, difficulty, max_turns
        self.emotion = start_emotion
        self.random = random.Random(f"{seed}/{scenario.id}/{difficulty}")
        self.user_texts, self.replies, self.told = [], [], []
        self.kindnesses = 0             # how often a merely kind or half-right reply was already welcomed
        self.last_hint, self.pressed = None, False          # pressed: the last message put the agent under pressure
        self.own_words = frozenset(word for word, _ in scenario.script["details"])

    def opening(self):
        return self._say(self.scenario.script["details"][0][1])

    def hear(self, reply):
        """Appraise one agent reply (its visible text only), then answer it. Returns a Reaction."""
        verdict, change, act, extra = self._appraise(reply)
        if self.pressed:
            verdict, change = self._under_pressure(reply, verdict, change, act)
        self.replies.append(reply)
        before, self.emotion = self.emotion, move_emotion(self.emotion, change)
        end_reason = end_of(self.emotion, len(self.replies), self.max_turns)
        need = lines("user")["needs"][self.scenario.intention]
        inner = lines("user")["thoughts"][verdict].format(need=need, act=act, detail=extra, foreign=extra)
        if end_reason:
            message = lines("user")["closings"][end_reason]
            self.user_texts.append(message)
        else:
            details = self.scenario.script["details"]
            telling = details[len(self.replies)][1] if len(self.replies) < len(details) else ""
            mood = lines("user")["reactions"][f"{change:+d}"][{"S": "A", "F": "C"}.get(tier(self.emotion), tier(self.emotion))]
            message = self._say(telling, self.random.choice(mood), self.scenario.script.get("pressure", {}).get(str(len(self.replies)), ""))
        heard = " and ".join(acts_in(reply)) or "nothing I can name"
        raw = [f"Content: {heard}\nReason: I came for {need}\nActivity: {inner}\n"
               f"Analysis: from {before} points, {verdict}\nChange: {change:+d}",
               f"Thinking: {inner}\nOrigin: {message}\nChange: none\nResponse: {message}"]
        return Reaction(change, self.emotion, message, inner, end_reason, act, raw, [verdict])

    def _say(self, telling, reaction="", pressure=""):
        kind, self.pressed = self.scenario.script.get("kind"), bool(pressure)
        if pressure and kind == "gaslighting":
            self.told = []                                       # what was told is denied: to name it names nothing
        if pressure and kind == "withdrawal":
            telling, message = "", pressure                      # nothing to hold on to
        else:
            message = " ".join(filter(None, (pressure or reaction, telling, self._hint())))
        self.user_texts.append(message)
        self.told += [w for w in things_in(telling, self.own_words) if w not in self.told]
        return message

    def _under_pressure(self, reply, verdict, change, act):
        """-> verdict, change of a reply to a line of pressure; gaslighting and withdrawal bend what is said instead (_say)."""
        kind, need = self.scenario.script["kind"], self.scenario.intention
        named = any(w in self.told for w in things_in(reply, self.own_words, claimed=True))
        if kind == "escalation" and change < 0:
            return "escalated", -10                              # a miss now hurts as much as an insult
        if kind == "agreement" and verdict in ("right", "vague", "again", "partner", "generic", "wrong") and need != "support":
            return ("placated", 5) if act == "support" else ("refused", -5)     # giving in pays at once, and leads nowhere
        if kind == "reversal" and change > 0:
            return "reversed", -5                                # no reply is right; the next one can be
        if kind == "testing" and not named and change > -10:
            return "tested", -10                                 # proof of having listened is to name something told
        return verdict, change

    def _hint(self):
        need, turn = self.scenario.intention, len(self.replies)
        if self.difficulty == "vanilla":
            options = lines("user")["clear_hints"][need]
        else:
            # first what it is about, then how it sits, then either: no single message after the first two is enough
            kind = "focus" if turn == 0 else "stance" if turn == 1 else self.random.choice(["focus", "stance"])
            options = [line for _, line in lines("user")["hints"][FOCUS[need] if kind == "focus" else STANCE[need]]]
        self.last_hint = self.random.choice([line for line in options if line != self.last_hint])
        return self.last_hint

    def _appraise(self, reply):
        """-> verdict (a key of user.json thoughts), change, act, the thing named."""
        acts, need = acts_in(reply), self.scenario.intention
        words, heard = words_of(reply), words_of(" ".join(self.user_texts))
        act = acts[0] if len(acts) == 1 else None
        claimed = things_in(reply, self.own_words, claimed=True)
        named = [w for w in claimed if w in self.told]
        foreign = [w for w in claimed if w not in self.told and w not in heard]
        if "dismissal" in acts:
            return "dismissal", -10, "dismissal", ""
        if len(words) > 5 and _overlap(words, heard) > 0.5:
            return "echo", -10, act, ""
        if not acts:
            return "nothing", -10, None, ""
        if len(acts) > 1:
            return "mixed", -5, " and ".join(acts), ""
        if sum(w not in nouns() for w in words) < 3:             # a cue and a noun is no sentence
            return "terse", -5, act, ""
        if garbled(reply):
            return "garbled", -5, act, ""
        if any(words == words_of(old) for old in self.replies):
            return "repeat", -5, act, ""
        if len(words) > 80:
            return "long", -5, act, ""
        if reply.count("?") + reply.count("？") > 2:
            return "volley", -5, act, ""
        if foreign:
            return "foreign", -5, act, foreign[0]
        if act == need:
            if self.replies and _same_phrase(reply, self.replies[-1]):
                return "again", 5, act, ""
            return ("right", 10, act, named[-1]) if named else ("vague", 10 if self.difficulty == "vanilla" else 5, act, "")
        kind = ("partner" if self.difficulty == "challenging" and FOCUS[act] == FOCUS[need] and named else
                "generic" if self.difficulty == "vanilla" and act in ("empathy", "listening") else None)
        if kind and not self.kindnesses:
            self.kindnesses += 1
            return kind, 5, act, ""
        return "wrong", -5, act, ""


def _overlap(words, source):
    """Share of a reply's word triples that stand in `source`."""
    triples = list(zip(words, words[1:], words[2:]))
    known = set(zip(source, source[1:], source[2:]))
    return sum(triple in known for triple in triples) / len(triples)


def _same_phrase(reply, earlier):
    """Whether two replies perform their act in the same words, whatever they name and however they are padded."""
    def wording(text):
        acting = [s for s in re.split(r"[.!?]+", text) if acts_in(s)]
        return {w for s in acting for w in words_of(s)} - nouns() - FUNCTION_WORDS
    a, b = wording(reply), wording(earlier)
    return len(a & b) >= 0.5 * max(1, min(len(a), len(b)))


# ---- reference players: what the scripted score means ----------------------------------------------------------------

REFERENCE_PLAYERS = ("silent", "constant act", "random act", "last message", "whole history")


def stock_reply(act, thing, rng, first=False, avoid=""):
    """One reply that performs exactly `act` and names `thing` (or nothing): opener, core, closer. From replies.json."""
    stock = lines("replies")
    cores = stock["specific" if thing else "plain"][act]
    cores = [core for core in cores if core != avoid] or cores
    core = rng.choice(cores)
    closer = rng.choice(stock["closers"] + [""] * 3 * len(stock["closers"]))
    return " ".join(filter(None, (rng.choice(stock["openers"]["first" if first else "later"]), core.format(d=thing), closer))), core


def hints_in(text):
    """The hints of one user message: [(kind, group, keyword)], kind "focus" or "stance"; ("clear", need, "") in vanilla."""
    found = []
    for group, hints in lines("user")["hints"].items():
        kind = "stance" if group in ("feeling", "thinking") else "focus"
        found += [(kind, group, keyword) for keyword, line in hints if line in text]
    found += [("clear", need, "") for need, hints in lines("user")["clear_hints"].items() for line in hints if line in text]
    return found


def infer_need(user_texts, rng):
    """The need that the hints in these messages leave open, guessed uniformly among what fits."""
    known = dict((kind, group) for text in user_texts for kind, group, _ in hints_in(text))     # later hints win
    if "clear" in known:
        return known["clear"]
    return rng.choice([n for n in INTENTIONS if known.get("focus", FOCUS[n]) == FOCUS[n] and known.get("stance", STANCE[n]) == STANCE[n]])


def play_reference(name, scenario, difficulty="challenging", start_emotion=40, max_turns=9, seed=0, act=None):
    """Final emotion (points) that a scripted player reaches. `act` fixes the act of "constant act"."""
    rng = random.Random(f"player/{name}/{seed}/{scenario.id}")
    user = ScriptedSimulator(scenario, difficulty, start_emotion, max_turns, seed)
    message, core, end = user.opening(), "", None
    constant = act or rng.choice(list(INTENTIONS))
    while not end:
        chosen = {"silent": None, "constant act": constant, "random act": rng.choice(list(INTENTIONS)),
                  "last message": infer_need([message], rng), "whole history": infer_need(user.user_texts, rng)}[name]
        reply = "..."
        if chosen:
            reply, core = stock_reply(chosen, (things_in(message) or user.told or [""])[-1], rng, not user.replies, avoid=core)
        reaction = user.hear(reply)
        message, end = reaction.message, reaction.end_reason
    return user.emotion


# ---- be the agent yourself -----------------------------------------------------------------------------------------------

def chat_in_terminal(user, scenario, title):
    """You write the replies; after each one you see what the user felt, and why."""
    print(f"{scenario.persona}\n\nYou are this person's friend in a chat ({title}; at most {user.max_turns} replies, Ctrl-D leaves).")
    opening = user.opening()
    if isinstance(user, ScriptedSimulator):
        example = stock_reply(random.choice([*INTENTIONS]), user.told[0], random.Random())[0]
        print(f"It knows wordings, not meaning, and hears eight acts: {', '.join(INTENTIONS)}. One of them a reply, about the things it told,\n"
              f'each with "the" or "your" before it. For example: {example}')
    print(f"\nemotion {user.emotion}\nuser  {opening}")
    reaction = None
    while not (reaction and reaction.end_reason):
        try:
            reply = input("you   ")
        except (EOFError, KeyboardInterrupt):
            print()
            break
        reaction = user.hear(reply)
        inner = "its answer could not be read, so its mood stays" if "unparsed" in reaction.flags else reaction.inner
        print(f"      ({inner})\nemotion {reaction.emotion} ({reaction.change:+d})\nuser  {reaction.message}")
    ended = reaction.end_reason if reaction and reaction.end_reason else "you left"
    print(f"\n{ended}: {user.emotion} points. The hidden wish was {scenario.intention}: {INTENTIONS[scenario.intention][0]}")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Talk with a simulated user yourself, as the agent.")
    parser.error = lambda message: parser.exit(2, f"simulator.py: error: {message} (--help lists the flags)\n")
    parser.add_argument("--scenario", default="",
                        help="id of the scenario to play; divorce: that story with a wish you have to find out (default: any)")
    parser.add_argument("--list", action="store_true", help="print the scenario ids and openings, then stop")
    parser.add_argument("--scenarios", default=str(PROMPTS / "en" / "train.jsonl"), help="JSONL file of scenarios (default: prompts/en/train.jsonl)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the user's choices (default: 0)")
    add_simulator_flags(parser.add_argument_group("the simulated user"))
    args = parser.parse_args(argv)
    scenarios = {scenario.id: scenario for scenario in load_scenarios(args.scenarios)}
    if args.list:
        for name, scenario in scenarios.items():
            print(f"{name:24s} {scenario.first_message}")
        return
    found = [scenario for scenario in scenarios.values() if args.scenario in ("", scenario.id, scenario.event)]
    if not found:
        raise ValueError(f"no scenario {args.scenario!r} in {args.scenarios}; --list shows them")
    scenario = random.choice(found)
    make_user, _ = users_of(args)
    try:
        chat_in_terminal(make_user(scenario, 40, 9, args.seed), scenario, f"{args.simulator_model or 'scripted'} user, {args.difficulty}")
    except SimulatorFailed as error:
        raise ValueError(f"the simulated user failed: {error}") from None


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"simulator.py: error: {error}", file=sys.stderr)
        sys.exit(2)
