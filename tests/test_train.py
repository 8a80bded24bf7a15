"""train.py: flags, the loop's run folder, resume, equal runs, who talks when. Every run here is of a random 50k-parameter model."""
import argparse
import copy
import itertools
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate
import ppo
import rollout
import simulator
import train
from rollout import ChatTokens, Dialogue, Turn, load_policy
from simulator import PROMPTS, Reaction, Scenario, SimulatorFailed

ROOT = Path(__file__).resolve().parent.parent
calm = settings(max_examples=40)
PERSON = Scenario("exam/praise", "exam", "a persona", "a background", "passive", (), "praise")


# ---- helpers -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(policy, name, *more, steps=2):
    """The command line of a small run; later flags win."""
    return ["--model", str(policy), "--preset", "tiny", "--name", name, "--steps", str(steps), "--dialogues-per-step", "4", "--max-turns", "2",
            "--max-new-tokens", "8", "--minibatches", "2", "--tokens-per-batch", "500", "--save-every", "1", *more]


@pytest.fixture(autouse=True)
def listeners(monkeypatch):
    monkeypatch.setattr(simulator.ScriptedSimulator, "hear", generous)


def generous(self, reply, hear=simulator.ScriptedSimulator.hear):
    """Users that hear a stock reply, chosen by the random policy's words, so that rewards differ. Their rules are the real ones."""
    rng = random.Random(reply)
    return hear(self, simulator.stock_reply(rng.choice(list(simulator.INTENTIONS)), (self.told or [""])[-1], rng)[0])


def run(policy, name, *more, steps=2):
    train.main(flags(policy, name, *more, steps=steps))
    return Path("runs") / name


def refuse(constant):
    raise AssertionError(f"{constant} in a metrics file")


def metrics(folder, times=False):
    """The lines of metrics.jsonl; every number in them must be finite."""
    rows = [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if times or not k.startswith("seconds")} for row in rows]


def transcripts(folder):
    return {path.name: path.read_text() for path in sorted((folder / "transcripts").iterdir())}


def weights(folder, step):
    return AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step-{step:06d}").state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupt_in_step(monkeypatch, step):
    """Ctrl-C after the update of this step (counted from now), before it is logged."""
    sync, calls = rollout.HFEngine.sync, []

    def counting(self, *args):
        sync(self, *args)
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
    monkeypatch.setattr(rollout.HFEngine, "sync", counting)


# ---- flags ---------------------------------------------------------------------------------------------------------------

@pytest.fixture
def parser(monkeypatch):
    found = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self))
    with pytest.raises(SystemExit):
        train.parse_args(["--help"])
    monkeypatch.undo()
    return found[0]


def test_help_names_the_default_of_every_flag(parser, capsys):
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    assert len(actions) > 30
    shown = lambda value: "empty" if value == "" else Path(value).name if isinstance(value, str) else str(value)
    assert [a.option_strings[0] for a in actions if not (a.help and "default" in a.help and shown(a.default) in a.help)] == []
    assert [name for name, value in train.TINY.items() for a in actions if a.dest == name and f"tiny: {value}" not in a.help] == []
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    page = capsys.readouterr().out
    assert stop.value.code == 0 and [a.option_strings[0] for a in actions if a.option_strings[0] not in page] == []


def test_every_setting_of_the_tiny_preset_is_a_flag_and_is_used_by_default():
    args, paper, plain = train.parse_args(["--think"]), train.parse_args(["--model", "M"]), train.parse_args([])
    assert {name: getattr(args, name) for name in train.TINY} == train.TINY and args.preset == "tiny"
    assert {name: getattr(plain, name) for name in train.TINY} == train.TINY | train.TINY_PLAIN
    assert paper.preset == "paper" and all(getattr(paper, name) != value for name, value in train.TINY.items())
    assert vars(args).keys() == vars(paper).keys()


def test_the_papers_numbers_are_the_defaults():
    paper = train.parse_args(["--model", "M"])
    expected = dict(lr=1e-6, critic_lr=5e-6, start_emotion=30, max_turns=8, dialogues_per_step=32, group_size=4, temperature=1.0, clip_eps=0.2,
                    value_clip=0.5, ent_coef=0.001, kl_coef=0.0, gamma=1.0, gae_lambda=1.0, lr_end=1.0, gae="turn", format_reward=True, epochs=1,
                    warmup_steps=20, critic_lr_warmup=50)
    assert {name: getattr(paper, name) for name in expected} == expected


@pytest.mark.parametrize("name", sorted(train.TINY))
@pytest.mark.parametrize("preset", [(), ("--preset", "tiny"), ("--preset", "paper", "--model", "M")])
def test_an_explicit_flag_overrides_the_preset(name, preset):
    paper = getattr(train.parse_args(["--model", "M"]), name)                # the very value that the preset would replace
    for argv in ([*preset, f"--{name.replace('_', '-')}", str(paper)], [f"--{name.replace('_', '-')}", str(paper), *preset]):
        assert getattr(train.parse_args(argv), name) == paper


def test_the_tiny_preset_can_be_given_with_another_model():
    args = train.parse_args(["--model", "M", "--preset", "tiny", "--think"])
    assert args.model == "M" and args.steps == train.TINY["steps"]


