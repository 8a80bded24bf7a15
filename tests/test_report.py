"""report.py: whatever was said stays text; the page works in a real (headless) browser; it needs no other file."""
import json
import os
import re
import shutil
import subprocess

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
                          capture_output=True, text=True, timeout=60)
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
    save(tmp_path / "a.jsonl", [dialogue([70], "exam/praise", max_turns=9), talks()[1]])
    with pytest.raises(ValueError, match="a.jsonl holds other dialogues than .*a.json; rename"):
        report.write_report(tmp_path / "a.json")


def test_a_page_is_never_written_over_what_it_reads_or_what_is_none(tmp_path, capsys):
    run_folder, path = a_run(tmp_path / "r", talks()), tmp_path / "a.json"
    path.write_text(json.dumps(evaluate.summarize(talks())))
    save(tmp_path / "a.jsonl", talks())
    for what, out in ((path, path), (path, tmp_path / "a.jsonl"), (run_folder, run_folder / "metrics.jsonl"), (path, tmp_path)):
        before = out.is_file() and out.read_bytes()
        code, _, err = run(capsys, "--report", what, "--out", out)
        assert code == 2 and err.count("\n") == 1 and (out.is_file() and out.read_bytes()) == before
    for _ in range(2):                                                          # a page may be written again
        assert run(capsys, "--report", path, "--out", tmp_path / "p.html")[0] == 0


def test_a_forced_page_of_mixed_users_names_them_all(tmp_path):
    mixed = [dialogue([45], name, played_with={"simulator": name, "difficulty": "vanilla"}) for name in ("scripted", "llm")]
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
                                         ("metrics.jsonl", '{"step": 1, "emo'), ("transcripts/step-000001.jsonl", "[]")])
def test_a_broken_file_of_a_run_is_named_in_one_line(tmp_path, capsys, name, words):
    (a_run(tmp_path / "r", talks()) / name).write_text(words)
    code, out, err = run(capsys, "--report", tmp_path / "r")
    assert code == 2 and not out and name in err and err.count("\n") == 1 and not list((tmp_path / "r").glob("*.partial"))


@pytest.mark.parametrize("argv", [["--report", "no/such/folder"], ["--report", "a", "b", "c"], ["--watch", "no/such/run"], ["--report", ".", "."],
                                  ["--report", ".", "--out", "no/such/folder/x.html"]])
def test_a_mistake_is_one_line(argv, capsys):
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out and err.startswith("evaluate.py: ") and err.count("\n") == 1


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
