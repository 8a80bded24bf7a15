"""sft.py: the tokenizer of the embedded world, the weights of its demonstrations, its loss by hand, its build from a seed."""
import random
import re

import pytest
import torch

import rollout
import sft
from rollout import ChatTokens, load_policy, row_of, split_thought, system_prompt
from simulator import INTENTIONS, PROMPTS, STANCE, load_scenarios, nouns

TRAIN = PROMPTS / "en" / "train.jsonl"
HELD_OUT = ("valid", "test")


@pytest.fixture(scope="session")
def training():
    return load_scenarios(TRAIN)


def demonstrations(chat, scenarios, think, n=6, turns=3, seed=0):
    rng = random.Random(seed)
    return [sft.demonstrate(chat, scenarios[i * 5 % len(scenarios)], think, rng, turns, 0.3, 0.9) for i in range(n)]


# ---- the tokenizer -----------------------------------------------------------------------------------------------------

def test_every_common_noun_is_one_token(chat):
    words = (PROMPTS / "en" / "words.txt").read_text().split()
    assert len(words) > 100
    assert [word for word in words if len(chat.encode(" " + word)) != 1] == []
    assert [word for word in words if chat.encode(f"My {word}.")[-2:] != chat.encode(" " + word) + chat.encode(".")] == []


def test_every_need_and_plan_is_one_token(chat):
    assert [word for pair in sft.PLANS.items() for word in pair if len(chat.encode(" " + word)) != 1] == []
    assert set(sft.PLANS) == set(INTENTIONS) and len(set(sft.PLANS.values())) == len(INTENTIONS)


def test_think_tags_are_one_visible_token_each_and_control_tokens_are_hidden(chat):
    ids = chat.encode("<think>a</think>b<|im_end|>")
    assert len(ids) == 5 and chat.decode(ids) == "<think>a</think>b" and chat.end_ids == [ids[-1]]


@pytest.mark.parametrize("text", ["I hear you.", "我很难过。", " two  spaces\n\nand a line", "é œ 🙂", "don’t", "\t"])
def test_any_text_survives_encoding_and_decoding(chat, text):
    assert chat.decode(chat.encode(text)) == text


def test_the_training_corpus_holds_no_sentence_of_the_held_out_scenarios(training):
    corpus = sft.corpus_texts(training)
    assert any(training[0].script["details"][0][1] in text for text in corpus)                    # the check can fail
    for split in HELD_OUT:
        held_out = load_scenarios(PROMPTS / "en" / f"{split}.jsonl")
        assert not {s.event for s in held_out} & {s.event for s in training}
        sentences = {sentence for s in held_out for _, telling in s.script["details"] for sentence in re.split(r"(?<=[.!?])\s+", telling)}
        sentences |= {s.first_message for s in held_out if s.first_message} | {s.background for s in held_out}
        assert len(sentences) > 20 and not [(sentence, text) for sentence in sentences for text in corpus if sentence in text]


# ---- demonstrations ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("think", [False, True])
def test_a_demonstration_is_a_well_formed_dialogue_in_the_tokens_of_a_rollout(chat, training, think):
    for dialogue, heavy in demonstrations(chat, training, think):
        assert len(dialogue.turns) == len(heavy) == 3
        texts = [dialogue.opening]
        trunk = chat.first(system_prompt(think), dialogue.opening)
        for turn in dialogue.turns:
            assert dialogue.trunk[:turn.prompt_len] == trunk[:turn.prompt_len] and turn.prompt_len == len(trunk)
            assert turn.ids[-1] == chat.end_ids[-1] and len(turn.logprobs) == len(turn.ids)
            assert split_thought(chat.decode(turn.ids), think) == (turn.thought, turn.reply, True)
            following = dialogue.trunk[len(trunk):]
            if turn is not dialogue.turns[-1]:
                message = chat.decode(following).split("assistant")[0].split("user\n")[-1].strip()
                texts += [turn.reply, message]
                trunk = trunk + chat.after(system_prompt(think), texts, None if think else turn.ids)
        assert dialogue.trunk == trunk


def test_the_demonstrated_thought_names_the_hints_heard_the_need_and_the_plan():
    from simulator import lines
    focus, line = lines("user")["hints"]["own"][0]
    stance, other = lines("user")["hints"][STANCE["reflection"]][0]
    assert sft.thought_of([f"Hello. {line}", f"Well. {other}"], "reflection", "advice") == (
        f"I hear {focus} and {stance}. They need reflection. I will {sft.PLANS['advice']}.")
    assert sft.thought_of(["Hello."], "praise", "praise") == f"I hear nothing and nothing. They need praise. I will {sft.PLANS['praise']}."