@pytest.mark.parametrize("argv, says", [
    (["--algo", "grpo", "--group-size", "1"], "--group-size"),
    (["--algo", "grpo", "--dialogues-per-step", "6", "--group-size", "4"], "multiple"),
    (["--preset", "paper"], "--model"),
    (["--steps", "0"], "--steps"), (["--max-turns", "0"], "--max-turns"), (["--max-new-tokens", "0"], "--max-new-tokens"),
    (["--dialogues-per-step", "0"], "--dialogues-per-step"), (["--save-every", "0"], "--save-every"), (["--minibatches", "-1"], "--minibatches"),
    (["--start-emotion", "9"], "--start-emotion"), (["--start-emotion", "100"], "--start-emotion"),
    (["--temperature", "0"], "--temperature"), (["--temperature", "-1"], "--temperature"),
    (["--lr", "0"], "--lr must be from 1e-12 to 1"), (["--lr", "nan"], "--lr"), (["--critic-lr", "-0.001"], "--critic-lr must be from"),
    *(([f"--{flag}", value], f"--{flag} must be") for flag, value in (
        ("lr", "inf"), ("temperature", "inf"), ("temperature", "nan"), ("max-grad-norm", "-1"), ("clip-eps", "-1"), ("clip-high", "nan"), ("adam-beta2", "1"),
        ("weight-decay", "-1"), ("lora-rank", "-1"), ("threads", "-1"), ("gamma", "inf"), ("gae-lambda", "1.1"), ("engine-memory", "7"), ("kl-coef", "-1"))),
    (["--simulator-url", "http://u/v1"], "--simulator llm"), (["--simulator-cache", "c"], "--simulator llm"),
    (["--name", "a/b"], "--name a/b"), (["--name", "."], "--name ."), (["--name", ".."], "--name .."), (["--name", "/tmp"], "--name /tmp"),
    (["--reward", "delta", "--gae", "turn"], "--gae dialogue"),
    (["--scenarios", "no/such/file.jsonl"], "no/such/file.jsonl"),
    (["--resume", "runs/none"], "runs/none"),
])
def test_what_cannot_work_is_refused_in_one_line_before_a_model_is_loaded(here, monkeypatch, argv, says):
    monkeypatch.setattr(train, "load_policy", lambda path: pytest.fail("a model was loaded"))
    monkeypatch.setattr(train.sft, "build_tiny", lambda *args, **kw: pytest.fail("a model was built"))
    with pytest.raises(ValueError) as error:
        train.main(argv)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert list(here.iterdir()) == []                                        # nothing was written


def test_deltas_flow_over_the_whole_dialogue_and_the_papers_reward_within_each_turn_unless_told_otherwise():
    gae = lambda *argv: train.parse_args(list(argv)).gae
    assert (gae(), gae("--reward", "delta")) == ("turn", "dialogue")
    assert (gae("--gae", "dialogue"), gae("--gae", "dialogue", "--reward", "delta"), gae("--gae", "turn")) == ("dialogue", "dialogue", "turn")
    assert gae("--algo", "grpo", "--reward", "delta", "--gae", "turn") == "turn"             # GRPO has no GAE: nothing to refuse


