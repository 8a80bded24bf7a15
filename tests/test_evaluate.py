"""evaluate.py: golden numbers worked out by hand or by another formula; the published SAGE files; bad input in one line."""
import json
import os
import statistics
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import evaluate  # noqa: E402

SAGE = ROOT.parent / "shared" / "data" / "sage"
PUBLISHED = {"gpt-4.1": ("68.2 / 35 / 13", 848), "qwen2.5-72b": ("19.1 / 4 / 70", 641), "openai-o1": ("29.0 / 5 / 51", 756)}
APPRAISAL = "Content: It consoles.\nReason: It helps.\nActivity: Good.\nAnalysis: I feel seen.\nChange: {:+d}"
REPLY = "Thinking: I go on.\nOrigin: Well.\nChange: none\nResponse: Well."


def dialogue(emotions, scenario="exam/praise", end_reason="max_turns", start=40, **fields):
    """A transcript whose emotions are these after each turn; it ends as told."""
    turns = []
    for number, (old, new) in enumerate(zip([start, *emotions], emotions)):
        turns.append({"thought": None, "reply": f"reply {number}", "format_ok": True, "finish": "stop", "tokens": 7,
                      "thought_tokens": 2, "change": new - old, "emotion": new, "act": None, "inner": "hm",
                      "raw": [APPRAISAL.format(new - old), REPLY], "flags": [], "user": "Well."})
    return {"scenario": scenario, "event": "exam", "intention": "praise", "character": "passive", "repetition": 0, "seed": 0,
            "start_emotion": start, "max_turns": len(emotions), "opening": "Hello.", "final_emotion": [start, *emotions][-1],
            "end_reason": end_reason, "reward": 0.5, "turns": turns, **fields}


def finals(values, scenarios=None):
    """Transcripts of one turn that end at these emotions."""
    scenarios = scenarios or [f"s{number}" for number in range(len(values))]
    return [dialogue([value], scenario) for value, scenario in zip(values, scenarios)]


def save(path, transcripts):
    path.write_text("".join(json.dumps(transcript) + "\n" for transcript in transcripts), encoding="utf-8")
    return str(path)


def run(capsys, *argv):
    """Exit code, stdout, stderr of the command line."""
    try:
        code = evaluate.main([str(arg) for arg in argv])
    except SystemExit as stop:  # argparse
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def changed(rows, at, **fields):
    """A copy of a transcript with other fields in turn `at`."""
    rows = json.loads(json.dumps(rows))
    rows["turns"][at].update(fields)
    return rows


# ---- published files ----

@pytest.mark.skipif(not SAGE.is_dir(), reason="the published SAGE files are not here")
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_files_give_the_leaderboard_and_every_transition_verifies(model, capsys, tmp_path):
    path = next(SAGE.glob(f"*__{model}_result.jsonl"))
    code, out, _ = run(capsys, "--transcripts", path, "--verify", "--json", tmp_path / "new" / "result.json")
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    line, transitions = PUBLISHED[model]
    assert code == 0 and line in out and f"{transitions} of {transitions} verify" in out
    assert result["transitions"] == result["transitions_ok"] == transitions and result["n"] == 100
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert result["score"] == statistics.mean(row["emo_point"] for row in rows)
    assert sum(row["n"] for row in result["per_intention"].values()) == 100 and len(result["per_intention"]) == 8


@pytest.mark.skipif(not SAGE.is_dir(), reason="the published SAGE files are not here")
def test_a_published_file_with_one_other_change_does_not_verify(capsys, tmp_path):
    lines = next(SAGE.glob("*__gpt-4.1_result.jsonl")).read_text(encoding="utf-8").splitlines()
    row = json.loads(lines[2])
    row["history"][2]["planning"]["change"] = -row["history"][2]["planning"]["change"]
    (tmp_path / "t.jsonl").write_text("\n".join([*lines[:2], json.dumps(row)]), encoding="utf-8")
    code, out, _ = run(capsys, "--transcripts", tmp_path / "t.jsonl", "--verify")
    assert code == 1 and f"{tmp_path / 't.jsonl'}:3: turn 1: expected 40 ->" in out and ", 1 faults" in out


# ---- numbers ----

@pytest.mark.parametrize("total, n, text", [(6125, 100, "61.3"), (3755, 100, "37.6"), (2895, 100, "29.0"), (6815, 100, "68.2"),
                                            (6125, 101, "60.6"), (0, 5, "0.0"), (100, 1, "100.0")])
def test_means_are_rounded_half_up(total, n, text):
    assert evaluate.half_up(total / n) == text


def test_half_zeros_and_half_hundreds_have_a_standard_error_of_5_points():
    result = evaluate.summarize(finals([0] * 50 + [100] * 50))
    assert (result["score"], result["success"], result["failure"], result["n"]) == (50, 50, 50, 100)
    assert result["score_se"] == pytest.approx(statistics.stdev([0] * 50 + [100] * 50) / 10) == pytest.approx(5.03, abs=0.01)
    assert result["score_ci"] == pytest.approx([40.03, 59.97], abs=0.01)        # t of 99 degrees: 1.984
    assert result["success_ci"] == result["failure_ci"] == pytest.approx([40.38, 59.62], abs=0.01)  # Wilson, 50 of 100


def test_success_starts_at_100_and_failure_ends_below_10():
    result = evaluate.summarize(finals([100, 99, 10, 9]))
    assert (result["success"], result["failure"]) == (25, 25)


def test_wilson_intervals_stay_inside_0_and_100():
    assert evaluate.wilson(0, 10) == pytest.approx([0, 27.75], abs=0.01)  # z^2 / (n + z^2)
    assert evaluate.wilson(100, 10) == pytest.approx([72.25, 100], abs=0.01)
    assert evaluate.wilson(35, 100) == pytest.approx([26.36, 44.75], abs=0.01)


def test_repetitions_of_a_scenario_count_as_one_cluster():
    alike = evaluate.summarize(finals([0, 0, 100, 100], ["a", "a", "b", "b"]))
    assert alike["score_se"] == pytest.approx(statistics.stdev([0, 100]) / 2**0.5)  # 50, not 28.9
    assert alike["success_ci"] == pytest.approx([9.45, 90.55], abs=0.01)  # Wilson, 1 of 2
    uneven = [0, 50, 100, 100, 30, 70]  # two repetitions of three scenarios: the SE of the three means
    assert evaluate.summarize(finals(uneven, list("aabbcc")))["score_se"] == pytest.approx(statistics.stdev([25, 100, 50]) / 3**0.5)
    assert evaluate.summarize(finals([40, 60], ["a", "a"]))["score_ci"] is None  # one scenario: nothing is known of others


