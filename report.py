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
from collections import Counter, defaultdict
from html import escape
from pathlib import Path

import evaluate
from simulator import INTENTIONS

TEMPLATE = Path(__file__).resolve().parent / "assets" / "report.html"
STEPS_SHOWN = 8                 # a long run's dialogues would make a file that no phone opens: evenly spread steps, first and last
# drawn first, with a plain title and, where the scale is fixed, its ends; every other number of metrics.jsonl is folded
CURVES = {"emotion": ("mean final emotion, points", 0, 100), "success": ("success, % of dialogues", 0, 100),
          "failure": ("failure, % of dialogues", 0, 100), "eval_emotion": ("held-out score, points", 0, 100),
          "response_len": ("tokens of a reply, thought included", 0, None), "turns": ("replies in a dialogue", 0, None),
          "format_rate": ("well-formed replies, %", None, 100), "repeat_rate": ("repeated replies, %", 0, None),
          "approx_kl": ("KL of a step's update, nats", None, None), "ref_kl": ("KL to the first policy, nats", 0, None),
          "mismatch": ("engine against learner, nats a token", None, None), "entropy": ("entropy, nats a token", 0, None)}
BINS = [(low, low + 9) for low in range(0, 100, 10)] + [(100, 100)]
COLOURS = 2                     # a comparison has two sides; a third result would need a third colour


def write_report(paths, out=None, refresh=0):
    """One page from a run folder, or from one or two result or transcript files. Returns its path.

    out: where to write (default: report.html in the folder, or the first file's name with .html). refresh: seconds after which
    an open page loads itself again, 0 = never. ValueError when there is nothing to show.
    """
    paths = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    found = gather_run(paths[0]) if len(paths) == 1 and paths[0].is_dir() else gather_files(paths)
    out = Path(out) if out else paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")
    partial = out.with_name(out.name + ".partial")           # whole or not at all: a browser may be reading it
    try:
        partial.write_text(page(**found, refresh=refresh), encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); name another file with --out") from None
    return out


def watch(run_dir, out=None, seconds=10):
    """Write the report again whenever the run has logged a step, until Ctrl-C; the page reloads itself meanwhile."""
    log, seen, told = Path(run_dir) / "metrics.jsonl", None, False
    if not Path(run_dir).is_dir():
        raise ValueError(f"{run_dir}: no run folder to watch; train.py makes it when it starts")
    try:
        while True:
            stamp = log.stat().st_mtime_ns if log.exists() else None
            if stamp != seen:
                path, seen = write_report(run_dir, out, refresh=seconds), stamp
                told = told or print(f"{path}: open it in a browser; Ctrl-C ends the watch", flush=True) or True
            time.sleep(seconds)
    except KeyboardInterrupt:
        if seen:
            write_report(run_dir, out)


# ---- what there is to show -------------------------------------------------------------------------------------------------

def gather_run(run):
    """A run folder: config.json, metrics.jsonl, before/after.json(l), the dialogues of some steps."""
    metrics, config = run / "metrics.jsonl", run / "config.json"
    metrics = [row for _, row in evaluate.read_jsonl(metrics)] if metrics.exists() else []
    results, sources = {}, {}
    for name in ("before", "after"):
        result, talks = run / f"{name}.json", run / f"{name}.jsonl"
        if talks.exists():
            sources[name] = evaluate.read_transcripts(talks)
        if result.exists() or talks.exists():
            results[name] = evaluate.read_result(result if result.exists() else talks)
            if talks.exists():                   # numbers that the result file was too old to hold
                results[name] |= {key: value for key, value in evaluate.summarize(sources[name]).items() if not results[name].get(key)}
    steps = sorted(run.glob("transcripts/step-*.jsonl"))
    shown = sorted({round(place * (len(steps) - 1) / max(1, min(STEPS_SHOWN, len(steps)) - 1)) for place in range(min(STEPS_SHOWN, len(steps)))})
    for path in (steps[place] for place in shown):
        sources[f"step {int(path.stem.removeprefix('step-'))}"] = evaluate.read_transcripts(path)
    if not (results or sources or metrics):
        raise ValueError(f"{run}: no run to report (no metrics.jsonl, before.json, after.json or transcripts in it)")
    settings = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    kind = " ".join(str(settings[key]) for key in ("algo",) if key in settings).upper() + (
        "" if not settings else ", thinking" if settings.get("think") else ", without thinking")
    left_out = f" Dialogues of {len(shown)} of {len(steps)} steps are shown; the others lie in {run.name}/transcripts." if len(steps) > len(shown) else ""
    return dict(title=run.resolve().name, kicker=f"Training run{': ' + kind if kind else ''}", metrics=metrics, results=results, sources=sources,
                settings=settings, note=left_out)