def test_a_model_whose_template_cannot_carry_a_dialogue_is_refused_and_leaves_no_run_folder(here, policy):
    shutil.copytree(policy, here / "gemma")
    (here / "gemma" / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    for _ in range(2):                                                       # and the second try does not say "exists"
        with pytest.raises(ValueError, match="gemma.*System role not supported") as error:
            run(here / "gemma", "run")
        assert "\n" not in str(error.value) and not Path("runs").exists()


def scenario_file(path, *with_script):
    row = {"id": "x", "player": "p", "scene": "s", "main_cha": "c", "task": "praise", "first_talk": "Hello."}
    script = {"details": [["dog", "My dog is ill."]]}
    path.write_text("".join(json.dumps(row | {"id": f"x{i}"} | ({"script": script} if has else {})) + "\n" for i, has in enumerate(with_script)))
    return str(path)


@pytest.mark.parametrize("scripts", [(False, False), (True, False), (False, True)])
def test_a_scenario_without_a_script_is_refused_before_a_model_is_loaded(here, monkeypatch, scripts):
    monkeypatch.setattr(train, "load_policy", lambda path: pytest.fail("a model was loaded"))
    path = scenario_file(here / "scenarios.jsonl", *scripts)
    with pytest.raises(ValueError, match="script") as error:
        train.main(["--model", "M", "--preset", "tiny", "--scenarios", path])
    assert "\n" not in str(error.value) and f"x{scripts.index(False)}" in str(error.value)
    assert [p.name for p in here.iterdir()] == ["scenarios.jsonl"]


def test_a_run_folder_that_exists_is_refused_and_left_alone(here, policy):
    folder = run(policy, "again", steps=1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="again exists.*--resume") as error:
        run(policy, "again", steps=1)
    assert "\n" not in str(error.value)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_reply_length_that_leaves_no_room_in_the_context_is_refused_in_one_line(here, policy):
    with pytest.raises(ValueError, match="max-new-tokens") as error:         # the model's context holds 2048 tokens
        run(policy, "long", "--max-new-tokens", "2040", steps=1)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_whole_checkpoint_cannot_be_resumed(here, policy):
    folder = run(policy, "cut", steps=1)
    (folder / "checkpoints" / "step-000001" / "trainer" / "state.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint") as error:
        train.main(["--resume", str(folder)])
    assert "\n" not in str(error.value)


def command_line(monkeypatch, capsys, *argv):
    """train.py as __main__, in this process: exit code and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--algo", "grpo", "--group-size", "1"], ["--resume", "runs/none"], ["--model", "no such model"],
                                  ["--algo", "dpo"], ["--steps", "many"], ["--no-such-flag"]])
def test_bad_flags_end_with_one_line_and_exit_code_2(here, monkeypatch, capsys, argv):
    code, err = command_line(monkeypatch, capsys, *argv)
    assert code == 2 and err.startswith("train.py: error: ") and err.count("\n") == 1 and "Traceback" not in err


def test_the_program_itself_ends_with_one_line_and_exit_code_2(here):
    argv = [sys.executable, str(ROOT / "train.py"), "--scenarios", "nowhere.jsonl"]
    done = subprocess.run(argv, cwd=here, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "nowhere.jsonl" in done.stderr and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("train.py: error")]) == 1 and done.stderr.count("\n") == 1


# ---- a run is a folder -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("algo, mode, more", [
    ("ppo", "--think", ("--no-format-reward",)),
    ("ppo", "--no-think", ("--gae", "dialogue", "--critic-values", "token", "--epochs", "2")),
    ("grpo", "--think", ("--group-size", "4", "--no-std", "--difficulty", "vanilla", "--no-format-reward")),
    ("grpo", "--no-think", ("--group-size", "4", "--kl-coef", "0.1", "--show-tokens", "--no-format-reward")),
])
def test_two_steps_write_the_whole_run_folder(here, policy, capsys, algo, mode, more):
    folder = run(policy, "run", "--algo", algo, mode, "--critic-warmup", "0", *more)
    out, err = capsys.readouterr()
    config = json.loads((folder / "config.json").read_text())
    assert config["algo"] == algo and config["think"] == (mode == "--think") and config["steps"] == 2 and config["model"] == str(policy)
    rows = metrics(folder, times=True)
    assert [row["step"] for row in rows] == [1, 2]
    needed = {"emotion", "success", "failure", "reward_raw", "reward_gated", "format_rate", "turns", "pg_loss", "lr", "entropy", "approx_kl",
              "clipfrac", "grad_norm", "weight_version", "seconds_generate", "seconds_simulate", "seconds_update", "repeat_rate", "response_len"}
    assert all(needed <= row.keys() and row["dialogues"] == 4 and row["failed"] == 0 for row in rows)
    assert ("v_loss" in rows[0]) == (algo == "ppo") and ("frac_zero_std_groups" in rows[0]) == (algo == "grpo")
    assert rows[0]["weight_version"] < rows[1]["weight_version"] and rows[0]["grad_norm"] > 0
    assert max(row["mismatch_max"] for row in rows) < 1e-3                   # engine and learner agree, before and after a sync
    assert list(transcripts(folder)) == ["step-000001.jsonl", "step-000002.jsonl"]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert not list(folder.rglob("*.partial"))
    assert all(word in out for word in (str(policy), "scripted", "scenarios", "run"))                # what runs here, and how to change it
    assert ("advantage  token" in out) == ("--show-tokens" in more)
    assert "--max-new-tokens" in err                                         # a random model never ends its turn: the run says so


def test_transcripts_of_a_run_verify_and_hold_its_dialogues(here, policy):
    folder = run(policy, "run", "--start-emotion", "50")
    for row, path in zip(metrics(folder), sorted((folder / "transcripts").iterdir())):
        lines = evaluate.read_transcripts(path)
        found = evaluate.verify(lines)
        assert found["faults"] == [] and found["transitions"] == found["transitions_ok"] == sum(len(line["turns"]) for line in lines) > 0
        finals = [line["final_emotion"] for line in lines]
        assert len(lines) == row["dialogues"] == 4 and row["emotion"] == pytest.approx(sum(finals) / 4)
        assert [line["reward"] for line in lines] == [final / 100 for final in finals]
        per_turn = [line["reward"] for line in lines for _ in line["turns"]]
        assert row["reward_raw"] == pytest.approx(sum(per_turn) / len(per_turn))
        assert row["failure"] == 100 * sum(final < 10 for final in finals) / 4
        assert len({(line["scenario"], line["seed"]) for line in lines}) == 4 and all(line["start_emotion"] == 50 for line in lines)


def test_a_checkpoint_loads_in_plain_transformers_with_equal_logits_and_template(here, policy, monkeypatch):
    engines, sync = [], rollout.HFEngine.sync
    monkeypatch.setattr(rollout.HFEngine, "sync", lambda self, *args: (engines.append(self), sync(self, *args))[1])
    folder = run(policy, "run", "--lr", "0.01", "--critic-warmup", "0")
    saved = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-000002").eval()
    tokenizer, original = (AutoTokenizer.from_pretrained(path) for path in (folder / "checkpoints" / "step-000002", policy))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        trained = engines[-1].model.eval()(ids).logits
        assert torch.equal(saved(ids).logits, trained)
        assert not torch.allclose(load_policy(policy)[0](ids).logits, trained, atol=1e-3)      # it did learn something
    assert not equal(weights(folder, 1), weights(folder, 2))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello, my dog."}]
    page = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert page == original.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(page)["input_ids"] == original(page)["input_ids"] and ChatTokens(tokenizer).end_ids == ChatTokens(original).end_ids


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_four_steps_equal_two_and_two_after_a_resume(here, policy, monkeypatch, algo):
    how = ("--algo", algo, "--save-every", "2", "--epochs", "2", "--critic-warmup", "0", "--think", "--no-format-reward")
    whole = run(policy, "whole", *how, steps=4)
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 4)                                          # step 3 is logged, its weights are lost
        with pytest.raises(KeyboardInterrupt):
            run(policy, "halves", *how, steps=4)
    halves = Path("runs/halves")
    assert [row["step"] for row in metrics(halves)] == [1, 2, 3]
    train.main(["--resume", str(halves)])
    assert equal(weights(whole, 4), weights(halves, 4))
    assert transcripts(whole) == transcripts(halves)
    assert equal(weights(whole, 2), weights(halves, 2)) and not equal(weights(whole, 2), weights(whole, 4))
    for one, other in zip(metrics(whole), metrics(halves), strict=True):
        assert {name: (one.get(name), other.get(name)) for name in one.keys() | other.keys() if one.get(name) != other.get(name)} == {}


def test_saving_changes_nothing_not_even_while_only_the_critic_learns(here, policy, monkeypatch):
    how = ("--critic-warmup", "2", "--think", "--no-format-reward", "--lr", "0.01")
    often, once = run(policy, "often", *how, "--save-every", "1", steps=4), run(policy, "once", *how, "--save-every", "9", steps=4)
    assert metrics(often) == metrics(once) and equal(weights(often, 4), weights(once, 4))
    run(policy, "halves", *how, steps=1)                                     # stopped within the warm-up
    train.main(["--resume", "runs/halves", "--steps", "4", "--override", "steps"])
    for row in (rows := metrics(Path("runs/halves"))):
        row["lr"] = metrics(once)[rows.index(row)]["lr"]                     # its schedule knew of one step only
    assert [row["explained_var"] for row in rows] == [row["explained_var"] for row in metrics(once)]


def test_a_save_that_breaks_leaves_no_checkpoint_behind_and_the_run_goes_on_from_the_last_whole_one(here, policy, monkeypatch):
    whole = run(policy, "whole", steps=3)
    save, calls = torch.save, []

    def breaking(what, path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError("no space left on device")
        return save(what, path, *args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", breaking)
        with pytest.raises(ValueError, match="no space left.*--resume runs/broken") as error:
            run(policy, "broken", steps=3)
        assert "\n" not in str(error.value)
    broken = Path("runs/broken")
    assert [p.name for p in (broken / "checkpoints").iterdir()] == ["step-000001"]
    train.main(["--resume", str(broken)])
    assert equal(weights(whole, 3), weights(broken, 3)) and transcripts(whole) == transcripts(broken)


def test_a_run_that_is_killed_at_any_moment_can_be_resumed_and_ends_like_one_that_was_not(here, policy):
    """kill -9 of a run of 30 steps at random changes of its files; each time the next process resumes whatever lies there.
    A kill at a renaming leaves half of what was to be renamed, as one in the middle of its writing would."""
    whole, killed, rng = run(policy, "whole", "--save-every", "3", steps=30), Path("runs/killed"), random.Random(0)

    def killed_at(change, argv):
        """Whether a process with this command line came to its change-th opening for writing, renaming or removing, and so to its end."""
        if (process := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
            tqdm.set_lock(threading.RLock())                                 # the one it has is shared by forks, and a killed one never gives it back
            changes = itertools.count(1)

            def kill(event, values):
                if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR):
                    if next(changes) == change:
                        for path in [Path(values[0]), *Path(values[0]).rglob("*")] if event == "os.rename" else []:
                            if path.is_file():
                                os.truncate(path, path.stat().st_size // 2)
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(kill)
            code = 1
            try:
                train.main(argv)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(process, 0)
        assert status in (0, signal.SIGKILL)
        return status == signal.SIGKILL

    kills = 0
    while killed_at(rng.randint(1, 60), ["--resume", str(killed)] if (killed / "config.json").exists()
                    else flags(policy, "killed", "--save-every", "3", steps=30)):
        kills += 1
    assert kills > 5
    train.main(["--resume", str(killed)])                                    # it is done: nothing is left to do, and nothing changes
    assert metrics(whole) == metrics(killed) and transcripts(whole) == transcripts(killed)
    assert equal(weights(whole, 30), weights(killed, 30))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_saves_and_exits_and_the_run_goes_on(here, policy, monkeypatch, capsys, number):
    handler = signal.getsignal(number)
    whole, sync = run(policy, "whole", "--save-every", "100", steps=4), rollout.HFEngine.sync

    def interrupted(self, *args):
        sync(self, *args)
        if self.weight_version == 2:
            os.kill(os.getpid(), number)
    with monkeypatch.context() as patch:
        patch.setattr(rollout.HFEngine, "sync", interrupted)
        with pytest.raises(SystemExit) as stop:
            run(policy, "stopped", "--save-every", "100", steps=4)
    assert stop.value.code == 128 + number and "--resume runs/stopped" in capsys.readouterr().out
    assert [row["step"] for row in metrics(Path("runs/stopped"))] == [1, 2]
    train.main(["--resume", "runs/stopped"])
    assert metrics(whole) == metrics(Path("runs/stopped")) and equal(weights(whole, 4), weights(Path("runs/stopped"), 4))
    assert signal.getsignal(number) == handler                               # put back as it was


def test_a_second_interrupt_exits_at_once():
    code = "import os, signal, train\nwith train.catch_signals():\n    os.kill(os.getpid(), 2); os.kill(os.getpid(), 2); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 130 and done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.parametrize("checkpoint", [2, 0])
def test_a_resume_forgets_the_numbers_and_dialogues_of_the_steps_after_its_checkpoint(here, policy, checkpoint):
    few = here / "few.jsonl"
    few.write_text("".join((PROMPTS / "en" / "valid.jsonl").read_text().splitlines(True)[:1]))
    folder = run(policy, "run", "--save-every", "2", "--lr-end", "1", "--eval-scenarios", str(few), steps=4)
    old = transcripts(folder)
    assert len(old) == 6                                                     # four steps, two evaluations
    (folder / "transcripts" / "notes.jsonl").write_text("mine")
    for step in {4, 2} - {checkpoint}:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")           # as if killed before it was written
    train.main(["--resume", str(folder), "--steps", "3", "--override", "steps"])
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    new = transcripts(folder)
    assert sorted(new) == ["held-out-000002.jsonl", "held-out-000003.jsonl", "notes.jsonl", *(f"step-{k:06d}.jsonl" for k in (1, 2, 3))]
    assert all(new[name] == old[name] for name in ("held-out-000002.jsonl", "step-000001.jsonl", "step-000002.jsonl"))


def test_a_resume_refuses_other_flags_by_name_unless_override_lists_them(here, policy):
    folder = run(policy, "run", steps=2)
    with pytest.raises(ValueError, match="--lr 0.0006, not 0.01.*--override lr") as error:
        train.main(["--resume", str(folder), "--lr", "0.01"])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="--steps 2, not 3"):
        train.main(["--resume", str(folder), "--lr", "0.01", "--steps", "3", "--override", "lr"])
    train.main(["--resume", str(folder), "--steps", "3", "--max-turns", "2", "--override", "steps"])      # an equal value is no change
    assert len(metrics(folder)) == 3
    train.main(["--resume", str(folder), "--steps", "4", "--override", "steps"])
    assert len(metrics(folder)) == 4 and json.loads((folder / "config.json").read_text())["steps"] == 4


@pytest.mark.parametrize("content", ["[]", "5", "null", "{", "{}", "[" * 200_000, *(
    f'{{"algo": "ppo", {wrong}}}' for wrong in ('"steps": "x"', '"lr": [1]', '"think": "yes"', '"lr": NaN'))])
def test_a_broken_config_of_a_run_is_one_line(here, content):
    (here / "runs" / "x").mkdir(parents=True)
    (here / "runs" / "x" / "config.json").write_text(content)
    with pytest.raises(ValueError) as error:
        train.main(["--resume", "runs/x"])
    assert "\n" not in str(error.value) and ("config.json" in str(error.value) or "--lr must be" in str(error.value))


def test_a_run_that_another_process_trains_is_left_alone(here, policy, monkeypatch):
    folder = run(policy, "run", steps=1)
    code = ("import sys, train\nlock = train.hold(train.Path('runs/run'))\nprint('held', flush=True)\nsys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code], cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="runs/run is being trained by another process"):
            train.main(["--resume", "runs/run", "--steps", "2", "--override", "steps"])
        other.stdin.close()
    monkeypatch.setattr("fcntl.lockf", lambda *args: (_ for _ in ()).throw(OSError(37, "No locks available")))       # a network file system
    train.main(["--resume", "runs/run", "--steps", "2", "--override", "steps"])
    assert [row["step"] for row in metrics(folder)] == [1, 2]


@pytest.mark.parametrize("name, content", [("state.pt", b"PK"), ("state.json", b"{"), ("state.json", None)])
def test_a_broken_checkpoint_is_named_with_the_way_on(here, policy, name, content):
    folder = run(policy, "run", steps=2)
    path = folder / "checkpoints" / "step-000002" / "trainer" / name
    path.write_bytes(content) if content else path.unlink()
    with pytest.raises(ValueError, match="step-000002: broken .*remove this folder to go on") as error:
        train.main(["--resume", "runs/run"])
    assert "\n" not in str(error.value)
    shutil.rmtree(path.parent.parent)
    train.main(["--resume", "runs/run"])
    assert [row["step"] for row in metrics(folder)] == [1, 2]


def test_the_newest_checkpoints_and_the_best_are_kept(here, policy, monkeypatch):
    scores = iter([10.0, 30.0, 20.0, 30.0, 5.0, 6.0])
    monkeypatch.setattr(train, "held_out_score", lambda *args: ({"eval_failed": 0, "eval_emotion": next(scores)}, []))
    folder = run(policy, "run", "--keep", "2", "--eval-scenarios", str(PROMPTS / "en" / "valid.jsonl"), steps=4)
    kept = lambda: sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())
    assert kept() == [3, 4]                                                  # of two equal scores the later is the best
    train.main(["--resume", str(folder), "--steps", "6", "--keep", "1", "--override", "steps,keep"])
    assert kept() == [4, 6] and [row["eval_emotion"] for row in metrics(folder)] == [10, 30, 20, 30, 5, 6]


def test_an_evaluation_while_training_changes_nothing_else_and_a_resume_equals_it(here, policy, monkeypatch):
    few = here / "few.jsonl"
    few.write_text("".join((PROMPTS / "en" / "valid.jsonl").read_text().splitlines(True)[:1]))
    plain, whole = run(policy, "plain", "--think", steps=3), run(policy, "whole", "--think", "--eval-scenarios", str(few), steps=3)
    rows = metrics(whole)
    assert all({"eval_failed", "eval_emotion", "eval_success", "eval_failure"} <= row.keys() for row in rows)
    for a, b in zip(metrics(plain), rows):
        assert {k: v for k, v in a.items() if k != "weight_version"} == {k: v for k, v in b.items() if k != "weight_version" and k[:5] != "eval_"}
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            run(policy, "halves", "--think", "--eval-scenarios", str(few), steps=3)
    train.main(["--resume", "runs/halves"])
    assert metrics(Path("runs/halves")) == rows


def test_a_full_disk_is_one_line_and_the_last_whole_checkpoint_goes_on(here, policy):
    """A child whose files may not grow beyond 300 kB: the log fits, the second checkpoint's optimizer does not."""
    whole = run(policy, "whole", steps=2)
    run(policy, "full", steps=1)
    code = ("import resource, sys, torch, train\ntorch.set_num_threads(1)\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
            "try: train.main(['--resume', 'runs/full', '--steps', '2', '--override', 'steps'])\n"
            "except ValueError as error: print('LINE', error); sys.exit(2)")
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)})
    line = next(line for line in done.stdout.splitlines() if line.startswith("LINE"))
    assert done.returncode == 2 and "could not be written" in line and "--resume runs/full" in line
    assert [path.name for path in Path("runs/full/checkpoints").iterdir()] == ["step-000001"]
    train.main(["--resume", "runs/full"])
    assert len(metrics(Path("runs/full"))) == 2 and len(metrics(whole)) == 2