def test_failed_dialogues_are_left_out_and_counted(capsys):
    failed = [dialogue([35], f"f{number}", "simulator_failed") for number in range(9)] + [dialogue([], end_reason="context_full")]
    result = evaluate.summarize(finals([100] * 45 + [40] * 45) + failed)
    assert (result["n"], result["failed"], result["incomplete"], result["score"]) == (90, 10, True, 70)
    assert [row[2] for row in result["dialogues"][90:]] == [None] * 10 and result["end_reasons"]["simulator_failed"] == 9
    evaluate.print_summary(result)
    assert "70.0 / 50 / 0  INCOMPLETE: 10 more dialogues" in capsys.readouterr().out


def test_without_a_scored_dialogue_there_is_no_score_and_no_zero(capsys, tmp_path):
    path = save(tmp_path / "t.jsonl", [dialogue([35], end_reason="simulator_failed")])
    code, out, _ = run(capsys, "--transcripts", path, "--json", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert code == 1 and "no score" in out
    assert result["score"] is result["success"] is result["failure"] is result["score_ci"] is None and result["failed"] == 1


def test_flags_repeats_lengths_and_ends_are_counted():
    talk = dialogue([45, 50, 55])
    talk["turns"][2] |= {"reply": " reply 0", "flags": ["repeat", "garbled"], "format_ok": False}
    result = evaluate.summarize([talk, dialogue([35])])
    assert result["flags"] == {"repeat": 1, "garbled": 1} and result["repeat_rate"] == 25 and result["format_rate"] == 75      # percent
    assert (result["mean_turns"], result["reply_tokens"], result["thought_tokens"]) == (2, 5, 2)
    assert result["end_reasons"] == {"max_turns": 2}


@pytest.mark.parametrize("freedom, t", [(1, 12.7062), (2, 4.3027), (7, 2.3646), (10, 2.2281), (11, 2.2010), (15, 2.1314), (30, 2.0423), (63, 1.9983), (999, 1.9623)])
def test_the_quantile_of_student_is_that_of_the_tables(freedom, t):
    assert evaluate.student(freedom) == pytest.approx(t, rel=1e-3)


def test_an_interval_of_the_score_stays_inside_0_and_100():
    low, high = evaluate.summarize(finals([0] * 9 + [20])), evaluate.summarize(finals([100] * 9 + [80]))      # SE 2: 2 -+ 2.262 x 2 and 98 -+ the same
    assert low["score_ci"] == [0, pytest.approx(6.524)] and high["score_ci"] == [pytest.approx(93.476), 100]


def test_turns_whose_format_nobody_checked_are_left_out_of_the_format_rate():
    assert evaluate.summarize([changed(dialogue([45, 50]), 0, format_ok=None)])["format_rate"] == 100
    assert evaluate.summarize([changed(dialogue([45]), 0, format_ok=None)])["format_rate"] is None           # as in SAGE's files


# ---- verify ----

def test_a_true_transcript_verifies_whatever_attempts_failed():
    talk = dialogue([50, 45, 45])
    talk["turns"][0]["raw"] = ["I cannot judge this: 7", APPRAISAL.format(10), REPLY]
    talk["turns"][2] |= {"raw": ["no", "no", "no"], "flags": ["unparsed"]}
    talks = [talk, dialogue([50, 60, 70, 80, 90, 100], end_reason="satisfied"), dialogue([30, 20, 10, 0], end_reason="gave_up"),
             dialogue([45], end_reason="context_full", max_turns=9), dialogue([45], end_reason="simulator_failed", max_turns=9)]
    assert evaluate.verify(talks) == {"transitions": 15, "transitions_ok": 15, "faults": []}


@pytest.mark.parametrize("talk, place, wrong", [
    (changed(dialogue([50, 60]), 1, emotion=61), "turn 2: expected 50 -> 60 (change 10), got 61", 1),
    (changed(dialogue([50, 60]), 1, raw=[APPRAISAL.format(-5), REPLY]), "turn 2: expected 50 -> 45 (change -5), got 60", 1),
    (changed(dialogue([50, 60]), 0, change=5), "turn 1: expected 40 -> 50 (change 10), got 50 (change 5)", 1),
    (changed(dialogue([50, 60]), 0, raw=["nothing"]), "turn 1: expected 40 -> None", 1),
    (dialogue([50, 60], final_emotion=70), "final_emotion: expected 60, got 70", 0),
    (dialogue([50, 60], end_reason="satisfied"), "end_reason: expected max_turns, got satisfied", 0),
    (dialogue([50, 60], max_turns=9), "end_reason: expected None, got max_turns", 0),
    (dialogue([50, 60], max_turns=1), "turn 2: goes on after max_turns", 0),
])
def test_what_does_not_follow_from_the_recorded_changes_is_named(talk, place, wrong, capsys, tmp_path):
    code, out, _ = run(capsys, "--transcripts", save(tmp_path / "t.jsonl", [talk]), "--verify", "--json", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert code == 1 and f"t.jsonl:1: {place}" in out
    assert result["transitions"] - result["transitions_ok"] == wrong


# ---- compare ----

def result(values, **settings):
    known = {"simulator": "scripted", "difficulty": "vanilla", "start_emotion": 40, "clamp": 10, "max_turns": 9,
             "scenarios_sha256": "s", "prompts_sha256": "p", "temperature": 1.0}
    return evaluate.summarize(finals(values), known | settings)


@pytest.mark.parametrize("n, p", [(6, 2 / 64), (8, 2 / 256), (20, 2 / 10_001)])
def test_the_same_gain_everywhere_has_no_width_and_no_smaller_p_than_its_signs_can_tell(n, p):
    before = [10, 40, 70, 30, 0] * 4
    gain = evaluate.compare(result(before[:n]), result([value + 10 for value in before[:n]]))["score"]
    assert (gain["difference"], gain["ci"]) == (10, None) and gain["p"] == pytest.approx(p)
    same = evaluate.compare(result(before[:n]), result(before[:n]))["score"]
    assert (same["difference"], same["ci"], same["p"]) == (0, None, 1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_fewer_than_six_scenarios_have_a_difference_and_no_interval(n):
    both = evaluate.compare(result([10, 40, 90, 20, 30][:n]), result([30, 50, 95, 80, 30][:n]))
    assert both["score"]["ci"] is both["score"]["p"] is None and both["score"]["difference"] > 0
    assert any("too few scenarios" in note for note in both["notes"])


def test_a_paired_interval_follows_the_spread_of_the_differences():
    before, after = [0, 10, 50, 60, 90, 20, 80, 30, 40, 70], [10, 5, 70, 60, 95, 30, 75, 50, 55, 80]
    differences = [b - a for a, b in zip(before, after)]
    both = evaluate.compare(result(before), result(after))["score"]
    half = 1.96 * statistics.pstdev(differences) / 10**0.5  # what a bootstrap of the mean estimates
    assert both["difference"] == statistics.mean(differences) == 8
    assert both["ci"] == pytest.approx([8 - half, 8 + half], abs=0.6)
    worse = evaluate.compare(result(after), result(before))["score"]
    assert worse["p"] == pytest.approx(both["p"], abs=0.01) and 0.001 < both["p"] < 0.05      # a normal test of 8 / half says 0.01



def test_only_shared_scenarios_are_compared_and_failures_are_not():
    a, b = result([40, 50, 60]), result([50, 60])
    b["dialogues"][1][2:] = [None, "simulator_failed"]
    both = evaluate.compare(a, b)
    assert both["n"] == 1 and both["left_out"] == [2, 0] and both["score"]["difference"] == 10
    assert both["score"]["ci"] is both["score"]["p"] is None  # one scenario: no interval


def test_results_of_different_users_are_not_compared_unless_forced(capsys, tmp_path):
    for name, start in (("a", 40), ("b", 30)):
        (tmp_path / name).write_text(json.dumps(result([40, 60], start_emotion=start)))
    code, out, err = run(capsys, "--compare", tmp_path / "a", tmp_path / "b")
    assert code == 2 and not out and "start_emotion 40 / 30" in err and err.count("\n") == 1
    code, out, _ = run(capsys, "--compare", tmp_path / "a", tmp_path / "b", "--force", "--json", tmp_path / "c")
    assert code == 0 and out.startswith("WARNING: THE SIMULATED USERS DIFFER")
    assert json.loads((tmp_path / "c").read_text())["score"]["difference"] == 0


def test_other_sampling_is_said_and_nothing_shared_is_an_error(capsys, tmp_path):
    for name, temperature in (("a", 1.0), ("b", 0.0)):
        (tmp_path / name).write_text(json.dumps(result([40, 60], temperature=temperature)))
    assert "settings differ: temperature 1.0 / 0.0" in run(capsys, "--compare", tmp_path / "a", tmp_path / "b")[1]
    one, two = (save(tmp_path / f"{name}.jsonl", [dialogue([45], name)]) for name in "ab")
    code, _, err = run(capsys, "--compare", one, two)
    assert code == 2 and "share no scored scenario" in err


def test_results_that_differ_in_any_setting_of_the_user_are_not_compared():
    for key in ("simulator", "difficulty", "start_emotion", "clamp", "max_turns", "scenarios_sha256", "prompts_sha256", "simulator_model",
                "simulator_format", "simulator_max_tokens", "end_rules", "benchmark"):
        with pytest.raises(ValueError, match=f"{key} 1 / 2"):
            evaluate.compare(result([40], **{key: 1}), result([40], **{key: 2}))


def test_judges_differ_only_where_both_results_were_judged():
    a, b, unjudged = result([40], judge="m"), result([40], judge="n"), result([40])
    said = lambda *results: any("THE JUDGES DIFFER: judge m" in note for note in evaluate.compare(*results)["notes"])
    found = {"judge": {"model": "any"}}
    assert said(a | found, b | found) and not said(a | found, a | found) and not said(a | found, unjudged) and not said(a, b)


# ---- bad input: one line, exit code 2 ----

@pytest.mark.parametrize("line, what", [
    ("{broken", "t.jsonl:2: not a JSON object"), ("[1]", "t.jsonl:2: not a JSON object"),
    ('{"scenario": "a"}', "t.jsonl:2: field 'end_reason' is missing"),
    (json.dumps({k: v for k, v in dialogue([45]).items() if k != "final_emotion"}), "2: field 'final_emotion' is missing"),
    (json.dumps(dialogue([45], final_emotion="45")), "field 'final_emotion' cannot be '45'"),
    (json.dumps(dialogue([45], final_emotion=145)), "145 is not in 0..100"),
    (json.dumps(dialogue([45], intention="money")), "unknown intention 'money'"),
    (json.dumps(dialogue([45], end_reason=["bored"])), "unknown end_reason ['bored']"),
    (json.dumps(changed(dialogue([45]), 0, emotion=None)), "field 'emotion' cannot be None"),
    *((json.dumps(dialogue([45], **{field: value})), f"field {field!r} cannot be {value!r}") for field, value in (
        ("opening", 5), ("character", ["a"]), ("kind", 7), ("benchmark", 1), ("repetition", "0"), ("judge", "x"))),
    *((json.dumps(changed(dialogue([45]), 0, **{field: value})), f"field {field!r} cannot be {value!r}") for field, value in (
        ("thought", 5), ("act", ["praise"]), ("tokens", "7"), ("thought_tokens", 2.5), ("format_ok", "yes"), ("tokens", 10 ** 400), ("emotion", 10 ** 400))),
    (json.dumps(changed(dialogue([45]), 0, flags=[["x"]])), "field 'flags' cannot be"), (json.dumps(changed(dialogue([45]), 0, raw=[5])), "field 'raw'"),
    *((json.dumps(dialogue([45], judge=found)), "field 'judge' cannot be") for found in (
        {"strategies": [5]}, {"strategies": [None]}, {"plane": [1]}, {"plane": [None, 1]}, {"abilities": {"x": [None, ""]}}, {"tracking": ["40"]})),
    (json.dumps(dialogue([45]) | {"turns": ["hello"]}), "t.jsonl:2: "),
    ('{"id": "x", "emo_point": 45}', "t.jsonl:2: field 'history' is missing"),
    ('{"id": "x", "emo_point": 45, "history": []}', "t.jsonl:2: "),
])
def test_a_bad_line_is_named_in_one_line(line, what, capsys, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(dialogue([45])) + "\n" + line + "\n")
    code, out, err = run(capsys, "--transcripts", tmp_path / "t.jsonl")
    assert code == 2 and not out and what in err and err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["--nonsense"], ["--model", "x", "--transcripts", "y"], ["--transcripts", "no/such/file"],
                                  ["--model", "x", "--max-turns", "0"], ["--model", "x", "--scenarios", "no/such/file"],
                                  ["--compare", "a", "b", "--judge", "m"], ["--report", "a", "--json", "r.json"], ["--watch", "a", "--limit", "3"],
                                  ["--transcripts", "a", "--repetitions", "2"], ["--model", "a", "--force"], ["--model", "a", "--judge-url", "http://u/v1"],
                                  ["--model", "a", "--simulator-cache", "c"], ["--model", "a", "--greedy", "--temperature", "0.5"], ["--transcripts", "a", "--simulator", "llm"], ["--transcripts", "a", "--seed", "3"],
                                  ["--transcripts", "a", "--scenarios", "s"], ["--transcripts", "a", "--simulator-concurrency", "3"],
                                  *(["--model", "a", "--temperature", value] for value in ("-1", "nan", "inf", "1e-30", "hot")), ["--compare", ".", "."], ["--rerun", "a", "--out", "b"],
                                  ["--report", "no/such/folder"], ["--compare", "no", "no"], ["--transcripts", "/dev/null"]])
def test_a_users_mistake_is_one_line_and_exit_code_2(argv, capsys):
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out and err.startswith("evaluate.py: ") and err.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "null", "5", "[1]", '{"temperature": "hot"}', '{"temperature": -1}', '{"temperature": NaN}', '{"temperature": null}',
                                     '{"think": 5}', '{"max_new_tokens": 0}', '{"max_new_tokens": 2.5}'])