def test_demonstrations_of_one_seed_are_equal_and_of_two_seeds_differ(chat, training):
    rows = [[row_of(d) for d, _ in demonstrations(chat, training, True, seed=seed)] for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_a_synthetic_scenario_names_only_common_nouns_and_each_once():
    scenario = sft.synthetic_scenario(random.Random(0), "praise")
    words = [word for word, _ in scenario.script["details"]]
    assert set(words) <= nouns() and len(set(words)) == len(words) == 9
    assert all(word in sentence for word, sentence in scenario.script["details"]) and scenario.intention == "praise"


# ---- weights -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("think", [False, True])
def test_agent_tokens_weigh_one_and_slots_more(chat, training, think):
    for dialogue, heavy in demonstrations(chat, training, think):
        action, weights = row_of(dialogue)[3], sft.weights_of(chat, dialogue, heavy, 0.1)
        expected = [slots.get(token, 1.0) for turn, slots in zip(dialogue.turns, heavy) for token in turn.ids]
        assert len(weights) == len(action) and [w for w, acted in zip(weights, action) if acted] == expected
        assert 2.0 in expected
        plain = sft.weights_of(chat, dialogue, None, 0.0)                # without slots and user words: the agent's tokens
        assert plain == [float(acted) for acted in action]


@pytest.mark.parametrize("think", [False, True])
def test_the_system_prompt_weighs_nothing(chat, training, think):
    dialogue, heavy = demonstrations(chat, training, think, n=1)[0]
    system = chat.encode(f"<|im_start|>system\n{system_prompt(think)}<|im_end|>\n")
    assert row_of(dialogue)[0][:len(system)] == system
    assert sft.weights_of(chat, dialogue, heavy, 0.1)[:len(system)] == [0.0] * len(system)


def test_the_trunks_copy_of_a_thoughtful_reply_weighs_nothing(chat, training):
    for dialogue, heavy in demonstrations(chat, training, True):
        ids, _, branch, _ = row_of(dialogue)
        weights = sft.weights_of(chat, dialogue, heavy, 0.1)
        trunk = [i for i, part in enumerate(branch) if part == 0]
        assert [ids[i] for i in trunk] == dialogue.trunk[:len(trunk)]
        for turn in dialogue.turns[:-1]:
            copy = chat.encode(turn.reply + "<|im_end|>\n")
            span = trunk[turn.prompt_len:turn.prompt_len + len(copy)]
            assert [ids[i] for i in span] == copy and [weights[i] for i in span] == [0.0] * len(copy)


@pytest.mark.parametrize("think", [False, True])
def test_the_users_words_weigh_what_they_are_told_to(chat, training, think):
    dialogue, heavy = demonstrations(chat, training, think, n=1)[0]
    ids, _, branch, _ = row_of(dialogue)
    weights = sft.weights_of(chat, dialogue, heavy, 0.25)
    opening = chat.encode(dialogue.opening)
    at = len(chat.encode(f"<|im_start|>system\n{system_prompt(think)}<|im_end|>\n<|im_start|>user\n"))
    assert ids[at:at + len(opening)] == opening and weights[at:at + len(opening)] == [0.25] * len(opening)


def test_a_habitual_tutor_practises_all_acts_evenly_and_weighs_its_plans_by_their_chance():
    chances = sft.plan_chances("support", 0.9)
    assert chances["advice"] == pytest.approx(0.45 + 0.45 / 8) and chances["support"] == pytest.approx(0.1 + 0.45 / 8)
    assert chances["praise"] == pytest.approx(0.45 / 8) and sum(chances.values()) == pytest.approx(1)


# ---- the loss ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("think", [False, True])
def test_the_loss_equals_that_of_every_turn_in_its_own_context(model, chat, training, think):
    batch = demonstrations(chat, training, think, n=3)
    weights = [sft.weights_of(chat, d, heavy, 0.0) for d, heavy in batch]
    loss, nll, w = sft.sft_loss(model, [d for d, _ in batch], weights)
    total = share = 0.0
    with torch.no_grad():
        for dialogue, heavy in batch:
            for turn, slots in zip(dialogue.turns, heavy):
                logits = model(torch.tensor([dialogue.trunk[:turn.prompt_len] + turn.ids])).logits[0, turn.prompt_len - 1:-1]
                for row, token in zip(logits, turn.ids):
                    weight = slots.get(token, 1.0)
                    total, share = total - weight * row.log_softmax(-1)[token].item(), share + weight
    assert loss.item() == pytest.approx(total / share, rel=1e-4)
    assert len(nll) == len(w) == sum(len(turn.ids) for d, _ in batch for turn in d.turns)


def test_more_padding_does_not_change_the_loss(model, chat, training):
    short, long = demonstrations(chat, training, True, n=1, turns=1)[0], demonstrations(chat, training, True, n=1, turns=3, seed=1)[0]
    weights = [sft.weights_of(chat, d, heavy, 0.1) for d, heavy in (short, long)]
    alone = [sft.sft_loss(model, [d], [w])[0].item() for (d, _), w in zip((short, long), weights)]
    together = sft.sft_loss(model, [short[0], long[0]], weights)[0].item()
    sizes = [sum(w[1:]) for w in weights]
    assert together == pytest.approx((alone[0] * sizes[0] + alone[1] * sizes[1]) / sum(sizes), rel=1e-5)


@pytest.mark.parametrize("think", [False, True])
def test_the_loss_goes_down_in_a_few_steps(model, chat, training, think):
    batch = demonstrations(chat, training, think, n=4, turns=2)
    weights = [sft.weights_of(chat, d, heavy, 0.1) for d, heavy in batch]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(12):
        loss = sft.sft_loss(model, [d for d, _ in batch], weights)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# ---- building ------------------------------------------------------------------------------------------------------------

@pytest.fixture
def small(monkeypatch):
    """build_tiny with a narrow model; the list of events it learns from is filled in while it runs."""
    build_model, demonstrate, events = sft.build_model, sft.demonstrate, []
    monkeypatch.setattr(sft, "build_model", lambda tokenizer: build_model(tokenizer, hidden=16, layers=1))
    monkeypatch.setattr(sft, "demonstrate", lambda chat, scenario, *args: events.append(scenario.event) or demonstrate(chat, scenario, *args))
    return events


def test_building_twice_with_one_seed_gives_equal_weights(tmp_path, small, training, chat):
    folders = [sft.build_tiny(True, tmp_path / name, seed=seed, steps=(1, 1)) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    (first, tokenizer), (again, _), (other, _) = [load_policy(folder) for folder in folders]
    weights = [policy.state_dict() for policy in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]                    # no half-written folder stays
    assert ChatTokens(tokenizer).first("s", "I am here.") == chat.first("s", "I am here.")        # the template is saved too
    assert set(small) - {"synthetic"} <= {s.event for s in training} and len(set(small)) > 1      # it learns from no held-out event


def test_the_embedded_policy_is_built_once_per_mode(tmp_path, monkeypatch):
    built = []

    def build(think, out, **kwargs):
        built.append(think)
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
    monkeypatch.setattr(sft, "build_tiny", build)
    folders = [sft.cached_tiny(think, tmp_path) for think in (True, True, False, False)]
    assert built == [True, False] and folders[0] == folders[1] != folders[2] == folders[3]


def test_a_fresh_model_is_small_tied_and_ends_its_turn_with_the_chat_templates_token(tokenizer):
    torch.manual_seed(0)
    model = sft.build_model(tokenizer)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 3e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert rollout.HFEngine(model, [2], 8).max_context >= 2048


# ---- any model, from transcripts -------------------------------------------------------------------------------------------

def transcripts_of(path, chat, scenarios, think):
    """Two scripted tutors' dialogues as evaluate.py saves them: one that ended well, one that did not."""
    import json
    import random
    rows = []
    for scenario, final in zip(scenarios[:2], (90, 20)):
        dialogue, _ = sft.demonstrate(chat, scenario, think, random.Random(1), 3, 0.0, 1.0)
        turns = [{"thought": t.thought, "reply": t.reply, "format_ok": True, "user": f"And then, {k}?"} for k, t in enumerate(dialogue.turns)]
        rows.append({"opening": dialogue.opening, "final_emotion": final, "end_reason": "max_turns", "turns": turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("think", [True, False])
def test_only_dialogues_that_ended_well_are_imitated(tmp_path, chat, scenarios, think):
    path = transcripts_of(tmp_path / "t.jsonl", chat, scenarios, think)
    assert [len(sft.read_demonstrations(path, chat, bound, think)) for bound in (20, 21, 90)] == [2, 1, 1]
    with pytest.raises(ValueError, match="lower --min-emotion"):
        sft.read_demonstrations(path, chat, 91, think)
    dialogue = sft.read_demonstrations(path, chat, 90, think)[0]
    assert all(turn.ids[-1] == chat.end_ids[-1] and turn.ids.count(chat.end_ids[-1]) == 1 for turn in dialogue.turns)


def test_a_broken_transcript_line_is_named(tmp_path, chat):
    (tmp_path / "t.jsonl").write_text('{"opening": "x"}\n')
    with pytest.raises(ValueError, match="t.jsonl:1"):
        sft.read_demonstrations(tmp_path / "t.jsonl", chat, 0, True)


def test_a_warm_start_from_transcripts_makes_them_likelier_and_can_be_loaded(tmp_path, model, tokenizer, chat, scenarios):
    path = transcripts_of(tmp_path / "t.jsonl", chat, scenarios, True)
    model.save_pretrained(tmp_path / "m"), tokenizer.save_pretrained(tmp_path / "m")
    batch = sft.read_demonstrations(path, chat, 70, True)
    weights = [sft.weights_of(chat, d, None, 0.0) for d in batch]
    before = sft.sft_loss(model, batch, weights)[0].item()
    sft.main(["--model", str(tmp_path / "m"), "--data", str(path), "--think", "--out", str(tmp_path / "out"), "--lr", "0.01", "--epochs", "4"])
    trained, _ = sft.load_policy(tmp_path / "out")
    assert sft.sft_loss(trained, batch, weights)[0].item() < before - 0.5


def test_model_and_data_go_together():
    with pytest.raises(ValueError, match="go together"):
        sft.parse_args(["--model", "x"])