def test_three_updates_without_a_number_stop_the_run_in_one_line_and_its_checkpoints_stay_good(here, policy, monkeypatch, capsys):
    whiten, steps = ppo.whiten, []
    monkeypatch.setattr(ppo, "whiten", lambda x: steps.append(x) or whiten(x) * (math.nan if len(steps) > 2 else 1))
    with pytest.raises(ValueError, match="three minibatches in a row.*--resume") as error:      # two of step 3, the first of step 4
        run(policy, "broken", steps=6)
    assert "\n" not in str(error.value) and "warning: advantages is nan in the dialogue of " in capsys.readouterr().err
    folder = Path("runs/broken")
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert equal(weights(folder, 3), weights(folder, 2))                     # the skipped minibatches moved nothing
    third = weights(folder, 3)
    assert all(w.isfinite().all() for w in third.values()) and len(metrics(folder)) == 3
    monkeypatch.setattr(ppo, "whiten", whiten)
    train.main(["--resume", str(folder)])
    assert len(metrics(folder)) == 6 and not equal(weights(folder, 6), third)


def test_a_tracker_that_is_not_installed_is_refused_and_one_that_is_gets_every_number(here, policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(train.sft, "cached_tiny", lambda *args: pytest.fail("a model was built first"))
    with pytest.raises(ValueError, match="pip install wandb"):
        train.main(["--tracker", "wandb"])
    assert list(here.iterdir()) == []
    logged = []
    fake = type(sys)("wandb")
    fake.init, fake.log = lambda **how: logged.append(how["name"]), lambda row, step: logged.append((step, row["emotion"]))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = run(policy, "run", "--tracker", "wandb", steps=2)
    assert logged == ["run"] + [(row["step"], row["emotion"]) for row in metrics(folder)]


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_differ(here, policy):
    first, again, other = (run(policy, name, "--think", "--seed", seed) for name, seed in (("a", "0"), ("b", "0"), ("c", "1")))
    assert metrics(first) == metrics(again) != metrics(other)
    assert transcripts(first) == transcripts(again) != transcripts(other)
    assert equal(weights(first, 2), weights(again, 2)) and not equal(weights(first, 2), weights(other, 2))


def test_the_micro_batch_size_changes_memory_and_not_the_run(here, policy):
    small, large = (run(policy, name, "--think", "--tokens-per-batch", size, steps=1) for name, size in (("a", "1"), ("b", "100000")))
    for a, b in zip(metrics(small), metrics(large)):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert transcripts(small) == transcripts(large)


def test_warm_up_of_the_critic_leaves_the_policy_alone(here, policy):
    folder = run(policy, "run", "--critic-warmup", "1")
    assert equal(weights(folder, 1), load_policy(policy)[0].state_dict()) and not equal(weights(folder, 1), weights(folder, 2))
    first = metrics(folder)[0]
    assert "v_loss" in first and "pg_loss" not in first and 0 <= first["mismatch"] <= first["mismatch_max"] < 1e-3 and first["mismatch_kl"] < 1e-6


@pytest.mark.parametrize("warmup", ["0", "1"])
def test_an_engine_of_other_weights_stops_the_run_before_policy_or_critic_is_touched(here, policy, monkeypatch, warmup):
    estimate, critics = ppo.estimate, []
    monkeypatch.setattr(ppo, "estimate", lambda critic, *args: (critics.append((critic, copy.deepcopy(critic.state_dict()))), estimate(critic, *args))[1])
    monkeypatch.setattr(rollout.HFEngine, "_sample", lambda self, logits, uniform, sample=rollout.HFEngine._sample: sample(self, 3 * logits, uniform))
    with pytest.raises(ValueError, match="--max-mismatch 0.01.*no update was made"):
        run(policy, "run", "--critic-warmup", warmup, "--max-mismatch", "0.01")
    critic, before = critics[0]
    assert equal(critic.state_dict(), before) and not (Path("runs/run") / "metrics.jsonl").exists()


def test_a_run_folder_that_vanishes_ends_the_run_with_one_line(here, policy, monkeypatch, capsys):
    sync = rollout.HFEngine.sync
    monkeypatch.setattr(rollout.HFEngine, "sync", lambda self, *args: (sync(self, *args), shutil.rmtree("runs/run", ignore_errors=True)))
    code, err = command_line(monkeypatch, capsys, *flags(policy, "run", steps=2))
    assert code == 2 and "runs/run" in err and "Traceback" not in err and err.count("train.py: error") == 1


def failing_users(monkeypatch, fails):
    """Scripted users that fail at their second reply when `fails(number)`; users are numbered as they first hear something."""
    hear, numbers = simulator.ScriptedSimulator.hear, {}

    def failing(self, reply):
        number = numbers.setdefault(id(self), len(numbers))
        users.append(self)                                                   # kept alive: an id is never used twice
        if self.replies and fails(number):
            raise SimulatorFailed("429 for ever")
        return hear(self, reply)
    users = []
    monkeypatch.setattr(simulator.ScriptedSimulator, "hear", failing)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_user_that_fails_is_left_out_counted_and_kept_in_the_transcript(here, policy, monkeypatch, algo):
    failing_users(monkeypatch, lambda number: number == 2)
    folder = run(policy, "run", "--algo", algo, "--dialogues-per-step", "8", "--group-size", "4", steps=1)
    row, = metrics(folder)
    lines = [json.loads(line) for line in transcripts(folder)["step-000001.jsonl"].splitlines()]
    lost = [line for line in lines if line["end_reason"] == "simulator_failed"]
    assert (row["dialogues"], row["failed"], len(lines), len(lost)) == (7, 1, 8, 1)
    assert lost[0]["reward"] is None and "429 for ever" in lost[0]["error"] and None not in [x["reward"] for x in lines if x not in lost]
    assert row["emotion"] == pytest.approx(sum(line["final_emotion"] for line in lines if line not in lost) / 7)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_step_in_which_every_user_fails_says_so_or_is_skipped(here, policy, monkeypatch, algo):
    failing_users(monkeypatch, lambda number: True)
    try:
        run(policy, "run", "--algo", algo, steps=1)
    except (ValueError, OSError) as error:                                   # what train.py turns into one line and exit code 2
        assert "\n" not in str(error) and ("simulator" in str(error) or "failed" in str(error))
    else:
        row, = metrics(Path("runs/run"))
        assert row["dialogues"] == 0 and row["failed"] == 4
        assert equal(weights(Path("runs/run"), 1), load_policy(policy)[0].state_dict())


def test_the_embedded_policy_is_used_when_no_model_is_given(here, policy, monkeypatch):
    asked = []
    monkeypatch.setattr(train.sft, "cached_tiny", lambda think, *args: asked.append(think) or policy)
    more = flags(policy, "run", steps=1)[4:]
    train.main([*more, "--think"])
    assert asked == [True] and metrics(Path("runs/run"))[0]["dialogues"] == 4


def test_a_run_has_a_name_of_its_algorithm_mode_and_seed(here, policy):
    argv = flags(policy, "", "--algo", "grpo", "--think", "--seed", "5", steps=1)
    train.main(argv)
    assert [path.name for path in Path("runs").iterdir()] == ["grpo-think-5"]


# ---- parts of the loop -------------------------------------------------------------------------------------------------------

def rates(steps, **args):
    """(policy, critic) learning rates of each step, and what set_learning_rates returns."""
    args = argparse.Namespace(**{"lr": 8.0, "critic_lr": 3.0, "warmup_steps": 1, "critic_lr_warmup": 0, "lr_end": 1.0, "steps": steps} | args)
    optimizers = {name: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=99.0) for name in ("policy", "critic")}
    found = []
    for step in range(steps):
        returned = train.set_learning_rates(optimizers, args, step)
        policy, critic = (optimizers[name].param_groups[0]["lr"] for name in ("policy", "critic"))
        assert returned == policy
        found.append((policy, critic))
    return found


