"""report.py: whatever was said stays text; what is drawn stands where its number says; the page works in a real (headless) browser; it needs no other file."""
import json
import os
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
from test_evaluate import SAGE, changed, dialogue, run, save

import evaluate
import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(not BROWSER, reason="no Chromium here")
ATTACK = "<script>document.title='owned'</script><img src=x onerror=alert(1)> $title & </details></script>"


def a_run(folder, talks):
    """A run folder with two steps, before and after."""
    (folder / "transcripts").mkdir(parents=True)
    save(folder / "transcripts" / "step-000002.jsonl", talks)
    (folder / "config.json").write_text(json.dumps({"algo": "ppo", "think": True, "model": ATTACK}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "emotion": 20, "format_rate": NaN, "seconds": 3}\n'
                                          '{"step": 2, "emotion": 40.5, "success": 3, "ref_kl": 0, "odd<b>": 1}\n')
    for name in ("before", "after"):
        (folder / f"{name}.json").write_text(json.dumps(evaluate.summarize(talks, {"model": ATTACK}, {ATTACK: 90})))
        save(folder / f"{name}.jsonl", talks)
    return folder


def hostile():
    talk = dialogue([45, 55], scenario=ATTACK, opening=ATTACK, character=ATTACK)
    talk["turns"][0] |= {"reply": ATTACK, "thought": ATTACK, "inner": ATTACK, "user": ATTACK, "act": ATTACK, "flags": [ATTACK]}
    return talk


def talks():
    """Three dialogues that differ in wish, end and words."""
    happy = dialogue([50, 60, 70, 80, 90, 100], "exam/praise", "satisfied", opening="I passed the exam.", max_turns=9)
    sad = dialogue([30, 20, 10, 0], "coat/empathy", "gave_up", opening="I lost a coat.", intention="empathy", max_turns=9)
    lost = dialogue([45], "van/advice", "simulator_failed", opening="The van broke.", intention="advice", error="the endpoint fell silent", max_turns=9)
    happy["turns"][0] |= {"thought": "I hear pride. They need praise.", "reply": "You did so well, lighthouse."}
    return [happy, sad, lost]


def dom(path, view=""):
    """The page after its script ran, as headless Chromium sees it."""
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom", f"file://{path}{view}"],
                          capture_output=True, text=True, timeout=600)
    return done.stdout


# ---- without a browser ----

def test_whatever_was_said_cannot_become_part_of_the_page(tmp_path):
    page = report.write_report(a_run(tmp_path, [hostile()])).read_text(encoding="utf-8")
    assert page.count("<script") == 2 and "<img" not in page and page.count("</script>") == 2       # the data and the page's own
    assert page.count("&lt;script&gt;document.title=&#x27;owned&#x27;&lt;/script&gt;") >= 4 and "odd&lt;b&gt;" in page
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    assert data[0]["dialogues"][0]["turns"][0]["reply"] == ATTACK                                # the words themselves are not changed


def test_the_page_needs_no_other_file_and_runs_no_script_but_its_own(tmp_path):
    import base64
    import hashlib
    page = report.write_report(a_run(tmp_path, talks())).read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page) and not re.search(r"<\w[^<>]*\s(?:src|href)=|@import|url\(", page)
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in page
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.count("NaN") == 1 and page.count("<figure>") == 5 and "step 2: 40.5" in page          # odd<b> and seconds are curves too
    assert page.count("<details") == page.count("</details>") and "name=\"reload\"" not in page


def test_results_of_different_users_share_a_page_only_when_forced_and_then_with_a_warning_at_every_plot(tmp_path, capsys):
    for name, start in (("a", 40), ("b", 30)):
        (tmp_path / f"{name}.json").write_text(json.dumps(evaluate.summarize(talks()[:2], {"start_emotion": start})))
    argv = ["--report", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "c.html"]
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out and err.count("\n") == 1 and "start_emotion 40 / 30" in err and not (tmp_path / "c.html").exists()
    code, out, _ = run(capsys, *argv, "--force")
    page = (tmp_path / "c.html").read_text()
    assert code == 0 and out.strip() == str(tmp_path / "c.html")
    assert "left out: 0 only in a, 0 only in b" in page
    assert page.count("Not comparable: the simulated users differ (start_emotion)") >= 4 and "WARNING: THE SIMULATED USERS DIFFER" in page