def gather_files(paths):
    """One or two result files (--json) or transcript files, ours or SAGE's. A result's dialogues lie beside it, as NAME.jsonl."""
    results, sources = {}, {}
    for path in paths:
        result = evaluate.read_result(path)
        name = path.stem.partition("_based_simulator__")[2].removesuffix("_result") or path.stem
        name = name if name not in results else f"{path.parent.name}/{path.stem}"
        results[name] = result
        talks = path.with_suffix(".jsonl")
        if path.suffix == ".json" and not talks.exists():
            continue
        sources[name] = evaluate.read_transcripts(talks if path.suffix == ".json" else path)
    return dict(title=" and ".join(results), kicker="Evaluation" if len(results) == 1 else "Comparison", metrics=[], results=results,
                sources=sources, settings={}, note="")


# ---- the page --------------------------------------------------------------------------------------------------------------

def page(title, kicker, metrics, results, sources, settings, note, refresh=0):
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]        # the hash of exactly these bytes may run
    data = [{"source": name, "dialogues": [short(transcript) for transcript in transcripts]} for name, transcripts in sources.items()]
    parts = [(title_, body) for title_, body in (
        ("Results", tiles(results, metrics) + html_comparison(results)), ("Learning curves", html_curves(metrics)),
        ("By hidden intention", html_groups(results, "per_intention")), ("By character", html_groups(results, "per_character")),
        ("Kinds of pressure", html_groups(results, "per_kind")), ("Final emotions", html_histogram(results)),
        ("Strategies", html_strategies(results)), ("Abilities, as judged", html_judged(results)),
        ("All numbers and settings", html_numbers(results, settings))) if body]
    return string.Template(template.replace(script, "$script")).substitute(
        script=script, policy=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(), title=escape(title), kicker=escape(kicker),
        refresh=f'<meta http-equiv="refresh" content="{int(refresh)}">' if refresh else "",
        sections="".join(f"<section><h2>{name}</h2>{body}</section>" for name, body in parts), note=escape(note),
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


def html_table(rows):
    """The first row is the head."""
    cells = lambda row, tag: "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row) + "</tr>"
    return f'<div class="wide"><table><thead>{cells(rows[0], "th")}</thead><tbody>{"".join(cells(row, "td") for row in rows[1:])}</tbody></table></div>'


def warning(results):
    """Said at every plot that shows two results which no table may mix: their users were different people."""
    settings = [result["settings"] for result in results.values()]
    mixed = evaluate.differing(*settings, evaluate.SIMULATOR_SIDE) if len(settings) == 2 else {}
    mixed = [key for key, values in mixed.items() if None not in values]
    return f'<p class="warn">Not comparable: the simulated users differ ({escape(", ".join(mixed))}).</p>' if mixed else ""


def legend(results):
    return warning(results) + '<p class="legend">' + "".join(f'<span class="key k{place % COLOURS}"></span>{escape(name)} ' for place, name in enumerate(results)) + "</p>"


def tiles(results, metrics):
    """The few numbers that one looks for first."""
    def tile(label, value, under=""):
        return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span><small>{escape(under)}</small></div>'
    names, made = {"score": "score, points", "success": "success, %", "failure": "failure, %"}, []
    known = [result for result in results.values() if result["score"] is not None]
    for key, label in names.items() if known else ():
        last = known[-1]
        arrow = " → ".join(evaluate.half_up(result[key]) for result in known)
        made.append(tile(label, arrow, "95 %: {} to {}".format(*map(evaluate.half_up, last[key + "_ci"])) if last[key + "_ci"] else ""))
    for name, result in results.items():
        if result["incomplete"]:
            made.append(tile(f"{name}: dialogues without a score", str(result["failed"]), f"INCOMPLETE: {result['n']} were scored"))
    if known:
        made.append(tile("dialogues", " → ".join(str(result["n"]) for result in known), f"{evaluate.half_up(known[-1]['mean_turns'])} replies each"))
    elif metrics and isinstance(metrics[-1].get("emotion"), (int, float)):
        emotions = [row["emotion"] for row in metrics if isinstance(row.get("emotion"), (int, float))]
        made += [tile("mean final emotion, training", f"{emotions[0]:.1f} → {emotions[-1]:.1f}", f"best {max(emotions):.1f}"),
                 tile("steps", str(metrics[-1].get("step", len(metrics))), f"{sum(row.get('seconds') or 0 for row in metrics) / 60:.1f} minutes")]
    return f'<div class="tiles">{"".join(made)}</div>' if made else ""


def html_comparison(results):
    if len(results) != 2:
        return ""
    (a, first), (b, second) = results.items()
    try:
        comparison = evaluate.compare(first, second)
    except ValueError:
        return warning(results) or '<p class="warn">Nothing to compare: the two results share no scored scenario.</p>'
    head, *rows = evaluate.comparison_table(comparison)
    return (html_table([(head[0], a, b, f"{b} - {a} (95 %)", head[4]), *rows])
            + f'<p class="fine">{escape("; ".join(comparison["notes"]))}. Paired bootstrap over scenarios.</p>')


def html_curves(metrics):
    """Every number of metrics.jsonl over the steps: the main ones, then the others, folded."""
    curves = defaultdict(list)
    for number, row in enumerate(metrics, 1):
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                curves[key].append((row.get("step", number), value))
    main = "".join(svg_curve(key, curves[key], *CURVES[key]) for key in CURVES if key in curves)
    rest = "".join(svg_curve(key, curves[key]) for key in sorted(curves.keys() - CURVES.keys()))
    rest = f"<details><summary>{len(curves.keys() - CURVES.keys())} more numbers</summary><div class=curves>{rest}</div></details>" if rest else ""
    return f'<div class="curves">{main}</div>{rest}' if curves else ""


def svg_curve(name, points, title="", low=None, high=None, width=320, height=150):
    """A line over steps. low, high: ends of the scale; None = those of the data. Every point tells its step and value."""
    steps, values = zip(*points)
    y0, y1 = min(values) if low is None else min(low, *values), max(values) if high is None else max(high, *values)
    y0, y1 = (y0 - 0.5, y1 + 0.5) if y0 == y1 else (y0, y1)
    at = lambda step, value: (44 + (width - 56) * (step - steps[0]) / (steps[-1] - steps[0] or 1), 128 - 116 * (value - y0) / (y1 - y0))
    xy = [at(*point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy)
    grid = "".join(f'<line class="grid" x1="44" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}"/><text x="38" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
                   for y, text in ((at(steps[0], y0 + share * (y1 - y0))[1], f"{y0 + share * (y1 - y0):.3g}") for share in (0, 0.5, 1)))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if step == steps[-1] else 2.2}"><title>step {step}: {value:.4g}</title></circle>'
                   for (x, y), (step, value) in zip(xy, points))
    return (f'<figure><figcaption><b>{escape(name)}</b> <span>{escape(title)}</span></figcaption>'
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}: {values[0]:.4g} at step {steps[0]}, {values[-1]:.4g} at step {steps[-1]}">'
            f'{grid}<polygon points="{xy[0][0]:.1f},128 {line} {xy[-1][0]:.1f},128"/><polyline points="{line}"/>{dots}'
            f'<text x="44" y="145">{steps[0]}</text><text x="{width - 12}" y="145" text-anchor="end">step {steps[-1]}</text></svg></figure>')