def test_the_learning_rate_warms_up_from_the_first_step_and_then_stays():
    assert [policy for policy, _ in rates(6, warmup_steps=4)] == pytest.approx([2, 4, 6, 8, 8, 8])
    assert [policy for policy, _ in rates(3, warmup_steps=0)] == pytest.approx([8, 8, 8])
    paper = rates(30, lr=1e-6, warmup_steps=20)
    assert paper[0][0] == pytest.approx(5e-8) and paper[19][0] == paper[29][0] == pytest.approx(1e-6)


def test_the_learning_rate_falls_in_a_line_to_its_share_at_the_last_step():
    assert [policy for policy, _ in rates(5, lr_end=0.5)] == pytest.approx([8, 7, 6, 5, 4])
    assert [policy for policy, _ in rates(3, lr_end=0.0)] == pytest.approx([8, 4, 0])
    both = [policy for policy, _ in rates(40, warmup_steps=4, lr_end=0.4)]
    assert both[0] == pytest.approx(2) and both[-1] == pytest.approx(3.2) and all(a > b for a, b in zip(both[4:], both[5:]))
    assert rates(1, lr_end=0.4, warmup_steps=4)[0][0] == pytest.approx(2)    # a run of one step


def test_the_critics_learning_rate_has_its_own_warm_up_and_is_then_constant():
    assert [critic for _, critic in rates(5, warmup_steps=3, lr_end=0.1)] == [3.0] * 5
    assert [critic for _, critic in rates(5, critic_lr_warmup=3, lr_end=0.1)] == pytest.approx([1, 2, 3, 3, 3])