def test_a_result_and_dialogues_that_do_not_belong_together_make_no_page(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(evaluate.summarize(talks()[:2])))
    save(tmp_path / "a.jsonl", talks())                                         # it holds these and another one: a larger call's file
    assert report.read_both(tmp_path / "a.json")[1] == evaluate.read_transcripts(tmp_path / "a.jsonl")[:2]
    save(tmp_path / "a.jsonl", [talk | {"judge": {"plane": [1, 1]}, "judged_by": {"judge": "m"}} for talk in talks()[:2]])
    assert "as judged" not in report.write_report(tmp_path / "a.json").read_text()           # a judge of a later call is none of this result's
    save(tmp_path / "a.jsonl", [dialogue([70], "exam/praise", max_turns=9), talks()[1]])
    with pytest.raises(ValueError, match="a.jsonl holds other dialogues than .*a.json; rename"):
        report.write_report(tmp_path / "a.json")


def test_a_page_is_never_written_over_what_it_reads_or_what_is_none(tmp_path, capsys):
    run_folder, path = a_run(tmp_path / "r", talks()), tmp_path / "a.json"
    path.write_text(json.dumps(evaluate.summarize(talks())))
    save(tmp_path / "a.jsonl", talks())
    (tmp_path / "d.html").write_bytes((tmp_path / "a.jsonl").read_bytes())         # dialogues under a page's name
    for what, out in ((tmp_path / "d.html", tmp_path / "d.html"), (path, path), (path, tmp_path / "a.jsonl"), (run_folder, run_folder / "metrics.jsonl"), (path, tmp_path)):
        before = out.is_file() and out.read_bytes()
        code, _, err = run(capsys, "--report", what, "--out", out)
        assert code == 2 and err.count("\n") == 1 and (out.is_file() and out.read_bytes()) == before
    for _ in range(2):                                                          # a page may be written again
        assert run(capsys, "--report", path, "--out", tmp_path / "p.html")[0] == 0


def test_a_forced_page_of_mixed_users_names_them_all(tmp_path):
    mixed = [dialogue([45], name, played_with={"simulator": name, "difficulty": "vanilla"}) for name in ("scripted", "llm")]
    save(tmp_path / "t.jsonl", mixed)
    assert report.write_report(tmp_path / "t.jsonl", force=True).read_text().count("t mixes dialogues of different settings (simulator).") >= 3
    assert "with scripted and llm, vanilla" in report.write_report(save(tmp_path / "t.jsonl", mixed), force=True).read_text()


def test_numbers_of_an_old_result_are_filled_in_and_zeros_are_kept(tmp_path):
    stored = evaluate.summarize(talks()) | {"failure": 0.0, "strategies": {}, "mean_turns": None}
    del stored["collapse_rate"]
    (tmp_path / "a.json").write_text(json.dumps(stored))
    save(tmp_path / "a.jsonl", talks())
    found, whole = report.read_both(tmp_path / "a.json")[0], evaluate.summarize(talks())
    assert (found["failure"], found["mean_turns"], found["collapse_rate"]) == (0.0, whole["mean_turns"], whole["collapse_rate"])


def test_an_incomplete_result_says_so_first(tmp_path):
    page = report.write_report(save(tmp_path / "t.jsonl", talks())).read_text()
    assert "INCOMPLETE: 2 were scored" in page and page.index("INCOMPLETE") < page.index("By hidden intention")


def test_a_long_run_shows_evenly_spread_steps_and_says_so(tmp_path):
    (tmp_path / "transcripts").mkdir()
    for step in range(1, 101):
        save(tmp_path / "transcripts" / f"step-{step:06d}.jsonl", [dialogue([45])])
    found = report.gather_run(tmp_path)
    assert list(found["sources"]) == [f"step {step}" for step in (1, 15, 29, 43, 58, 72, 86, 100)] and "8 of 100 steps" in found["note"]