def test_what_a_models_folder_says_of_how_it_speaks_is_checked_like_flags(content, tmp_path, capsys):
    (tmp_path / "policy.json").write_text(content)
    code, _, err = run(capsys, "--model", tmp_path)
    assert code == 2 and "policy.json: not the policy.json of train.py" in err and err.count("\n") == 1


def test_a_models_folder_sets_how_it_speaks_and_nothing_else(tmp_path):
    (tmp_path / "policy.json").write_text('{"think": true, "temperature": 0.7, "max_new_tokens": 64, "limit": 1}')
    args = evaluate.parse_args(["--model", str(tmp_path), "--max-new-tokens", "32"])
    assert (args.think, args.temperature, args.max_new_tokens, args.limit) == (True, 0.7, 32, None)


def test_shares_of_an_earlier_version_are_not_read_as_percent(tmp_path):
    old = {key: value for key, value in result([40, 60]).items() if key != "strategies_by"} | {"format_rate": 0.99}
    (tmp_path / "r.json").write_text(json.dumps(old))
    assert evaluate.read_result(tmp_path / "r.json")["format_rate"] is None


def test_a_number_that_rounds_to_nothing_has_no_sign():
    assert [evaluate.half_up(value) for value in (-0.04, 0.04, -0.05, 28.95, -5)] == ["0.0", "0.0", "-0.1", "29.0", "-5.0"]