def settings_of(**changed):
    return argparse.Namespace(**{"algo": "ppo", "group_size": 4, "dialogues_per_step": 8, "think": True, "seed": 0, "start_emotion": 30,
                                 "max_turns": 8} | changed)


@calm
@given(st.integers(1, 12), st.integers(1, 10), st.integers(2, 5), st.sampled_from(["ppo", "grpo"]), st.integers(0, 3))
def test_every_scenario_is_used_once_an_epoch_and_groups_share_one_scenario(n, groups, group_size, algo, seed):
    people = [Scenario(f"s{i}", "e", "", "", "", (), "praise") for i in range(n)]
    size = group_size if algo == "grpo" else 1
    args, sampler, drawn = settings_of(algo=algo, group_size=group_size, dialogues_per_step=groups * size, seed=seed), train.Sampler(people, seed), []
    seeds = []
    for step in range(4):
        dialogues = sampler.next(args, step)
        assert len(dialogues) == groups * size
        members = {group: [d for d in dialogues if d.group == group] for group in {d.group for d in dialogues}}
        assert len(members) == groups
        for own in members.values():
            assert len(own) == size and len({d.scenario.id for d in own}) == 1 and len({d.repetition for d in own}) == size
        drawn += [d.scenario.id for d in dialogues[::size]]
        seeds += [d.seed for d in dialogues]
        assert all((d.think, d.start_emotion, d.max_turns, d.turns, d.end_reason) == (True, 30, 8, [], None) for d in dialogues)
    assert len(set(seeds)) == len(seeds)
    for at in range(0, len(drawn) - n + 1, n):
        assert sorted(drawn[at:at + n]) == sorted(s.id for s in people)
    assert max(Counter(drawn).values()) - min(Counter({s.id: 0 for s in people} | Counter(drawn)).values()) <= 1