def test_watching_rewrites_the_page_as_the_run_goes_on_and_only_then_reloads(tmp_path, monkeypatch):
    folder, naps = a_run(tmp_path / "r", talks()), []

    def nap(seconds):
        naps.append((seconds, (folder / "report.html").read_text()))
        if len(naps) == 2:
            raise KeyboardInterrupt
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "emotion": 77.25}\n')
    monkeypatch.setattr(report.time, "sleep", nap)
    report.watch(folder)
    assert [seconds for seconds, _ in naps] == [10, 10] and all('name="reload" content="10"' in page for _, page in naps)
    assert ["step 3: 77.25" in page for _, page in naps] == [False, True]
    assert 'name="reload"' not in (folder / "report.html").read_text()                    # the last one stands still


def test_watching_shows_an_evaluation_that_comes_after_the_last_step(tmp_path, monkeypatch):
    folder, naps = a_run(tmp_path / "r", talks()), []
    (folder / "after.json").unlink()

    def nap(_):
        naps.append((folder / "report.html").read_text())
        if len(naps) == 2:
            raise KeyboardInterrupt
        (folder / "after.json").write_text(json.dumps(evaluate.summarize(talks(), {"model": "the model of afterwards"})))
    monkeypatch.setattr(report.time, "sleep", nap)
    report.watch(folder)
    assert ["the model of afterwards" in page for page in naps] == [False, True]


def test_a_half_written_line_does_not_end_the_watch(tmp_path, monkeypatch):
    folder, pages = a_run(tmp_path / "r", talks()), []
    lines = iter(('{"step": 3, "emot', 'ion": 77.25}\n'))

    def nap(_):
        pages.append((folder / "report.html").read_text())
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(next(lines, ""))
        os.utime(folder / "metrics.jsonl", ns=(len(pages), len(pages)))
        if len(pages) == 3:
            raise KeyboardInterrupt
    monkeypatch.setattr(report.time, "sleep", nap)
    report.watch(folder)
    assert ["step 3: 77.25" in page for page in pages] == [False, False, True]


def test_numbers_that_are_none_are_left_out_and_counted(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "emotion": NaN, "seconds": Infinity, "entropy": 1e308, "big": 12345678901234567890123, "tiny": 5e-324}\n'
                                            '{"step": "x", "emotion": 41, "seconds": null, "entropy": -1e400, "turns": true, "tiny": 1e-323}\n')
    page = report.write_report(tmp_path).read_text()
    assert page.count("<figure>") == 3 and "step 2: 41" in page and "41.0 → 41.0" in page                # emotion, big, tiny
    assert "Not drawn, because NaN, infinite or huge: 5 values (emotion, entropy, seconds)." in page


def test_half_a_character_does_not_cost_the_report(tmp_path):
    talk = dialogue([45], opening="lone \ud800", character="\udfff") | {"error": "\ud83e"}
    page = report.write_report(save(tmp_path / "t.jsonl", [talk])).read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data[0]["dialogues"][0]["opening"] == "lone \ud800" and "\\udfff" in page.partition('id="data"')[0]


def test_strategies_by_different_readers_are_not_shown_side_by_side_without_a_word(tmp_path):
    table = lambda *names: report.write_report([tmp_path / f"{name}.jsonl" for name in names]).read_text().partition("<h2>Strategies</h2>")[2]
    for name, label in (("one", "praise"), ("two", "advice"), (f"{'m' * 30}1", "praise"), (f"{'m' * 30}2", "praise")):
        save(tmp_path / f"{name}.jsonl", [dialogue([45], judged_by={"judge": name}) | {"judge": {"strategies": [[label]]}}])
    save(tmp_path / "acts.jsonl", [changed(dialogue([45]), 0, act="praise")])
    assert "Not comparable: labelled by different readers (one / two)" in table("one", "two")
    assert "labelled by different readers (one / the scripted user)" in table("one", "acts")
    assert "different readers" in table(f"{'m' * 30}1", f"{'m' * 30}2")
    assert "As one labels" in table("one") and "Not comparable" not in table("one")


