"""The report: one HTML file for a training run, an evaluation or a comparison. No network, no second file, no build step.

Curves, tables and plots are drawn here; assets/report.html holds style, layout and a few lines of JavaScript that filter
and open dialogues. Whatever a model or a user wrote stays text, by three walls: tables and plots are escaped, dialogues
travel as JSON that holds no "<" and are shown through textContent, and the page's policy runs no script but the
template's own (by its hash).
Address of a view: report.html#q=money&intention=praise&end=gave_up&source=after&open=0   (open: row of the filtered list)
Run: python evaluate.py --report runs/NAME          # also FILE.jsonl, result.json, two of them, a published SAGE file
     python evaluate.py --watch runs/NAME           # writes it again and again while the run trains
"""
import base64
import hashlib
import json
import math
import os
import string
import time
from collections import defaultdict
from decimal import Decimal
from html import escape
from pathlib import Path

import evaluate
import simulator

TEMPLATE = Path(__file__).resolve().parent / "assets" / "report.html"
STEPS_SHOWN = 8                 # a long run's dialogues would make a file that no phone opens: evenly spread steps, first and last
# drawn first, with a plain title and the ends that the scale has at least; every other number of metrics.jsonl is folded
CURVES = {"emotion": ("mean final emotion, points", 0, 100), "success": ("% of dialogues that reach 100", 0, 100),
          "failure": ("% of dialogues that end below 10", 0, 100), "eval_emotion": ("held-out score, points", 0, 100),
          "response_len": ("tokens of reply and thought", 0, 0), "turns": ("replies in a dialogue", 0, 0),
          "format_rate": ("well-formed replies, %", 0, 100), "repeat_rate": ("repeated replies, %", 0, 0),
          "approx_kl": ("KL of a step's update, nats", 0, 0), "ref_kl": ("KL to the first policy, nats", 0, 0),
          "mismatch": ("engine against learner, nats", 0, 0), "entropy": ("entropy, nats a token", 0, 0)}
BINS = [(low, low + 9) for low in range(0, 100, 10)] + [(100, 100)]


def write_report(paths, out=None, force=False, refresh=0):
    """One page from a run folder, or from one or two result or transcript files. Returns its path.

    out: where to write (default: report.html in the folder, or the first file's name with .html). refresh: seconds after which
    an open page loads itself again, 0 = never. ValueError when there is nothing to show, or when two results met different
    simulated users and it is not forced; then the page says so at every plot.
    """
    paths = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    found = gather_run(paths[0], force) if len(paths) == 1 and paths[0].is_dir() else gather_files(paths, force)
    if len(found["results"]) == 2:
        evaluate.check_same_users(*found["results"].values(), force)
    out = Path(out) if out else paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")
    if out.exists() and not (out.is_file() and out.read_bytes()[:15].lower() == b"<!doctype html>"):
        raise ValueError(f"{out} holds something else than a page; name another file with --out")
    try:
        simulator.write_whole(out, page(**found, refresh=refresh), f".{os.getpid()}.partial")         # train.py and a watch may both write it
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); name another file with --out") from None
    return out


def watch(run_dir, out=None, force=False, seconds=10):
    """Write the report again whenever the run has logged a step or was evaluated, until Ctrl-C; the page reloads itself meanwhile."""
    files, seen, told = [Path(run_dir) / name for name in ("metrics.jsonl", "before.json", "after.json")], None, False
    if not Path(run_dir).is_dir():
        raise ValueError(f"{run_dir}: no run folder to watch; train.py makes it as soon as the policy is built")
    if not files[0].exists():
        print(f"{run_dir}: no step yet; waiting for the first", flush=True)
    try:
        while True:
            stamp = [path.stat().st_mtime_ns for path in files if path.exists()] or None
            if stamp != seen:
                try:
                    path, seen = write_report(run_dir, out, force, refresh=seconds), stamp
                    told = told or print(f"{path}: open it in a browser; Ctrl-C ends the watch", flush=True) or True
                except ValueError:               # a line was half-written; the next look finds it whole
                    if seen is None:
                        raise
            time.sleep(seconds)
    except KeyboardInterrupt:
        if seen:
            write_report(run_dir, out, force)


# ---- what there is to show -------------------------------------------------------------------------------------------------