def test_the_samplers_order_differs_by_epoch_and_by_seed_and_is_restored_from_its_state():
    people = [Scenario(f"s{i}", "e", "", "", "", (), "praise") for i in range(20)]
    args = settings_of(dialogues_per_step=20)
    names = lambda sampler, step=0: [d.scenario.id for d in sampler.next(args, step)]
    one, other = train.Sampler(people, 0), train.Sampler(people, 1)
    assert names(one) != names(one, 1) and names(train.Sampler(people, 0)) != names(other)
    args.dialogues_per_step = 7
    names(one)
    state, rest = json.loads(json.dumps(one.state())), [names(one, step) for step in range(5)]
    fresh = train.Sampler(people, 99)
    fresh.restore(state)
    assert [names(fresh, step) for step in range(5)] == rest


def test_the_members_of_a_group_meet_the_same_user_with_the_same_opening(here, policy):
    folder = run(policy, "run", "--algo", "grpo", "--dialogues-per-step", "8", "--group-size", "4", steps=1)
    lines = [json.loads(line) for line in transcripts(folder)["step-000001.jsonl"].splitlines()]
    openings = Counter((line["scenario"], line["opening"]) for line in lines)
    assert sorted(openings.values()) == [4, 4]
    assert len({line["turns"][0]["reply"] for line in lines}) == 8           # and yet each member says something of its own


def played(emotions, replies, format_ok=True, finish="stop", end_reason="max_turns"):
    turns = [Turn(1, [1] * 5, [-1.0] * 5, finish, None, reply, format_ok, Reaction(0, emotion, "", "", None, flags=["right"]))
             for emotion, reply in zip(emotions, replies)]
    return Dialogue(PERSON, True, 0, turns=turns, end_reason=end_reason)


def test_the_outcome_of_a_step_by_hand():
    dialogues = [played([50, 100], ["a", "b"], end_reason="satisfied"), played([5], ["a"], format_ok=False, end_reason="gave_up"),
                 played([40, 45, 60], ["a", "a", "a"], finish="length"), played([90], ["a"], end_reason="simulator_failed")]
    found = train.outcome(dialogues)
    assert (found["dialogues"], found["failed"]) == (3, 1)
    assert found["emotion"] == pytest.approx((100 + 5 + 60) / 3)
    assert found["success"] == pytest.approx(100 / 3) and found["failure"] == pytest.approx(100 / 3)
    assert found["reward_raw"] == pytest.approx((1.0 * 2 + 0.05 + 0.6 * 3) / 6) and found["reward_gated"] == pytest.approx((1.0 * 2 + 0.6 * 3) / 6)
    assert found["turns"] == pytest.approx(2) and found["response_len"] == pytest.approx(5)
    assert found["format_rate"] == pytest.approx(100 * 5 / 6) and found["truncated"] == pytest.approx(50)
    assert found["repeat_rate"] == pytest.approx(100 * 2 / 6) and found["flag_right"] == pytest.approx(100)
    assert all(math.isfinite(value) for value in train.outcome([]).values())


def test_the_logged_rewards_are_those_that_are_trained():
    dialogues = [played([50, 100], ["a", "b"], end_reason="satisfied"), played([5], ["a"], format_ok=False, end_reason="gave_up"),
                 played([90], ["a"], end_reason="simulator_failed")]
    logged = lambda *how: [train.outcome(dialogues, *how)[name] for name in ("reward_raw", "reward_gated")]
    assert logged(True, "final") == pytest.approx([(1 + 1 + 0.05) / 3, (1 + 1 + 0) / 3])
    assert logged(False, "final") == pytest.approx([(1 + 1 + 0.05) / 3] * 2)                 # --no-format-reward: nothing is gated
    assert logged(True, "delta") == pytest.approx([(0.5 + 0.5 + 0.05) / 3, (0.5 + 0.5 + 0) / 3])
    for how in itertools.product((True, False), ("final", "delta")):
        assert logged(*how)[1] == pytest.approx(ppo.make_batch(dialogues, *how).turn_rewards.mean().item())