def html_groups(results, key):
    """Score of each group with its interval, all results on one scale from 0 to 100."""
    names = [name for name in dict.fromkeys(name for result in results.values() for name in result.get(key) or {})]
    names = [name for name in INTENTIONS if name in names] + [name for name in names if name not in INTENTIONS]
    if not names:
        return ""
    rows = []
    for name in names:
        marks, said = "", []
        for place, (source, result) in enumerate(results.items()):
            group = (result.get(key) or {}).get(name)
            if not group or group["score"] is None:
                continue
            low, high = group["score_ci"] or (group["score"], group["score"])
            text = (f"{source}: score {evaluate.with_interval(group['score'], group['score_ci'])}, success {evaluate.half_up(group['success'])} %, "
                    f"failure {evaluate.half_up(group['failure'])} %, {group['n']} dialogues")
            marks += (f'<i class="span k{place % COLOURS}" style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
                      f'<i class="dot k{place % COLOURS}" style="left:{group["score"]:.1f}%" title="{escape(text)}"></i>')
            said.append(f"{evaluate.half_up(group['score'])}")
        rows.append(f'<div class="row"><span>{escape(name)}</span><div class="track">{marks}</div><span class="num">{escape(" → ".join(said))}</span></div>')
    axis = '<div class="row axis"><span></span><div class="track"><i style="left:0%">0</i><i style="left:50%">50</i><i style="left:100%">100</i></div><span class="num">score</span></div>'
    table = [("", "result", "n", "score (95 %)", "success %", "failure %")] + [
        (name, source, group["n"], evaluate.with_interval(group["score"], group["score_ci"]), *(evaluate.with_interval(group[k], group[k + "_ci"]) for k in ("success", "failure")))
        for name in names for source, result in results.items() if (group := (result.get(key) or {}).get(name))]
    return legend(results) + f'<div class="rows">{"".join(rows)}{axis}</div><details><summary>as a table</summary>{html_table(table)}</details>'