@pytest.mark.parametrize("value, step, text", [
    (99.5, 0.5, "99.5"), (100.5, 0.5, "100.5"), (12346, 1, "12346"), (2500, 250, "2500"), (0.25, 0.25, "0.25"), (0, 0.05, "0.00"), (93.9, 9.39, "93.9"),
    (2e6, 1e6, "2e+06"), (5e-5, 2.5e-5, "5e-5"), (0, 0, "0"), (0.3, 0.1 + 0.2, "0.3")])
def test_numbers_one_step_apart_look_different(value, step, text):
    assert report.short_number(value, step) == text


def test_a_page_of_a_run_says_how_many_steps_are_planned(tmp_path):
    folder = a_run(tmp_path / "r", talks())
    for name in ("before", "after"):
        (folder / f"{name}.json").unlink(), (folder / f"{name}.jsonl").unlink()
    assert ">2<" in report.write_report(folder).read_text()
    (folder / "config.json").write_text('{"steps": 36}')
    assert "2 of 36" in report.write_report(folder).read_text()


def test_a_result_without_strategies_is_not_shown_as_one_that_used_none(tmp_path):
    for name, act in (("a", "praise"), ("b", None)):
        played = [dialogue([45, 50])]
        played[0]["turns"][0]["act"] = act
        (tmp_path / f"{name}.json").write_text(json.dumps(evaluate.summarize(played)))
    page = report.write_report([tmp_path / "a.json", tmp_path / "b.json"]).read_text()
    table = page.partition("<h2>Strategies</h2>")[2].partition("</section>")[0]
    assert "praise" in table and "0.00" not in table


@pytest.mark.parametrize("name, words", [("config.json", "{"), ("config.json", "[1]"), ("after.json", "{}"), ("after.json", '{"dialogues": []}'),
                                         ("metrics.jsonl", '{"step": 1, "emo\n'), ("transcripts/step-000001.jsonl", "[]")])
def test_a_broken_file_of_a_run_is_named_in_one_line(tmp_path, capsys, name, words):
    (a_run(tmp_path / "r", talks()) / name).write_text(words)
    code, out, err = run(capsys, "--report", tmp_path / "r")
    assert code == 2 and not out and name in err and err.count("\n") == 1 and not list((tmp_path / "r").glob("*.partial"))


@pytest.mark.parametrize("argv", [["--report", "no/such/folder"], ["--report", "a", "b", "c"], ["--watch", "no/such/run"], ["--report", ".", "."],
                                  ["--report", ".", "--out", "no/such/folder/x.html"]])
def test_a_mistake_is_one_line(argv, capsys):
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out and err.startswith("evaluate.py: ") and err.count("\n") == 1


# ---- what is drawn, read back from the page: places worked out by hand ----

def section(path, title):
    """The elements of one section of the page."""
    return ElementTree.fromstring(re.search(f"<section><h2>{title}</h2>.*?</section>", path.read_text(encoding="utf-8"), re.S)[0])


def having(tree, tag, class_):
    return [element for element in tree.iter(tag) if class_ in element.get("class", "").split()]


def words(element):
    return "".join(element.itertext())


def two_results(folder, **more):
    """before.json and after.json; more[key]: their values of that key."""
    folder.mkdir(exist_ok=True)
    for place, (name, finals) in enumerate((("before", [40, 60]), ("after", [80, 90, 100]))):
        result = evaluate.summarize([dialogue([value], f"s{number}") for number, value in enumerate(finals)])
        (folder / f"{name}.json").write_text(json.dumps(result | {key: values[place] for key, values in more.items()}))
    return report.write_report(folder)