@pytest.mark.parametrize("more", [("--reward", "delta"), ("--no-format-reward",)])
def test_a_run_logs_the_rewards_that_its_flags_train(here, policy, monkeypatch, more):
    batches, make = [], ppo.make_batch
    monkeypatch.setattr(ppo, "make_batch", lambda *args: batches.append(make(*args)) or batches[-1])
    row, = metrics(run(policy, "run", "--think", *more, steps=1))
    assert row["reward_gated"] == pytest.approx(batches[0].turn_rewards.mean().item())
    assert (row["reward_gated"] < row["reward_raw"]) == ("delta" in more)                    # a random model never keeps the format


def test_a_run_that_cannot_learn_says_which_setting_to_change(capsys):
    args = settings_of(max_new_tokens=64)
    train.warn({"truncated": 51.0}, args)
    assert "--max-new-tokens" in capsys.readouterr().err
    train.warn({"truncated": 0.0, "frac_zero_std_groups": 0.95}, args)
    assert "--group-size" in capsys.readouterr().err
    train.warn({"truncated": 50.0, "frac_zero_std_groups": 0.9}, args)
    assert capsys.readouterr().err == ""


def test_the_default_scenarios_are_the_training_split():
    assert Path(train.parse_args([]).scenarios) == PROMPTS / "en" / "train.jsonl"


def test_no_reward_is_trained_for_a_dialogue_that_is_not_in_the_batch():
    batch = ppo.make_batch([played([50], ["a"]), played([90], ["a"], end_reason="simulator_failed")])
    assert batch.turn_rewards.tolist() == [0.5] and len(batch.old_logprobs) == 5


# ---- LoRA ------------------------------------------------------------------------------------------------------------------

def lora_logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_lora_trains_adapters_only_and_its_checkpoint_is_both_adapter_and_merged_model(here, policy, monkeypatch, algo):
    peft = pytest.importorskip("peft")
    engines, sync = [], rollout.HFEngine.sync
    monkeypatch.setattr(rollout.HFEngine, "sync", lambda self, *args: (engines.append(self), sync(self, *args))[1])
    how = ("--algo", algo, "--lora-rank", "4", "--lr", "0.01", "--critic-warmup", "0", "--think", "--no-format-reward")
    whole = run(policy, "whole", *how, steps=3)
    trained, base, folder = lora_logits(engines[-1].model), load_policy(policy)[0], whole / "checkpoints" / "step-000003"
    assert not torch.allclose(trained, lora_logits(base), atol=1e-3)
    torch.testing.assert_close(lora_logits(load_policy(folder)[0]), trained, atol=1e-5, rtol=1e-5)       # the merged model
    torch.testing.assert_close(lora_logits(peft.PeftModel.from_pretrained(base, folder / "adapter")), trained, atol=1e-5, rtol=1e-5)
    for name, weight in engines[-1].model.named_parameters():
        assert weight.requires_grad == (".lora_" in name)
        if "layernorm" in name:
            assert torch.equal(weight, load_policy(policy)[0].get_parameter(name))
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run(policy, "halves", *how, steps=3)
    train.main(["--resume", "runs/halves"])
    assert metrics(whole) == metrics(Path("runs/halves")) and equal(weights(whole, 3), weights(Path("runs/halves"), 3))


def test_lora_without_peft_is_one_line(here, policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        run(policy, "none", "--lora-rank", "4", steps=1)


# ---- many processes --------------------------------------------------------------------------------------------------------

def torchrun(here, *runs, more=""):
    """Two ranks on gloo play these command lines one after another. Returns the finished process."""
    script = here / "ranks.py"
    script.write_text(f"""import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
import torch, simulator, test_train, train
torch.set_num_threads(1)
simulator.ScriptedSimulator.hear = test_train.generous
{more}
for argv in {list(map(list, runs))!r}:
    train.main(argv)
train.leave_ranks()
""")
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
                          cwd=here, capture_output=True, text=True, timeout=900)


def close(one, two, steps):
    """Whether two runs had equal dialogues, and equal metrics and weights up to the order of summation."""
    assert [sorted(text) for text in transcripts(one).values()] == [sorted(text) for text in transcripts(two).values()]
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=2e-6)
    first, second = weights(one, steps), weights(two, steps)
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-5, atol=1e-5)


def test_two_ranks_give_the_update_of_one_rank_and_either_resumes_the_other(here, policy):
    ppo_think = ("--think", "--no-format-reward", "--kl-coef", "0.1", "--critic-warmup", "0", "--max-grad-norm", "0.05", "--lr", "1e-4")
    grpo_plain = ("--algo", "grpo", "--no-think", "--group-size", "2", "--no-format-reward", "--lr", "1e-4")
    uneven = (*ppo_think, "--dialogues-per-step", "1", "--minibatches", "1", "--critic-values", "token")         # the second rank has none
    how = {"ppo": ppo_think, "grpo": grpo_plain, "uneven": uneven}
    for name, more in how.items():
        run(policy, f"{name}-one", *more, steps=2)
    run(policy, "mixed", *ppo_think, steps=1)                                # one rank, then two, then one
    done = torchrun(here, *(flags(policy, f"{name}-two", *more, steps=2) for name, more in how.items()),
                    ["--resume", "runs/mixed", "--steps", "2", "--override", "steps"])
    assert done.returncode == 0, done.stderr
    for name in how:
        close(Path(f"runs/{name}-one"), Path(f"runs/{name}-two"), 2)
    assert metrics(Path("runs/mixed"))[1] == pytest.approx(metrics(Path("runs/ppo-one"))[1] | {"lr": metrics(Path("runs/mixed"))[1]["lr"]}, rel=1e-4, abs=1e-5)
    train.main(["--resume", "runs/mixed", "--steps", "3", "--override", "steps"])
    assert [row["weight_version"] for row in metrics(Path("runs/mixed"))] == [1, 2, 3]


def test_the_error_of_one_rank_stops_all_with_its_message(here, policy):
    broken = """
import os
def hear(self, reply):
    raise ValueError("the user of this rank broke")
if os.environ["RANK"] == "1":
    simulator.ScriptedSimulator.hear = hear
"""
    done = torchrun(here, flags(policy, "broken", steps=2), more=broken)
    assert done.returncode != 0 and "the user of this rank broke" in done.stderr