# ---- files that are written, files that are read ----

@pytest.mark.parametrize("argv", [["--transcripts", "t.jsonl", "--json", "t.jsonl"], ["--model", "m", "--json", "x", "--save-transcripts", "./x"],
                                  ["--rerun", "r.json", "--json", "r.json"], ["--compare", "t.jsonl", "r.json", "--json", "r.json"],
                                  ["--transcripts", "t.jsonl", "--judge", "m", "--judge-cache", "t.jsonl"]])
def test_no_file_of_a_command_is_written_over_another(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "t.jsonl", finals([40, 60]))
    played = vars(evaluate.parse_args(["--model", "m"]))
    (tmp_path / "r.json").write_text(json.dumps(result([40, 60]) | {"settings": {name: played[name] for name in evaluate.PLAYED_WITH} | {"difficulty": "vanilla"}}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out and "name another" in err and err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_device_is_not_replaced_and_a_link_is_followed(tmp_path, capsys):
    path = save(tmp_path / "t.jsonl", finals([40, 60]))
    os.mkfifo(tmp_path / "pipe")
    code, _, err = run(capsys, "--transcripts", path, "--json", tmp_path / "pipe")
    assert code == 2 and "is no plain file" in err and (tmp_path / "pipe").is_fifo()
    for device in ("/dev/stdout", "/dev/null"):
        assert run(capsys, "--transcripts", path, "--json", device)[0] == 2
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere" / "r.json")                     # nothing there yet
    assert run(capsys, "--transcripts", path, "--json", tmp_path / "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "elsewhere" / "r.json").read_text())["score"] == 50


def test_the_result_is_written_before_it_is_printed_and_whole_or_not_at_all(tmp_path, capsys, monkeypatch):
    path, found = save(tmp_path / "t.jsonl", finals([40, 60])), tmp_path / "r.json"

    def gone(summary):
        assert json.loads(found.read_text())["score"] == 50
        raise BrokenPipeError
    monkeypatch.setattr(evaluate, "print_summary", gone)
    monkeypatch.setattr(evaluate.os, "dup2", lambda *args: None)
    assert run(capsys, "--transcripts", path, "--json", found)[0::2] == (0, "")
    assert not list(tmp_path.glob("*.partial"))


def test_half_a_character_in_a_transcript_survives_being_written_again(tmp_path):
    evaluate.write_lines(tmp_path / "t.jsonl", [dialogue([45], opening="so \ud83d")])
    assert evaluate.read_transcripts(tmp_path / "t.jsonl")[0]["opening"] == "so \ud83d"


@pytest.mark.parametrize("content", ["[" * 200_000, "null", '{"dialogues": 5}'])
@pytest.mark.parametrize("argv", [("--transcripts",), ("--rerun",), ("--report",), ("--compare",)])
def test_a_file_of_another_kind_is_one_line(content, argv, tmp_path, capsys):
    path = tmp_path / "x"
    path.write_text(content)
    code, out, err = run(capsys, *argv, *[path] * (1 + (argv == ("--compare",))))
    assert code == 2 and not out and err.count("\n") == 1 and len(err) < 500


@pytest.mark.parametrize("key, value", [("dialogues", [["s", 0, "50", "x"]]), ("dialogues", [[1, 0, 50, "x"]]), ("score", "x"), ("score_ci", [1, "x"]),
                                        ("per_intention", []), ("per_intention", {"praise": 5}), ("strategies", {"praise": {"turns": 1}}), ("settings", None),
                                        ("flags", {"x": "y"}), ("judge", {"model": "m"}), ("per_seed", [1]), ("score_se", 10 ** 400), ("score", float("nan")),
                                        ("score_ci", [None]), ("score_ci", [1]), ("strategies", {"a": {"turns": 1, "per_dialogue": None, "contribution": 1}}),
                                        ("settings", {"mixed": 5})])
def test_a_result_with_a_value_of_another_kind_is_one_line(key, value, tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(result([40, 60]) | {key: value}))
    for argv in (("--compare", tmp_path / "r.json", tmp_path / "r.json"), ("--report", tmp_path / "r.json"), ("--rerun", tmp_path / "r.json")):
        code, out, err = run(capsys, *argv)
        assert code == 2 and not out and err.count("\n") == 1 and ("not a whole result" in err or key == "dialogues" and "r.json" in err)


@pytest.mark.parametrize("first, second", [
    (dict(start_emotion=40), dict(start_emotion=30, start=30)), (dict(max_turns=8), dict(max_turns=9)), (dict(benchmark="SAGE"), {}),
    (dict(played_with={"difficulty": "vanilla"}), dict(played_with={"difficulty": "challenging"}))])
def test_dialogues_of_different_users_have_no_common_score_unless_forced_and_then_it_is_said(first, second, tmp_path, capsys):
    path = save(tmp_path / "t.jsonl", [dialogue([45], "a", **{"max_turns": 9} | first), dialogue([55], "b", **{"max_turns": 9} | second)])
    for argv in (("--transcripts", path), ("--report", path), ("--compare", path, path)):
        code, out, err = run(capsys, *argv)
        assert code == 2 and not out and "different settings" in err and err.count("\n") == 1
        assert run(capsys, *argv, "--force")[0] == 0
    code, out, _ = run(capsys, "--transcripts", path, "--force")
    assert out.splitlines()[0].startswith("score / success / failure: 50 / 0 / 0".replace("50", "50.0")) and "MIXED SETTINGS" in out.splitlines()[0]
    assert "MIXED SETTINGS" in (tmp_path / "t.html").read_text()


def test_a_dialogue_that_stands_twice_is_named(tmp_path, capsys):
    path = save(tmp_path / "t.jsonl", [dialogue([45], "a"), dialogue([50], "b"), dialogue([99], "a")])
    code, _, err = run(capsys, "--transcripts", path)
    assert code == 2 and "t.jsonl:3: the dialogue of" in err and "t.jsonl:1 once more" in err
    with pytest.raises(ValueError, match="t.jsonl:3"):
        evaluate.read_result(path)
    save(tmp_path / "t.jsonl", [dialogue([45], "a"), dialogue([50], "a", repetition=1), dialogue([99], "a", seed=7)])
    assert run(capsys, "--transcripts", path)[0] == 0


def test_an_intention_in_the_official_wording_is_ours_after_reading(tmp_path):
    wording = evaluate.simulator.INTENTIONS["praise"][0]
    path = save(tmp_path / "t.jsonl", [dialogue([45], "a", intention=wording), dialogue([45], "b")])
    assert {talk["intention"] for talk in evaluate.read_transcripts(path)} == {"praise"}


def test_our_dialogues_are_not_compared_with_published_ones(official, tmp_path, capsys):
    sage = evaluate.read_transcripts(next(SAGE.glob("*__gpt-4.1_result.jsonl")))
    ours = save(tmp_path / "ours.jsonl", [dialogue([45], talk["scenario"], max_turns=9, played_with={"benchmark": "1a33beef"}) for talk in sage[:9]])
    code, _, err = run(capsys, "--compare", next(SAGE.glob("*__gpt-4.1_result.jsonl")), ours)
    assert code == 2 and "the simulated users differ" in err and "SAGE" in err


# ---- playing ----

def test_playing_stores_what_is_needed_to_play_again(capsys, tmp_path, monkeypatch):
    asked = {}

    def play_scenarios(model, scenarios, **options):
        asked.update(options)
        return [types.SimpleNamespace(to_dict=lambda s=s: dialogue([45, 55], s.id)) for s in scenarios]
    monkeypatch.setitem(sys.modules, "rollout", types.SimpleNamespace(play_scenarios=play_scenarios, uses_vllm=lambda name: False,
                                                                      torch=types.SimpleNamespace(get_num_threads=lambda: 1)))
    monkeypatch.setattr(evaluate.simulator, "REFERENCE_PLAYERS", ("whole history",))
    monkeypatch.setattr(evaluate.simulator, "play_reference", lambda *args: 90)
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps({"id": f"s{number}", "player": "p", "scene": "s", "main_cha": "passive",
                                                            "task": "praise"}) for number in range(3)))
    code, out, _ = run(capsys, "--model", "m", "--scenarios", tmp_path / "s.jsonl", "--limit", 2, "--greedy", "--think", "--seed", 3,
                       "--max-turns", 2, "--verify", "--save-transcripts", tmp_path / "t.jsonl", "--json", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert code == 0 and "55.0 / 0 / 0" in out and "whole history" in out and result["references"] == {"whole history": 90}
    assert asked["temperature"] == 0 and asked["think"] and asked["max_turns"] == 2 and asked["start_emotion"] == 40
    assert set(evaluate.SIMULATOR_SIDE) <= set(result["settings"]) and result["settings"]["temperature"] == 0
    assert result["dialogues"] == [["s0", 0, 55, "max_turns"], ["s1", 0, 55, "max_turns"]]
    again = evaluate.read_result(tmp_path / "t.jsonl")  # the saved transcripts give the same numbers
    assert again["score"] == result["score"] and again["score_ci"] == result["score_ci"] and again["dialogues"] == result["dialogues"]


# ---- the same again: --rerun, a file that grows, seeds ----

@pytest.fixture
def tiny(tmp_path, model, tokenizer):
    """The folder of a saved random model, and flags that play it in a second."""
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ["--model", folder, "--limit", 3, "--max-turns", 2, "--max-new-tokens", 6, "--temperature", "0.9", "--difficulty", "vanilla", "--seed", 5]


def test_transcripts_tell_which_users_were_met_and_a_file_of_two_settings_has_no_score(tiny, capsys, tmp_path):
    for name, more in (("a", ()), ("b", ("--start-emotion", 30)), ("c", ("--temperature", "0.5"))):
        run(capsys, *tiny, *more, "--save-transcripts", tmp_path / f"{name}.jsonl", "--json", tmp_path / f"{name}.json")
    code, _, err = run(capsys, "--compare", tmp_path / "a.jsonl", tmp_path / "b.json")
    assert code == 2 and "the simulated users differ" in err and "benchmark" in err and err.count("\n") == 1
    code, out, _ = run(capsys, "--compare", tmp_path / "a.jsonl", tmp_path / "c.json")          # the policy may differ
    assert code == 0 and "3 scenarios in both" in out and "not recorded" not in out
    (tmp_path / "mixed.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes() + (tmp_path / "c.jsonl").read_bytes())
    for argv in (("--transcripts", tmp_path / "mixed.jsonl"), ("--report", tmp_path / "mixed.jsonl"), ("--compare", tmp_path / "mixed.jsonl", tmp_path / "a.json")):
        code, out, err = run(capsys, *argv)
        assert code == 2 and not out and "different settings" in err and err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--json", "--save-transcripts"])
def test_a_file_that_cannot_be_written_is_said_before_playing_and_a_new_one_is_not_left_empty(tiny, capsys, tmp_path, monkeypatch, flag):
    import rollout
    monkeypatch.setattr(rollout, "play_scenarios", None)                                         # must not be reached
    code, _, err = run(capsys, *tiny, flag, tmp_path)
    assert code == 2 and str(tmp_path) in err and err.count("\n") == 1
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "new.check").write_text("mine")
    code, _, err = run(capsys, *tiny, flag, tmp_path / "new", "--scenarios", tmp_path / "bad.jsonl")
    assert code == 2 and not (tmp_path / "new").exists() and (tmp_path / "new.check").read_text() == "mine"
    code, _, err = run(capsys, *tiny, flag, tmp_path / ("n" * 300))
    assert code == 2 and err.count("\n") == 1


def test_an_evaluation_that_is_interrupted_says_one_line_and_goes_on_from_its_file(tiny, capsys, tmp_path, monkeypatch):
    import rollout
    to_dict, felt = rollout.Dialogue.to_dict, []

    def interrupted(self):
        felt.append(self)
        if len(felt) == 2:
            raise KeyboardInterrupt
        return to_dict(self)
    flags = [*tiny, "--save-transcripts", tmp_path / "t.jsonl", "--json", tmp_path / "r.json"]
    monkeypatch.setattr(rollout.Dialogue, "to_dict", interrupted)
    code, out, err = run(capsys, *flags)
    assert code == 130 and not out and err.strip().splitlines()[-1].startswith("evaluate.py: stopped") and "Traceback" not in err
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 1 and not (tmp_path / "r.json").exists()
    monkeypatch.setattr(rollout.Dialogue, "to_dict", to_dict)
    assert run(capsys, *flags)[0] == 0 and run(capsys, *tiny, "--json", tmp_path / "whole.json")[0] == 0
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads((tmp_path / "whole.json").read_text())


def test_a_result_is_had_again_from_its_own_file_and_a_change_is_noticed(tiny, capsys, tmp_path):
    assert run(capsys, *tiny, "--json", tmp_path / "a.json")[0] == 0
    code, out, _ = run(capsys, "--rerun", tmp_path / "a.json", "--json", tmp_path / "b.json")
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert code == 0 and "rerun: identical" in out and b.pop("rerun_differs") == [] and a == b
    a["dialogues"][1][2] += 5
    (tmp_path / "a.json").write_text(json.dumps(a))
    code, out, _ = run(capsys, "--rerun", tmp_path / "a.json")
    assert code == 1 and "rerun: differs in dialogues" in out


def test_a_rerun_refuses_other_flags_other_files_and_what_no_model_played(tiny, capsys, tmp_path):
    run(capsys, *tiny, "--json", tmp_path / "a.json")
    code, _, err = run(capsys, "--rerun", tmp_path / "a.json", "--temperature", 1)
    assert code == 2 and "leave out --temperature" in err and err.count("\n") == 1
    assert run(capsys, "--rerun", tmp_path / "a.json")[0] == 0
    with open(tiny[1] / "tokenizer.json", "a") as file:
        file.write("\n")
    code, _, err = run(capsys, "--rerun", tmp_path / "a.json")
    assert code == 2 and "model changed since, or not here" in err and err.count("\n") == 1
    for name, value, says in (("max_turns", None, "lack max_turns"), ("limit", -7, "--limit"), ("start_emotion", "x", "--start-emotion"),
                              ("difficulty", "hard", "--difficulty"), ("temperature", "nan", "--temperature")):
        stored = json.loads((tmp_path / "a.json").read_text())
        stored["settings"][name] = value
        (tmp_path / "odd.json").write_text(json.dumps(stored))
        code, _, err = run(capsys, "--rerun", tmp_path / "odd.json")
        assert code == 2 and says in err and err.count("\n") == 1
    (tmp_path / "s.json").write_text(json.dumps(evaluate.summarize(finals([40, 60]))))
    code, _, err = run(capsys, "--rerun", tmp_path / "s.json")
    assert code == 2 and "not played by a model" in err


def test_the_fingerprint_holds_what_makes_a_number():
    args = evaluate.parse_args(["--model", "no/such/folder", "--think", "--judge", "j"])
    settings = evaluate.settings_of_run(args)
    assert settings["end_rules"] == evaluate.END_RULES and settings["judge"] == "j" and settings["judge_sampling"] and settings["clamp"] == 10
    assert settings["system_prompt_sha256"] != evaluate.settings_of_run(evaluate.parse_args(["--model", "x"]))["system_prompt_sha256"]
    assert len(settings["judge_prompts_sha256"]) == len(settings["prompts_sha256"]) == 64 and settings["scenarios"] == "prompts/en/test.jsonl"
    assert set(evaluate.SIMULATOR_SIDE) <= settings.keys() and "model_sha256" not in settings      # a hub name has no file here


def test_an_interrupted_evaluation_plays_only_what_is_missing(tiny, capsys, tmp_path, monkeypatch):
    import rollout
    whole, half, played = tmp_path / "whole.jsonl", tmp_path / "half.jsonl", []
    run(capsys, *tiny, "--save-transcripts", whole, "--json", tmp_path / "a.json")
    lines = whole.read_text().splitlines(keepends=True)
    lost = json.dumps(json.loads(lines[2]) | {"end_reason": "simulator_failed"}) + "\n"             # its user had failed: play it again
    half.write_text(lines[0] + lost + lines[1][:100])                                            # a crash left half a line
    real = rollout.rollout
    monkeypatch.setattr(rollout, "rollout", lambda engine, chat, dialogues, *a, **kw: (played.extend(d.scenario.id for d in dialogues), real(engine, chat, dialogues, *a, **kw))[1])
    run(capsys, *tiny, "--save-transcripts", half, "--json", tmp_path / "b.json")
    assert played == [json.loads(line)["scenario"] for line in lines[1:]] and half.read_text() == whole.read_text()
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    played.clear()
    run(capsys, *tiny, "--limit", 2, "--save-transcripts", half)                                 # nothing is missing
    run(capsys, *tiny, "--limit", 2, "--save-transcripts", half, "--train-scenarios", evaluate.simulator.PROMPTS / "en" / "train.jsonl")
    assert not played
    code, _, err = run(capsys, *tiny, "--seed", 6, "--save-transcripts", half)
    assert code == 2 and "dialogues of other settings (seed 5 / 6)" in err and err.count("\n") == 1
    (tmp_path / "copy.jsonl").write_bytes((evaluate.simulator.PROMPTS / "en" / "test.jsonl").read_bytes())
    code, _, err = run(capsys, *tiny[:1], f"{tiny[1]}/", *tiny[2:], "--scenarios", tmp_path / "copy.jsonl", "--save-transcripts", half)    # the same files
    assert code == 0 and not played
    for name, content in (("chat_template.jinja", "\n"), ("generation_config.json", "\n")):                   # it speaks otherwise now
        with open(tiny[1] / name, "a") as file:
            file.write(content)
        code, _, err = run(capsys, *tiny, "--save-transcripts", half)
        assert code == 2 and "model_sha256" in err
        (tiny[1] / name).write_text((tiny[1] / name).read_text().removesuffix(content))
    lines = half.read_text().splitlines(keepends=True)
    monkeypatch.setattr(evaluate, "settings_of_run", lambda args, settings=evaluate.settings_of_run: settings(args) | {"threads": 99, "code_version": "new"})
    code, out, _ = run(capsys, *tiny, "--save-transcripts", half)                              # said, not refused: paid dialogues are not stuck
    assert code == 0 and not played and "note: threads was" in out and "note: code_version was" in out
    assert run(capsys, "--transcripts", half)[0] == 0
    half.write_text("".join(lines + lines[:2]).removesuffix("\n"))                            # two processes were killed; an editor ate the last end
    assert run(capsys, *tiny, "--save-transcripts", half)[0] == 0 and not played and half.read_text() == "".join(lines)
    assert run(capsys, "--transcripts", half)[0] == 0
    (tmp_path / "notes.txt").write_text("my only notes, one line")
    code, _, err = run(capsys, *tiny, "--save-transcripts", tmp_path / "notes.txt")
    assert code == 2 and "was not written here" in err and (tmp_path / "notes.txt").read_text() == "my only notes, one line"
    for field in ("end_reason", "turns", "repetition", "seed"):
        (tmp_path / "cut.jsonl").write_text(lines[0] + json.dumps({k: v for k, v in json.loads(lines[1]).items() if k != field}) + "\n")
        code, _, err = run(capsys, *tiny, "--save-transcripts", tmp_path / "cut.jsonl")
        assert code == 2 and "cut.jsonl:2" in err and err.count("\n") == 1
    (tmp_path / "cut.jsonl").write_text(json.dumps(json.loads(lines[0]) | {"seed": None}) + "\n")
    assert run(capsys, *tiny, "--save-transcripts", tmp_path / "cut.jsonl")[0] == 2
    code, _, err = run(capsys, "--rerun", tmp_path / "a.json", "--save-transcripts", half)
    assert code == 2 and "name a new file" in err


def test_each_dialogue_is_on_disk_as_soon_as_it_ends(tiny, capsys, tmp_path, monkeypatch):
    import rollout
    real, seen = rollout.rollout, []

    def stop(engine, chat, dialogues, *rest, on_end, **kw):
        real(engine, chat, dialogues, *rest, on_end=lambda d: (on_end(d), seen.append((tmp_path / "t.jsonl").read_text().count("\n"))), **kw)
        raise OSError("the power went")
    monkeypatch.setattr(rollout, "rollout", stop)
    assert run(capsys, *tiny, "--save-transcripts", tmp_path / "t.jsonl")[0] == 2
    assert seen == [1, 2, 3]


def test_a_smaller_call_scores_fewer_dialogues_and_loses_none(tiny, capsys, tmp_path):
    path, key = tmp_path / "t.jsonl", lambda row: (row["scenario"], row["repetition"])
    run(capsys, *tiny, "--seeds", 2, "--repetitions", 2, "--save-transcripts", path)
    whole = sorted(map(json.loads, path.read_text().splitlines()), key=key)
    assert len(whole) == 3 * 2 * 2
    for more, n in ((("--limit", 1, "--seeds", 2), 4), (("--limit", 3), 6), (("--limit", 2), 4)):
        code, _, _ = run(capsys, *tiny, *more, "--repetitions", 2, "--save-transcripts", path, "--json", tmp_path / "r.json")
        assert code == 0 and json.loads((tmp_path / "r.json").read_text())["n"] == n
        assert sorted(map(json.loads, path.read_text().splitlines()), key=key) == whole
    (tmp_path / "other.jsonl").write_text("kept")
    code, _, err = run(capsys, "--transcripts", path, "--save-transcripts", tmp_path / "other.jsonl")
    assert code == 2 and "other.jsonl exists" in err and (tmp_path / "other.jsonl").read_text() == "kept"


def test_several_seeds_are_those_of_single_runs_and_their_spread_is_printed(tiny, capsys, tmp_path):
    for name, flags in (("both", ("--seeds", 2)), ("one", ()), ("two", ("--seed", 6))):
        code, out, _ = run(capsys, *tiny, *flags, "--json", tmp_path / f"{name}.json", "--save-transcripts", tmp_path / f"{name}.jsonl")
        assert code == 0 and ("spread: sd" in out) == (name == "both")
    both, one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("both", "one", "two"))
    assert both["per_seed"] == {"5": one["score"], "6": two["score"]} and both["n"] == 6
    said = lambda name: [[turn["reply"] for turn in json.loads(line)["turns"]] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert said("both") == said("one") + said("two") and said("one") != said("two")


def test_the_score_of_a_seed_is_that_of_its_own_repetitions(capsys, tmp_path, monkeypatch):
    import rollout
    talks = [dialogue([emotion], "exam/praise", repetition=number) for number, emotion in enumerate((40, 50, 60, 70))]
    monkeypatch.setattr(rollout, "play_scenarios", lambda *args, **options: [types.SimpleNamespace(to_dict=lambda t=t: t) for t in talks])
    (tmp_path / "s.jsonl").write_text(json.dumps({"id": "exam/praise", "player": "p", "scene": "s", "main_cha": "passive", "task": "praise"}))
    monkeypatch.setattr(evaluate.simulator, "REFERENCE_PLAYERS", ())
    run(capsys, "--model", "m", "--scenarios", tmp_path / "s.jsonl", "--seed", 5, "--seeds", 2, "--repetitions", 2, "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["per_seed"] == {"5": 45, "6": 65}


def test_a_rerun_says_what_may_round_otherwise(capsys, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(result([40], threads=4, code_version="abc")))
    evaluate.check_unchanged(tmp_path / "r.json", {"scenarios_sha256": "s", "prompts_sha256": "p", "threads": 1, "code_version": "abd"})
    assert capsys.readouterr().out == "note: code_version was abc, is abd\nnote: threads was 4, is 1\n"


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path):
    for step in ("000002", "000010", "000012.partial"):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "policy.json").write_text(json.dumps({"max_new_tokens": int(step[:6])}))
    args = evaluate.parse_args(["--model", str(tmp_path)])
    assert args.model == str(tmp_path / "checkpoints" / "step-000010") and args.max_new_tokens == 10


# ---- personas, strategies, collapse ----

def test_scenarios_whose_persona_was_trained_on_get_no_second_score(capsys, tmp_path):
    row = {"scene": "s", "main_cha": "passive", "task": "praise"}
    for name, people in (("test", ["ann", "bob", "cid"]), ("train", ["bob", "eve"])):
        (tmp_path / name).write_text("\n".join(json.dumps(row | {"id": f"{name}-{who}", "player": who}) for who in people))
    path = save(tmp_path / "t.jsonl", [dialogue([value], f"test-{who}") for who, value in (("ann", 50), ("bob", 100), ("cid", 60))])
    flags = ("--transcripts", path, "--scenarios", tmp_path / "test", "--train-scenarios", tmp_path / "train")
    code, out, _ = run(capsys, *flags, "--json", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert code == 0 and "persona not in training  2" in out and (result["unseen_persona"]["n"], result["unseen_persona"]["score"], result["score"]) == (2, 55, 70)
    code, _, err = run(capsys, "--transcripts", path, "--train-scenarios", tmp_path / "train")
    assert code == 2 and "is not in --scenarios" in err


def test_54_of_the_100_official_test_profiles_share_their_persona_with_training(official):
    talks = evaluate.read_transcripts(next((official / "sage").glob("*__gpt-4.1_result.jsonl")))
    left = evaluate.of_unseen_personas(talks, official / "test_profile.jsonl", official / "train_profile.jsonl")
    assert (len(talks), len(left)) == (100, 100 - 54)
    result = evaluate.summarize(talks)
    assert {name: row["n"] for name, row in result["per_character"].items()} == {"avoidant": 25, "negative": 41, "passive": 34}
    assert result["strategies"] == {}                                        # nobody labelled these turns


def test_a_strategys_contribution_is_the_mean_change_of_the_turns_that_use_it():
    first, second = dialogue([50, 45, 55]), dialogue([30, 20], "b")           # +10 -5 +10; -10 -10
    for talk, acts in ((first, ["praise", "advice", "praise and empathy"]), (second, [None, "advice"])):
        for turn, act in zip(talk["turns"], acts):
            turn["act"] = act
    second["turns"][1]["change"] = -30                                        # a simulator's wish beyond the rule counts as the rule's -10
    unlabelled = dialogue([45], "c")
    assert not evaluate.summarize([unlabelled])["strategies"]
    assert not evaluate.summarize([unlabelled])["strategies"]
    silent = dialogue([30, 20], "d")                                          # the scripted user heard no act in any of its replies
    for turn in silent["turns"]:
        turn |= {"act": None, "flags": ["nothing"]}
    assert evaluate.summarize([first, silent])["strategies"] == {
        "praise": {"turns": 2, "per_dialogue": 1, "contribution": 10}, "advice": {"turns": 1, "per_dialogue": 0.5, "contribution": -5},
        "empathy": {"turns": 1, "per_dialogue": 0.5, "contribution": 10}, "(none)": {"turns": 2, "per_dialogue": 1, "contribution": -10}}
    assert evaluate.summarize([first])["strategies_by"] == "the scripted user" and evaluate.summarize([unlabelled])["strategies_by"] is None
    judged = dialogue([45], "e", judged_by={"judge": "m", "judge_prompts_sha256": "0"}) | {"judge": {"strategies": [["analysis"]]}}
    assert evaluate.summarize([first, judged])["strategies_by"] == "m 0"    # other words: never in one table with the acts
    assert evaluate.summarize([first, judged])["strategies"] == {"analysis": {"turns": 1, "per_dialogue": 1, "contribution": 5}}
    assert evaluate.summarize([first, second, unlabelled])["strategies"] == {
        "praise": {"turns": 2, "per_dialogue": 1, "contribution": 10}, "advice": {"turns": 2, "per_dialogue": 1, "contribution": -7.5},
        "empathy": {"turns": 1, "per_dialogue": 0.5, "contribution": 10}, "(none)": {"turns": 1, "per_dialogue": 0.5, "contribution": -10}}


@pytest.mark.parametrize("emotions, replies, collapsed", [
    ([30, 20], None, True), ([30, 25], None, False), ([90, 20], None, True),                        # 20 points below the start, 40
    ([45, 50], ["Hm.", "Hm."], True), ([45, 50, 55], ["Hm.", "Hm.", "I see."], False), ([45, 50], ["", "Go on."], True)])
def test_a_dialogue_collapses_by_its_end_or_by_empty_and_repeated_replies(emotions, replies, collapsed):
    talk = dialogue(emotions)
    for turn, reply in zip(talk["turns"], replies or ()):
        turn["reply"] = reply
    assert evaluate.collapsed(talk) is collapsed and evaluate.summarize([talk])["collapse_rate"] == 100 * collapsed


def test_a_collapse_rate_has_the_interval_of_its_clusters():
    talks = [dialogue([30, 20] if place < 3 else [45, 50], f"s{place // 2}") for place in range(20)]       # 3 of 20, in 10 scenarios of two
    result = evaluate.summarize(talks)
    se = (10 / 9 * (1.7 ** 2 + 0.7 ** 2 + 8 * 0.3 ** 2)) ** 0.5 / 20                 # from the sums of deviations of each scenario
    n = (3 * 0.85 ** 2 + 17 * 0.15 ** 2) / 19 / se ** 2
    assert result["collapse_rate"] == 15 and result["collapse_rate_ci"] == pytest.approx(evaluate.wilson(15, n))
    assert f"15.0 ({result['collapse_rate_ci'][0]:.1f} to" in str([*evaluate.summary_tables(result)])


def test_thoughts_are_held_against_the_true_need_and_the_hints_given_so_far():
    talk = dialogue([45, 55, 50], opening="I lost a coat. It was my own choice.")                   # hint: choice
    for turn, thought, act in zip(talk["turns"], ("I hear choice and nothing. They need praise. I will praise.",
                                                  "I hear cry. They need empathy. I will advise.", None), ("praise", "advice", "advice")):
        turn |= {"thought": thought, "act": act}
    result = evaluate.summarize([talk])
    assert result["need_named"] == 50 and result["hint_named"] == 50                          # nobody said "I could cry."
    assert evaluate.summarize([dialogue([45])])["need_named"] is None