def test_curves_stand_where_their_numbers_say(tmp_path):
    rows = [{"step": 10, "emotion": 25, "entropy": 1, "below": -1, "far": 6.5, "seconds": 60}, {"step": 20, "emotion": 75, "below": 1, "far": 5, "seconds": 60},
            {"step": 40, "emotion": 50, "entropy": 2, "below": 0, "far": 6, "seconds": 30}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = report.write_report(tmp_path)
    plots = {figure.find("figcaption/b").text: figure.find("svg") for figure in section(path, "Learning curves").iter("figure")}
    x = {10: "44.0", 20: "132.0", 40: "308.0"}                      # a frame of 264 by 116: right of 44, up from 128 to 12
    for name, ticks, curve, floor in (
            ("mean final emotion, points", {"0": 128.0, "50": 70.0, "100": 12.0}, {10: "99.0", 20: "41.0", 40: "70.0"}, "128.0"),
            ("entropy, nats a token", {"0": 128.0, "1": 70.0, "2": 12.0}, {10: "70.0", 40: "12.0"}, "128.0"),
            ("below", {"-1": 128.0, "0": 70.0, "1": 12.0}, {10: "128.0", 20: "12.0", 40: "70.0"}, "70.0"),
            ("far", {"5": 128.0, "6": 70.0, "7": 12.0}, {10: "41.0", 20: "128.0", 40: "70.0"}, None)):        # no 0 on its scale: nothing to fill down to
        svg, line = plots[name], " ".join(f"{x[step]},{y}" for step, y in curve.items())
        assert svg.find("polyline").get("points") == line, name
        assert [(dot.get("cx"), dot.get("cy")) for dot in svg.findall("circle")] == [(x[step], y) for step, y in curve.items()]
        assert [words(dot).partition(":")[0] for dot in svg.findall("circle")] == [f"step {step}" for step in curve]
        assert [float(grid.get("y1")) for grid in having(svg, "line", "grid")] == [*ticks.values()]
        *labels, first, last = svg.findall("text")
        assert {label.text: float(label.get("y")) - 4 for label in labels} == ticks and (first.text, last.text) == ("10", "step 40")
        assert [fill.get("points") for fill in svg.findall("polygon")] == ([f"44,{floor} {line} 308.0,{floor}"] if floor else []), name
    assert [words(tile) for tile in having(section(path, "Results"), "div", "tile")] == [
        "25.0 → 50.0mean final emotion, trainingbest 75.0", "40steps2.5 minutes"]


def test_a_groups_bar_is_its_interval_and_its_dot_the_score(tmp_path):
    path = two_results(tmp_path / "r")
    drawn = section(path, "By hidden intention")
    # 40 and 60: SE 10, 50 -+ 12.7 x 10, cut at both ends; 80, 90 and 100: SE 5.77, 90 -+ 4.303 x 5.77, cut at 100
    assert [bar.get("style") for bar in having(drawn, "i", "span")] == ["left:0.0%;width:100.0%", "left:65.2%;width:34.8%"]
    assert [bar.get("style") for bar in having(drawn, "i", "dot")] == ["left:50.0%", "left:90.0%"]
    assert [bar.get("class") for bar in having(drawn, "div", "track")[0]] == ["span k0", "dot k0", "span k1", "dot k1"]
    assert [key.get("class") for key in having(drawn, "span", "key")] == ["key k0", "key k1"] and words(having(drawn, "div", "row")[0]) == "praise50.0 → 90.0"
    assert words(having(section(path, "Results"), "div", "tile")[0]) == "50.0 → 90.0score, points95 % of after: 65.2 to 100.0"


def test_the_histogram_counts_tens_and_the_hundred_alone(tmp_path):
    files = [save(tmp_path / f"{name}.jsonl", [dialogue([value], f"s{number}") for number, value in enumerate(finals)])
             for name, finals in (("a", [0, 9, 10, 89, 90, 99, 100, 100]), ("b", [5, 10, 10, 19]))]
    bins, axis = having(section(report.write_report(files), "Final emotions"), "div", "bins")
    share = {0: (25, 25), 10: (12.5, 75), 80: (12.5, 0), 90: (25, 0), 100: (25, 0)}              # percent of a and of b; the highest, 75, is drawn as 100
    assert [label.text for label in axis] == [str(low) for low in range(0, 101, 10)] and len(bins) == 11
    for low, column in zip(range(0, 101, 10), bins):
        for name, class_, percent, bar in zip("ab", ("k0", "k1"), share.get(low, (0, 0)), column, strict=True):
            assert (bar.get("class"), bar.get("style")) == (class_, f"height:{percent / 75 * 100:.1f}%")
            assert bar.get("title") == f"{name}: {percent:.1f} % end at {low} to {min(100, low + 9)}"


def test_a_strategys_bars_show_its_uses_and_its_gain_or_loss(tmp_path):
    row = lambda often, gain: {"turns": 1, "per_dialogue": often, "contribution": gain}
    path = two_results(tmp_path / "r", strategies=[{"praise": row(0.5, 4), "advice": row(1, -3)}, {"praise": row(2, 11), "advice": row(1.5, 0)}])
    rows = [[words(line[1]), line.find(".//div[@class='bar']/i"), *line.find(".//div[@class='gain']")] for line in section(path, "Strategies").find(".//tbody")]
    assert [(source, often.get("class"), often.get("style"), gain.get("class"), gain.get("style")) for source, often, gain in rows] == [
        ("before", "k0", "width:25.0%", "up", "width:20.0%"), ("after", "k1", "width:100.0%", "up", "width:50.0%"),       # the most used one, 2, fills its place;
        ("before", "k0", "width:50.0%", "down", "width:15.0%"), ("after", "k1", "width:75.0%", "up", "width:0.0%")]       # 10 points fill half of theirs
    page = path.read_text()
    assert ".up { left: 50%; background: var(--high)" in page and ".down { right: 50%; background: var(--low)" in page


def test_a_result_keeps_its_colour_where_the_other_has_no_strategies(tmp_path):
    path = two_results(tmp_path / "r", strategies=[{}, {"praise": {"turns": 1, "per_dialogue": 1, "contribution": 1}}])
    assert section(path, "Strategies").find(".//div[@class='bar']/i").get("class") == "k1"


def test_the_plane_has_empathy_above_and_creative_to_the_right(tmp_path):
    found = lambda *points, **mean: {"model": "m", "asked": 4, "failed": 0, "abilities": {}, "points": points, "tracking_r": None, "tracking_error": None} | mean
    path = two_results(tmp_path / "r", judge=[found(["x", 5, -5], ["y", -5, 0], empathy=0, creative=-2.5), found(["z", 3, 4], empathy=3, creative=4)])
    plane = section(path, "Abilities, as judged").find(".//figure[@class='plane']/svg")
    assert plane.get("viewBox") == "0 0 340 340"                             # its middle is at 170, a point of the scale is 28 wide
    assert [(dot.get("cx"), dot.get("cy"), dot.get("class")) for dot in plane.findall("circle")] == [
        ("30.0", "30.0", "k0 faint"), ("170.0", "310.0", "k0 faint"), ("100.0", "170.0", "k0 mean"), ("282.0", "86.0", "k1 faint"), ("282.0", "86.0", "k1 mean")]
    at = {label.text: (int(label.get("x")), int(label.get("y"))) for label in plane.findall("text")}
    assert at["empathy"][1] < 30 < 310 < at["solution"][1] and at["structured"][0] < 30 < 310 < at["creative"][0]


def test_a_files_name_cannot_leave_the_attribute_that_holds_it(tmp_path):
    name = 'a" onclick="x & <b>'
    drawn = section(report.write_report(save(tmp_path / f"{name}.jsonl", talks())), "Final emotions")
    bars = having(drawn, "i", "k0")
    assert len(bars) == 11 and all(bar.get("title").startswith(f"{name}: ") and set(bar.attrib) == {"class", "style", "title"} for bar in bars)


def test_what_an_old_result_lacks_is_counted_from_its_dialogues_and_nothing_else(tmp_path):
    save(tmp_path / "r.jsonl", talks())
    whole = evaluate.summarize(talks(), {"model": "m"}) | {"mean_turns": 7}
    (tmp_path / "r.json").write_text(json.dumps({key: value for key, value in whole.items() if key not in ("repeat_rate", "collapse_rate", "per_kind", "per_character")}))
    assert report.read_both(tmp_path / "r.json")[0] == whole and whole["repeat_rate"] == 0 and whole["per_character"]


# ---- in a browser ----

@browser
def test_it_opens_without_a_script_error_and_lists_every_dialogue(tmp_path):
    page = dom(report.write_report(save(tmp_path / "t.jsonl", talks())))
    assert "data-error" not in page and "3 of 3" in page and page.count('class="dialogue"') == 3


@browser
@pytest.mark.parametrize("view, found", [("#q=lighthouse", ["exam/praise"]), ("#q=COAT", ["coat/empathy"]), ("#intention=empathy", ["coat/empathy"]),
                                         ("#end=simulator_failed", ["van/advice"]), ("#q=exam&end=gave_up", []),
                                         ("#sort=low", ["coat/empathy", "van/advice", "exam/praise"])])
def test_it_filters_and_searches(tmp_path, view, found):
    page = dom(report.write_report(save(tmp_path / "t.jsonl", talks())), view)
    assert re.findall(r'class="name">([^<]*)<', page) == found and f"{len(found)} of 3" in page and "data-error" not in page


@browser
def test_an_opened_dialogue_shows_words_emotions_folded_thoughts_and_its_end(tmp_path):
    page = dom(report.write_report(save(tmp_path / "t.jsonl", talks())), "#q=lighthouse&open=0")
    assert '<div class="bubble agent">You did so well, lighthouse.</div>' in page and '<div class="bubble user">I passed the exam.</div>' in page
    assert '<details class="inner right"><summary>what the agent thinks</summary><p>I hear pride. They need praise.</p></details>' in page
    assert page.count("<circle") == 7 and '<b class="mid">50</b> (+10)' in page and "The end: satisfied, 100 points" in page
    failed = dom(tmp_path / "t.html", "#end=simulator_failed&open=0")
    assert "The end: simulator failed, no score" in failed and "the endpoint fell silent" in failed


@browser
def test_a_shared_address_shows_its_dialogue_however_far_down_the_list(tmp_path):
    path = report.write_report(save(tmp_path / "t.jsonl", [dialogue([45, 55], f"s{number}") for number in range(100)]))
    page = dom(path, "#open=70&source=nowhere")                                                       # a choice that this page lacks is none
    assert page.count('class="dialogue"') == 80 and page.count('class="talk"') == 1 and "100 of 100" in page


@browser
def test_each_turn_in_the_emotion_curve_is_a_button_for_the_keyboard_too(tmp_path):
    page = dom(report.write_report(save(tmp_path / "t.jsonl", talks())), "#q=lighthouse&open=0")
    assert re.findall(r'role="button" tabindex="0"><title>(turn \d)', page) == [f"turn {number}" for number in range(1, 7)]


@browser
def test_a_reply_with_a_script_stays_text_in_the_browser(tmp_path):
    page = dom(report.write_report(save(tmp_path / "t.jsonl", [hostile()])), "#open=0")
    assert "<title>RLVER: t</title>" in page and "<img" not in page.replace("&lt;img", "")
    assert '<div class="bubble agent">&lt;script&gt;document.title' in page


@browser
def test_a_run_folder_opens_with_its_curves(tmp_path):
    page = dom(report.write_report(a_run(tmp_path / "r", talks())), "#source=before")
    assert "3 of 9" in page and page.count("<figure>") == 5 and "data-error" not in page


@browser
@pytest.mark.skipif(not SAGE.is_dir(), reason="the published SAGE files are not here")
def test_a_published_sage_file_opens(tmp_path):
    page = dom(report.write_report(next(SAGE.glob("*__gpt-4.1_result.jsonl")), tmp_path / "sage.html"), "#intention=motives&open=0")
    assert "<h1>gpt-4.1</h1>" in page and "11 of 100" in page and "data-error" not in page and '<div class="bubble agent">' in page