def gather_run(run, force=False):
    """A run folder: config.json, metrics.jsonl, before/after.json(l), the dialogues of some steps."""
    metrics, config = run / "metrics.jsonl", run / "config.json"
    metrics = [row for _, row in evaluate.read_jsonl(metrics, growing=True)] if metrics.exists() else []
    results, sources = {}, {}
    for name in ("before", "after"):
        result, talks = run / f"{name}.json", run / f"{name}.jsonl"
        if result.exists() or talks.exists():
            results[name], sources[name] = read_both(result if result.exists() else talks, force)
    steps = sorted(run.glob("transcripts/step-*[0-9].jsonl"))
    count = min(STEPS_SHOWN, len(steps))
    shown = [round(place * (len(steps) - 1) / max(1, count - 1)) for place in range(count)]
    for path in (steps[place] for place in shown):
        sources[f"step {path.stem.removeprefix('step-').lstrip('0')}"] = evaluate.read_transcripts(path)
    for path in sorted(run.glob("transcripts/held-out-*[0-9].jsonl"))[-1:]:
        sources[f"held out, step {path.stem.removeprefix('held-out-').lstrip('0')}"] = evaluate.read_transcripts(path)
    if not (results or sources or metrics):
        raise ValueError(f"{run}: no run to report (no metrics.jsonl, before.json, after.json or transcripts in it)")
    try:
        settings = dict(json.loads(config.read_bytes())) if config.exists() else {}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config}: not a JSON object ({error})") from None
    kicker = "Training run" + (f": {settings.get('algo', '')}, {'thinking' if settings.get('think') else 'without thinking'}" if settings else "")
    note = f" Dialogues of {len(shown)} of {len(steps)} steps are shown; the others lie in {run.name}/transcripts." if len(steps) > len(shown) else ""
    return dict(title=run.resolve().name, kicker=kicker, metrics=metrics, results=results, sources=sources, settings=settings, note=note)


def read_both(path, force=False):
    """The summary and the transcripts of a result file (its dialogues lie beside it, as NAME.jsonl; [] without) or a transcript file."""
    result, talks = evaluate.read_result(path, force), path.with_suffix(".jsonl") if path.suffix == ".json" else path
    transcripts = evaluate.read_transcripts(talks) if talks.exists() else []
    if transcripts and path.suffix == ".json":
        row = lambda t: [t["scenario"], t.get("repetition", 0), None if evaluate.failed(t) else t["final_emotion"], t["end_reason"]]
        transcripts = [transcript for transcript in transcripts if row(transcript) in result["dialogues"]]
        if len(transcripts) != len(result["dialogues"]):
            raise ValueError(f"{talks} holds other dialogues than {path}; rename one of them")
        if not result.get("judge"):              # a judge of another call may have read them since
            transcripts = evaluate.without_judge(transcripts)
        # numbers that the result file was too old to hold
        result |= {key: value for key, value in evaluate.summarize(transcripts).items() if result.get(key) in (None, {})}
    return result, transcripts


def gather_files(paths, force=False):
    """One or two result files (--json) or transcript files, ours or SAGE's."""
    results, sources = {}, {}
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path}: a folder is reported alone; to compare two runs, name their after.json")
        name = path.stem.partition("_based_simulator__")[2].removesuffix("_result") or path.stem
        name = name if name not in results else f"{path.parent.name}/{path.stem}"
        results[name], sources[name] = read_both(path, force)
    return dict(title=" and ".join(results), kicker="Evaluation" if len(results) == 1 else "Comparison", metrics=[], results=results,
                sources=sources, settings={}, note="")


# ---- the page --------------------------------------------------------------------------------------------------------------