def html_histogram(results):
    """How many dialogues ended where; failures left, successes right."""
    finals = {name: [row[2] for row in result["dialogues"] if row[2] is not None] for name, result in results.items()}
    finals = {name: values for name, values in finals.items() if values}
    if not finals:
        return ""
    shares = {name: [100 * sum(low <= value <= high for value in values) / len(values) for low, high in BINS] for name, values in finals.items()}
    top = max(max(share) for share in shares.values())
    columns = "".join('<div class="bin">' + "".join(
        f'<i class="k{place % COLOURS}" style="height:{100 * share[number] / top:.1f}%" title="{escape(name)}: {share[number]:.1f} % end at {low}{f" to {high}" if high > low else ""}"></i>'
        for place, (name, share) in enumerate(shares.items())) + "</div>" for number, (low, high) in enumerate(BINS))
    return (legend({name: results[name] for name in finals}) + f'<div class="bins" role="img" aria-label="histogram of final emotions">{columns}</div>'
            + '<div class="bins axis">' + "".join(f"<span>{low}</span>" for low, _ in BINS) + f'</div><p class="fine">Points at the end; the highest column is {top:.0f} % of the dialogues.</p>')


def html_strategies(results):
    """How often each strategy was used, and what it did to the user's emotion (facts of RLVER sec. 4: frequency, contribution)."""
    with_any = {name: result["strategies"] for name, result in results.items() if result.get("strategies")}
    if not with_any:
        return ""
    names = sorted({name for table in with_any.values() for name in table}, key=lambda name: -max(t.get(name, {}).get("per_dialogue", 0) for t in with_any.values()))
    top = max(row["per_dialogue"] for table in with_any.values() for row in table.values()) or 1
    rows = []
    for name in names:
        for place, (source, table) in enumerate(with_any.items()):
            row = table.get(name) or {"per_dialogue": 0, "contribution": None, "turns": 0}
            gain = row["contribution"]
            bar = "" if gain is None else f'<i class="{"up" if gain >= 0 else "down"}" style="width:{min(50, 5 * abs(gain)):.1f}%"></i>'
            rows.append(f'<tr class="{"first" if not place else ""}"><td>{escape(name) if not place else ""}</td><td class="fine">{escape(source)}</td>'
                        f'<td><div class="bar"><i class="k{place % COLOURS}" style="width:{100 * row["per_dialogue"] / top:.1f}%"></i></div></td><td class="num">{row["per_dialogue"]:.2f}</td>'
                        f'<td><div class="gain">{bar}</div></td><td class="num">{"-" if gain is None else f"{gain:+.2f}"}</td></tr>')
    return (warning(results) + '<div class="wide"><table class="strategies"><thead><tr><th>strategy</th><th></th><th colspan="2">uses in a dialogue</th><th colspan="2">contribution: mean change, points</th></tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table></div>')