def page(title, kicker, metrics, results, sources, settings, note, refresh=0):
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]        # the hash of exactly these bytes may run
    data = [{"source": name, "dialogues": [short(transcript) for transcript in transcripts]} for name, transcripts in sources.items()]
    parts = [(title_, body) for title_, body in (
        ("Results", warning(results) + tiles(results, metrics, settings.get("steps")) + html_comparison(results)
         + "".join(text("p", circumstances(summary["settings"]), class_="fine") for summary in [*results.values()][:1])),
        ("Learning curves", metrics and text("p", circumstances(settings, "Dialogues of training"), class_="fine") + html_curves(metrics)),
        ("By hidden intention", html_groups(results, "per_intention")), ("By character", html_groups(results, "per_character")),
        ("Kinds of pressure", html_groups(results, "per_kind")), ("Final emotions", html_histogram(results)),
        ("Strategies", html_strategies(results)), ("Abilities, as judged", html_judged(results)),
        ("All numbers and settings", html_numbers(results, settings))) if body]
    return string.Template(template.replace(script, "$script")).substitute(
        script=script, policy=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(), title=escape(title), kicker=escape(kicker),
        refresh=f'<meta name="reload" content="{int(refresh)}">' if refresh else "",
        sections="".join(f"<section><h2>{name}</h2>{body}</section>" for name, body in parts), note=escape(note), count=len(results),
        data=json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def short(transcript):
    """What the page needs of a dialogue; the simulator's raw texts stay in the transcript."""
    felt = evaluate.scored_turns(transcript)
    return {"id": transcript["scenario"], "intention": transcript["intention"], "character": transcript.get("character") or "",
            "kind": transcript.get("kind") or "", "repetition": transcript.get("repetition", 0), "error": transcript.get("error") or "",
            "opening": transcript.get("opening") or "", "end": transcript["end_reason"], "final": transcript["final_emotion"],
            "failed": evaluate.failed(transcript), "max_turns": transcript["max_turns"],
            "emotions": [transcript["start_emotion"], *(turn["emotion"] for turn in felt)], "judge": transcript.get("judge") or None,
            "turns": [{key: turn.get(key) for key in ("thought", "reply", "change", "emotion", "inner", "user", "act", "flags")}
                      for turn in transcript["turns"]]}


def el(tag, *inner, **attributes):
    """One element. inner: HTML that is safe already; attributes are escaped here (class_ is class, aria_label aria-label)."""
    said = "".join(f' {name.strip("_").replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items())
    return f"<{tag}{said}>{''.join(inner)}</{tag}>"


def text(tag, words, **attributes):
    return el(tag, escape(str(words)), **attributes)


def html_table(rows):
    """The first row is the head."""
    head, *rows = (el("tr", *(text("td" if number else "th", cell) for cell in row)) for number, row in enumerate(rows))
    return el("div", el("table", el("thead", head), el("tbody", *rows)), class_="wide")


def fold(title, *inner):
    return el("details", text("summary", title), *inner)


def circumstances(settings, what="Played"):
    """One line on whom these dialogues met, since a page is mailed around alone. settings: of a result, or a run's flags."""
    known = {key: " and ".join(map(str, value)) if isinstance(value, list) else value for key, value in settings.items() if value not in (None, "")}
    user = {"scripted": "a scripted user (rules, no LLM: its scores are never comparable with the paper's)",
            "llm": f"an LLM user ({known.get('simulator_model', 'unknown')})", "None": "an unknown user"}.get(
                str(known.get("simulator")), str(known.get("simulator")))
    said = [f"with {user}", known.get("difficulty"), "scenarios" in known and f"scenarios of {Path(str(known['scenarios'])).name}",
            "start_emotion" in known and f"start {known['start_emotion']}", "max_turns" in known and f"at most {known['max_turns']} replies"]
    return f"{what}: {', '.join(str(part) for part in said if part)}."


def warning(results):
    """Said at every plot that shows what no table may mix: the users of two results, or of one, were different people."""
    mixed = evaluate.check_same_users(*results.values(), force=True) if len(results) == 2 else {}
    within = [f"{name} mixes dialogues of different settings ({', '.join(keys)})." for name, result in results.items()
              if (keys := result["settings"].get("mixed"))]
    said = [f"Not comparable: the simulated users differ ({', '.join(mixed)})."] * bool(mixed) + within
    return text("p", " ".join(said), class_="warn") if said else ""


def side_by_side(results, values):
    """Two numbers; an arrow only where one became the other."""
    return (" → " if [*results] == ["before", "after"] and not warning(results) else " | ").join(values)


def legend(results):
    keys = (el("span", class_=f"key k{place}") + escape(name) + " " for place, name in enumerate(results))
    return warning(results) + el("p", *keys, class_="legend")


def is_number(value):
    """Of a size that can be drawn; NaN and Infinity are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e99


def tiles(results, metrics, steps=None):
    """The few numbers that one looks for first."""
    def tile(label, value, under=""):
        made.append(el("div", text("b", value), text("span", label), text("small", under), class_="tile"))
    made, known = [], [result for result in results.values() if result["score"] is not None]
    of_last = f" of {[*results][-1]}" if len(known) > 1 else ""
    for key, label in {"score": "score, points", "success": "success, %", "failure": "failure, %"}.items() if known else ():
        ci = known[-1][f"{key}_ci"]
        tile(label, side_by_side(results, (evaluate.half_up(result[key]) for result in known)),
             f"95 %{of_last}: {evaluate.half_up(ci[0])} to {evaluate.half_up(ci[1])}" if ci else "")
    for name, result in results.items():
        if result["incomplete"]:
            tile(f"{name}: dialogues without a score", str(result["failed"]), f"INCOMPLETE: {result['n']} were scored")
    emotions = [row["emotion"] for row in metrics if is_number(row.get("emotion"))]
    if known:
        tile("dialogues", side_by_side(results, (str(result["n"]) for result in known)), f"{evaluate.half_up(known[-1]['mean_turns'])} replies each")
    elif emotions:
        tile("mean final emotion, training", f"{emotions[0]:.1f} → {emotions[-1]:.1f}", f"best {max(emotions):.1f}")
        seconds = sum(row["seconds"] for row in metrics if is_number(row.get("seconds")))
        tile("steps", f"{metrics[-1].get('step', len(metrics))}{f' of {steps}' if steps else ''}", f"{seconds / 60:.1f} minutes")
    return el("div", *made, class_="tiles") if made else ""


def html_comparison(results):
    if len(results) != 2:
        return ""
    (a, first), (b, second) = results.items()
    try:
        comparison = evaluate.compare(first, second, force=True, names=(a, b))         # write_report has refused what was not forced
    except ValueError:
        return text("p", "Nothing to compare: the two results share no scored scenario.", class_="warn")
    head, *rows = evaluate.comparison_table(comparison)
    return (html_table([(head[0], a, b, f"{b} - {a} (95 %)", head[4]), *rows])
            + text("p", f"{'; '.join(comparison['notes'])}. Paired bootstrap over scenarios.", class_="fine"))


def html_curves(metrics):
    """Every number of metrics.jsonl over the steps: the main ones, then the others, folded."""
    curves, undrawn = defaultdict(list), []
    for number, row in enumerate(metrics, 1):
        for key, value in row.items():
            if is_number(value):
                curves[key].append((row["step"] if is_number(row.get("step")) else number, value))
            elif value is None or isinstance(value, float):         # train.py writes null for NaN and infinity
                undrawn.append(key)
    curves.pop("step", None)
    rest = sorted(curves.keys() - CURVES.keys())
    main = el("div", *(svg_curve(key, curves[key], *CURVES[key]) for key in CURVES if key in curves), class_="curves")
    more = el("div", *(svg_curve(key, curves[key]) for key in rest), class_="curves")
    if undrawn:
        main = text("p", f"Not drawn, because NaN, infinite or huge: {len(undrawn)} values ({', '.join(sorted({*undrawn}))}).", class_="warn") + main
    return (main + (fold(f"more numbers: {len(rest)}", more) if rest else "")) if curves or undrawn else ""


def round_scale(low, high):
    """The ticks of a scale that holds both: two to four steps of 1, 2, 2.5 or 5 times a power of ten."""
    if high - low < 1e-99:
        high = low + (abs(low) if abs(low) > 1e-99 else 1)
    low, high = float(low), float(high)
    power = 10.0 ** math.floor(math.log10((high - low) / 2))
    unit = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power * 2.001 >= high - low)
    return [place * unit for place in range(math.floor(low / unit + 0.001), math.ceil(high / unit - 0.001) + 1)]


def short_number(value, step):
    """As many digits as tell numbers one step apart."""
    digits = max(0, -Decimal(f"{step:.2g}").normalize().as_tuple().exponent)
    return f"{value:.{digits}f}" if abs(value) < 1e6 and digits < 5 else f"{value:.3g}".replace("e-0", "e-")


def svg_curve(name, points, title="", *ends, width=320):
    """A line over steps, filled down to 0 where its scale has one. Every point tells its step and value."""
    steps, values = zip(*points)
    ticks = round_scale(min(values + ends), max(values + ends))
    x_of = lambda step: round(44 + (width - 56) * (step - steps[0]) / (steps[-1] - steps[0] or 1), 1)
    y_of = lambda value: round(128 - 116 * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)
    line, grid = " ".join(f"{x_of(step)},{y_of(value)}" for step, value in points), []
    for value in ticks:
        grid += [el("line", class_="grid", x1=44, x2=width - 12, y1=y_of(value), y2=y_of(value)),
                 text("text", short_number(value, ticks[1] - ticks[0]), x=38, y=y_of(value) + 4, text_anchor="end")]
    fill = el("polygon", points=f"44,{y_of(0)} {line} {x_of(steps[-1])},{y_of(0)}") if ticks[0] <= 0 <= ticks[-1] else ""
    dots = (el("circle", text("title", f"step {step}: {value:.7g}"), cx=x_of(step), cy=y_of(value), r=3.5) for step, value in points)
    said = f"{title or name}: {values[0]:.4g} at step {steps[0]}, {values[-1]:.4g} at step {steps[-1]}"
    last = f"{values[-1]:.0f}" if 1000 <= abs(values[-1]) < 1e6 else f"{values[-1]:.3g}".replace("e-0", "e-")
    return el("figure", el("figcaption", text("b", title or name), text("b", last, class_="num"), text("span", title and name)), el(
        "svg", *grid, fill, el("polyline", points=line), *dots, text("text", steps[0], x=44, y=145),
        text("text", f"step {steps[-1]}", x=width - 12, y=145, text_anchor="end"),
        viewBox=f"0 0 {width} 150", class_="few" if len(points) <= 12 else "", role="img", aria_label=said))


def html_groups(results, key):
    """Score of each group with its interval, all results on one scale from 0 to 100."""
    names = dict.fromkeys(name for result in results.values() for name in result.get(key) or {})
    if not names:
        return ""
    rows, table = [], [("", "result", "n", "score (95 %)", "success %", "failure %")]
    for name in names:
        marks, scores = [], []
        for place, (source, result) in enumerate(results.items()):
            group = (result.get(key) or {}).get(name)
            if not group or group["score"] is None:
                continue
            said = [evaluate.with_interval(group[metric], group[f"{metric}_ci"]) for metric in evaluate.METRICS]
            table.append((name, source, group["n"], *said))
            low, high = group["score_ci"] or [group["score"]] * 2
            marks += [el("i", class_=f"span k{place}", style=f"left:{low:.1f}%;width:{high - low:.1f}%"),
                      el("i", class_=f"dot k{place}", style=f"left:{group['score']:.1f}%",
                         title="{}: score {}, success {} %, failure {} %".format(source, *said))]
            scores.append(evaluate.half_up(group["score"]))
        said = text("span", side_by_side(results, scores), class_="num")
        rows.append(el("div", text("span", name), el("div", *marks, class_="track"), said, class_="row"))
    ticks = (text("i", value, style=f"left:{value}%") for value in (0, 50, 100))
    axis = el("div", el("span"), el("div", *ticks, class_="track"), text("span", "score", class_="num"), class_="row axis")
    return legend(results) + el("div", *rows, axis, class_="rows") + fold("as a table", html_table(table))


def html_histogram(results):
    """How many dialogues ended where; failures left, successes right."""
    finals = {name: [row[2] for row in result["dialogues"] if row[2] is not None] for name, result in results.items()}
    if not any(finals.values()):
        return ""
    share = lambda values, low, high: 100 * sum(low <= value <= high for value in values) / max(1, len(values))
    top = max(share(values, *ends) for values in finals.values() for ends in BINS)
    bins = (el("div", *(el("i", class_=f"k{place}", style=f"height:{100 * share(values, low, high) / top:.1f}%",
                           title=f"{name}: {share(values, low, high):.1f} % end at {low} to {high}")
                        for place, (name, values) in enumerate(finals.items())), class_="bin") for low, high in BINS)
    return (legend(results) + el("div", *bins, class_="bins", role="img", aria_label="histogram of final emotions")
            + el("div", *(text("span", low) for low, _ in BINS), class_="bins axis")
            + text("p", f"Points at the end: failures are in the first column, successes in the last. The highest is {top:.0f} % of the dialogues.",
                   class_="fine"))


def html_strategies(results):
    """How often each strategy was used, and what it did to the user's emotion (evaluate.strategy_table)."""
    tables = {name: result["strategies"] for name, result in results.items() if result.get("strategies")}       # without acts: unknown, not 0
    uses = lambda name: max(table[name]["per_dialogue"] for table in tables.values() if name in table)
    names = sorted({name for table in tables.values() for name in table}, key=lambda name: -uses(name))
    if not names:
        return ""
    top, first, rows = uses(names[0]), next(iter(tables)), []
    for name in names:
        for source, table in tables.items():
            place = [*results].index(source)     # its colour
            row = table.get(name, {"per_dialogue": 0, "contribution": None})
            often, gain = row["per_dialogue"], row["contribution"]
            bar = el("i", class_=f"k{place}", style=f"width:{100 * often / top:.1f}%")
            swing = el("i", class_="up" if gain >= 0 else "down", style=f"width:{min(50, 5 * abs(gain)):.1f}%") if gain is not None else ""
            rows.append(el("tr", text("td", name if source == first else ""), text("td", source, class_="fine"),
                           el("td", el("div", bar, class_="bar")), text("td", f"{often:.2f}", class_="num"),
                           el("td", el("div", swing, class_="gain")), text("td", "-" if gain is None else f"{gain:+.2f}", class_="num"),
                           class_="first" if source == first else ""))
    head = el("tr", text("th", "strategy"), el("th"), text("th", "uses in a dialogue", colspan=2),
              text("th", "contribution: mean change, points", colspan=2))
    labellers = list(dict.fromkeys(str(results[name].get("strategies_by")) for name in tables))
    said = (text("p", f"Not comparable: labelled by different readers ({' / '.join(labellers)}).", class_="warn") if len(labellers) > 1 else
            text("p", f"As {labellers[0]} labels the replies.", class_="fine"))
    return legend(results) + said + el("div", el("table", el("thead", head), el("tbody", *rows), class_="strategies"), class_="wide")


def html_judged(results):
    judged = {name: result["judge"] for name, result in results.items() if result.get("judge")}
    if not judged:
        return ""
    judges = {json.dumps([results[name]["settings"].get(key) for key in evaluate.JUDGE_SIDE]) for name in judged}
    table = [("ability, 1 to 5", *judged)]
    for ability in next(iter(judged.values()))["abilities"]:
        table.append((ability, *(evaluate.with_se(judge["abilities"].get(ability)) for judge in judged.values())))
    for label, key in (("emotion tracking, r", "tracking_r"), ("its mean error, points", "tracking_error")):
        table.append((label, *(evaluate.half_up(judge[key], 2) for judge in judged.values())))
    said = (f"{name}: judged by {judge['model']}, {judge['failed']} of {judge['asked']} answers could not be used" for name, judge in judged.items())
    return ((text("p", "Not comparable: the judges differ.", class_="warn") if len(judges) > 1 else "")
            + legend({name: results[name] for name in judged}) + el("div", html_table(table), svg_plane(judged), class_="two")
            + text("p", "; ".join(said), class_="fine"))


def svg_plane(judged, size=340):
    """The social-cognition plane: solution/empathy upwards, structured/creative to the right, -5 to 5; the large dot is the mean."""
    half = size // 2
    at = lambda value: round(half + (half - 30) * value / 5, 1)
    dot = lambda name, empathy, creative, **how: el("circle", text("title", f"{name}: empathy {empathy:.2f}, creative {creative:.2f}"),
                                                    cx=at(creative), cy=at(-empathy), **how)
    dots = []
    for place, (name, judge) in enumerate(judged.items()):
        dots += [dot(*point, r=4, class_=f"k{place} faint") for point in judge["points"]]
        if judge["points"]:
            dots.append(dot(name, judge["empathy"], judge["creative"], r=9, class_=f"k{place} mean"))
    return el("figure", el(
        "svg", el("line", class_="grid", x1=30, x2=size - 30, y1=half, y2=half),
        el("line", class_="grid", x1=half, x2=half, y1=30, y2=size - 30), *dots,
        text("text", "empathy", x=half, y=18, text_anchor="middle"), text("text", "solution", x=half, y=size - 8, text_anchor="middle"),
        text("text", "structured", x=4, y=half - 6), text("text", "creative", x=size - 4, y=half - 6, text_anchor="end"),
        viewBox=f"0 0 {size} {size}", role="img", aria_label="social-cognition plane"), class_="plane")


def html_numbers(results, settings):
    known = lambda summary: [("setting", "value"), *((key, value) for key, value in summary["settings"].items() if value not in (None, ""))]
    parts = [fold(f"{name}: {evaluate.headline(summary)}", *map(html_table, evaluate.summary_tables(summary)), html_table(known(summary)))
             for name, summary in results.items()]
    return "".join(parts) + (fold("flags of the training run", html_table([("flag", "value"), *settings.items()])) if settings else "")