def html_judged(results):
    judged = {name: result["judge"] for name, result in results.items() if result.get("judge")}
    if not judged:
        return ""
    judges = len({json.dumps([results[name]["settings"].get(key) for key in evaluate.JUDGE_SIDE]) for name in judged})
    abilities = dict.fromkeys(ability for judge in judged.values() for ability in judge["abilities"])
    table = [("ability, 1 to 5", *judged)] + [(ability, *(evaluate.with_se(judge["abilities"].get(ability)) for judge in judged.values())) for ability in abilities]
    said = "; ".join(f"{name}: judged by {judge['model']}, {judge['failed']} of {judge['asked']} answers could not be used" for name, judge in judged.items())
    warn = '<p class="warn">Not comparable: the judges differ.</p>' if judges > 1 else ""
    return f'{warn}{legend({name: results[name] for name in judged})}<div class="two">{html_table(table)}{svg_plane(judged)}</div><p class="fine">{escape(said)}</p>'


def svg_plane(judged, size=340):
    """The social-cognition plane: solution/empathy upwards, structured/creative to the right, -5 to 5; the large dot is the mean."""
    at = lambda value: size / 2 + (size / 2 - 30) * value / 5
    dots = ""
    for place, (name, judge) in enumerate(judged.items()):
        for scenario, empathy, creative in judge["points"]:
            dots += f'<circle class="k{place % COLOURS} faint" cx="{at(creative):.1f}" cy="{at(-empathy):.1f}" r="4"><title>{escape(f"{scenario}: empathy {empathy}, creative {creative}")}</title></circle>'
        if judge["points"]:
            empathy, creative = judge["empathy"], judge["creative"]
            dots += f'<circle class="k{place % COLOURS} mean" cx="{at(creative):.1f}" cy="{at(-empathy):.1f}" r="9"><title>{escape(f"{name}: empathy {empathy:.2f}, creative {creative:.2f}")}</title></circle>'
    half = size / 2
    return (f'<figure class="plane"><svg viewBox="0 0 {size} {size}" role="img" aria-label="social-cognition plane"><line class="grid" x1="30" x2="{size - 30}" y1="{half}" y2="{half}"/>'
            f'<line class="grid" y1="30" y2="{size - 30}" x1="{half}" x2="{half}"/>{dots}<text x="{half}" y="18" text-anchor="middle">empathy</text>'
            f'<text x="{half}" y="{size - 8}" text-anchor="middle">solution</text><text x="4" y="{half - 6}">structured</text>'
            f'<text x="{size - 4}" y="{half - 6}" text-anchor="end">creative</text></svg></figure>')


def html_numbers(results, settings):
    parts = [f"<details><summary>{escape(name)}: {escape(evaluate.headline(summary))}</summary>" + "".join(map(html_table, evaluate.summary_tables(summary)))
             + html_table([("setting", "value"), *((key, value) for key, value in summary["settings"].items() if value not in (None, ""))]) + "</details>"
             for name, summary in results.items()]
    if settings:
        parts.append("<details><summary>flags of the training run</summary>" + html_table([("flag", "value"), *settings.items()]) + "</details>")
    return "".join(parts)
