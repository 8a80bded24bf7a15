"""grpo.py: group statistics by hand, per dialogue and per group; equal and malformed groups; and that it truly learns.

The fakes (`made`, `play`, `learn`, `settings`) are those of test_ppo.py.
"""
import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ppo import byte_chat, finite, fixed, gain, learn, made, play, settings, weights  # noqa: F401

import grpo
import ppo

points = st.integers(0, 100)
# a group: each dialogue's final emotion and, per turn, whether the format held
groups_of_dialogues = st.lists(st.tuples(points, st.lists(st.booleans(), min_size=1, max_size=8)), min_size=2, max_size=4)


def advantages_of(rewards, groups=None, std=True):
    """rewards: a list of turn rewards a dialogue. Returns the advantages in the same shape, and the share of equal groups."""
    flat = torch.tensor([r for dialogue in rewards for r in dialogue])
    advantages, equal = grpo.group_advantages(flat, [len(d) for d in rewards], groups or [0] * len(rewards), std)
    assert advantages.shape == flat.shape
    parts = advantages.split([len(d) for d in rewards])
    return [part.tolist() for part in parts], equal


# ---- group statistics ------------------------------------------------------------------------------------------------------

def test_each_group_is_compared_with_its_own_mean_and_its_advantages_sum_to_0():
    # means .2 and .8, both with n-1 standard deviation .1 * sqrt 2; in the batch as a whole .3 would be below average
    advantages, equal = advantages_of([[0.1], [0.3], [0.7], [0.9]], [0, 0, 1, 1])
    assert [a for a, in advantages] == pytest.approx([-0.70710, 0.70710, -0.70710, 0.70710], abs=1e-4) and equal == 0


def test_groups_are_found_by_their_number_and_not_by_their_place():
    apart, _ = advantages_of([[0.1], [0.3], [0.7], [0.9]], [5, 5, 2, 2])
    mixed, _ = advantages_of([[0.7], [0.1], [0.9], [0.3]], [2, 5, 2, 5])
    assert mixed == [apart[2], apart[0], apart[3], apart[1]]


def test_the_standard_deviation_divides_by_n_minus_1():
    advantages, _ = advantages_of([[0.2], [0.4], [0.9]])          # mean .5, variance (.09 + .01 + .16) / 2 = .13
    assert [a for a, in advantages] == pytest.approx([-0.3 / 0.13 ** 0.5, -0.1 / 0.13 ** 0.5, 0.4 / 0.13 ** 0.5], rel=1e-4)


@fixed
@given(st.lists(st.lists(st.tuples(points, st.integers(1, 9)), min_size=1, max_size=5), min_size=1, max_size=4))
def test_without_malformed_turns_every_advantage_is_the_z_score_of_its_dialogue_however_long_the_dialogues_are(groups):
    rewards = [[emotion / 100] * turns for group in groups for emotion, turns in group]
    advantages, _ = advantages_of(rewards, [g for g, group in enumerate(groups) for _ in group])
    expected = []
    for group in groups:
        scores = [emotion / 100 for emotion, _ in group]
        std = statistics.stdev(scores) if len(set(scores)) > 1 else math.inf
        expected += [(score - statistics.mean(scores)) / std for score in scores]
    for ours, theirs, dialogue in zip(advantages, expected, rewards):
        assert ours == pytest.approx([theirs] * len(dialogue), rel=1e-3, abs=1e-3)


def test_long_dialogues_weigh_no_more_than_short_ones():
    # over turns the mean would be .82; over dialogues it is .5
    assert advantages_of([[0.9] * 9, [0.1]], std=False)[0] == [pytest.approx([0.4] * 9), pytest.approx([-0.4])]
    long, short = advantages_of([[0.9] * 9, [0.1]])[0]
    assert long[0] == pytest.approx(-short[0]) and len(set(long)) == 1


def test_without_std_an_advantage_is_exactly_reward_minus_mean():
    # a malformed turn: the dialogue's score is (.75 + 0) / 2 = .375, the group's mean (.375 + .125) / 2 = .25
    assert advantages_of([[0.75, 0.0], [0.125]], std=False)[0] == [[0.5, -0.25], [-0.125]]


@fixed
@given(groups_of_dialogues)
def test_without_std_the_dialogues_mean_advantages_sum_to_0_in_every_group(group):
    rewards = [[emotion / 100 * held for held in turns] for emotion, turns in group]
    advantages, _ = advantages_of(rewards, std=False)
    assert sum(statistics.mean(a) for a in advantages) == pytest.approx(0, abs=1e-6)
    mean = statistics.mean(statistics.mean(r) for r in rewards)
    assert sum(advantages, []) == pytest.approx([r - mean for dialogue in rewards for r in dialogue], abs=1e-6)


def test_a_malformed_turn_is_pushed_down_even_in_the_best_dialogue():
    best, worst = advantages_of([[0.8, 0.0, 0.8], [0.3, 0.3]])[0]
    assert best[1] < worst[0] < 0 < best[0] == best[2]


# ---- groups that teach nothing ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("std", [True, False])
def test_a_lone_survivor_has_nothing_to_be_compared_with(std):
    advantages, equal = advantages_of([[0.9, 0.0], [0.2], [0.4]], [0, 1, 1], std)
    assert advantages[0] == [0.0, 0.0] and advantages[1][0] < 0 < advantages[2][0] and equal == 0.5


@fixed
@given(points, st.lists(st.integers(1, 9), min_size=2, max_size=8), st.booleans())
def test_equal_rewards_give_no_advantage_however_long_the_dialogues_are(emotion, turns, std):
    # float32 rounds the means of 3 and of 7 equal rewards differently; over 1e-6 that would be an advantage, and Adam would
    # blow it up to a full step
    advantages, equal = advantages_of([[emotion / 100] * n for n in turns], std=std)
    assert sum(advantages, []) == pytest.approx([0.0] * sum(turns), abs=1e-4) and equal == 1


TEN_PERCENT = [0.3] * 9 + [0.0]
NEARLY_EQUAL = [
    [[0.5, 0.0], [0.5, 0.0]],                          # the same dialogue twice, each with a malformed turn: std 0
    [[0.5, 0.0], [0.25]],                              # equal means by way of a malformed turn: std 0
    [[0.3] * 3, [0.6, 0.0], [0.9, 0.0, 0.0]],          # equal but for rounding: std about 1e-8
    [TEN_PERCENT, [0.27], [0.28]],                     # a small std, and a turn that is far below it
]


@pytest.mark.parametrize("rewards", NEARLY_EQUAL)
def test_a_malformed_turn_in_a_group_of_nearly_equal_dialogues_gets_a_sane_advantage(rewards):
    advantages, _ = advantages_of(rewards)
    assert all(math.isfinite(a) and abs(a) <= 20 for a in sum(advantages, [])), advantages


@fixed
@given(groups_of_dialogues)
def test_no_advantage_is_ever_out_of_proportion(group):
    advantages, _ = advantages_of([[emotion / 100 * held for held in turns] for emotion, turns in group])
    assert all(math.isfinite(a) and abs(a) <= 20 for a in sum(advantages, [])), advantages


def test_the_share_of_groups_that_teach_nothing_is_counted():
    rewards = [[0.5], [0.5], [0.2], [0.3], [0.9], [0.4, 0.4], [0.4]]
    assert advantages_of(rewards, [0, 0, 1, 1, 2, 3, 3])[1] == 0.75


def test_a_group_of_equal_scores_whose_malformed_turns_are_pushed_down_is_not_counted_as_teaching_nothing():
    # both score .3, so std is 0; within each dialogue the turns lie +-.3 around it, and that is the scale
    advantages, silent = advantages_of([[0.6, 0.0], [0.0, 0.6], [0.5], [0.5]], [0, 0, 1, 1])
    assert advantages == [pytest.approx([1, -1], rel=1e-4), pytest.approx([-1, 1], rel=1e-4), [0.0], [0.0]] and silent == 0.5


@fixed
@given(st.lists(groups_of_dialogues, min_size=1, max_size=3))
def test_counted_are_exactly_the_groups_whose_advantages_are_all_0(groups):
    rewards = [[emotion / 100 * held for held in turns] for group in groups for emotion, turns in group]
    numbers = [g for g, group in enumerate(groups) for _ in group]
    advantages, silent = advantages_of(rewards, numbers)
    zero = [all(a == 0 for own, number in zip(advantages, numbers) if number == g for a in own) for g in range(len(groups))]
    assert silent == pytest.approx(sum(zero) / len(groups))


# ---- from dialogues to advantages ------------------------------------------------------------------------------------------

def test_a_failed_dialogue_is_left_out_and_its_group_is_the_survivors():
    dialogues = [made([2], [20], group=0), made([1], [100], group=0), made([1, 2], [10, 40], group=0), made([1], [90], group=0),
                 made([1], [10], group=1), made([2], [70], group=1)]
    dialogues[1].end_reason = dialogues[4].end_reason = "simulator_failed"
    batch = ppo.make_batch(dialogues)
    advantages, values, returns, metrics = grpo.estimate(None, batch, settings(std=False))
    # survivors of group 0: .2, .4, .9, mean .5; of group 1 one alone
    torch.testing.assert_close(advantages, torch.tensor([-0.3, -0.3, -0.1, -0.1, -0.1, 0.4, 0.0, 0.0]))
    assert values is None and returns is None and metrics["frac_zero_std_groups"] == 0.5


def test_every_token_of_a_turn_gets_its_turns_advantage():
    batch = ppo.make_batch([made([2, 3], [50, 80], ok=[False, True]), made([1], [40])])
    advantages, *_ = grpo.estimate(None, batch, settings(std=False))
    torch.testing.assert_close(advantages, torch.tensor([-0.4, -0.4, 0.4, 0.4, 0.4, 0.0]))      # (.4 + .4) / 2 = .4


def test_without_the_format_reward_a_malformed_turn_is_treated_like_the_others():
    dialogues = [made([2, 3], [50, 80], ok=[False, True]), made([1], [40])]
    advantages, *_ = grpo.estimate(None, ppo.make_batch(dialogues, format_reward=False), settings(std=False))
    torch.testing.assert_close(advantages, torch.tensor([0.2] * 5 + [-0.2]))


def test_only_the_last_emotion_counts():
    ways = [[[10, 80], [20, 40]], [[70, 80], [90, 40]]]
    ours = [grpo.estimate(None, ppo.make_batch([made([1, 1], e) for e in way]), settings())[0].tolist() for way in ways]
    assert ours[0] == ours[1]


# ---- whole steps -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("think", [True, False])
def test_two_grpo_steps_with_the_scripted_user_change_the_weights_and_all_metrics_are_finite(model, chat, scenarios, think):
    optimizers, rng = {"policy": torch.optim.AdamW(model.parameters(), lr=1e-3)}, random.Random(0)
    for step in range(2):
        before = weights(model)
        batch = ppo.make_batch(play(model, chat, scenarios, think, size=4, step=step), format_reward=False)
        metrics = grpo.update(model, None, optimizers, batch, settings(temperature=0.7, minibatches=2, max_grad_norm=1.0), rng)
        assert finite(metrics), metrics
        assert metrics["mismatch_max"] < 1e-4 and metrics["grad_norm"] > 0 and metrics["frac_zero_std_groups"] == 0
        assert weights(model).isfinite().all() and not weights(model).equal(before)


@pytest.mark.parametrize("std", [True, False])
def test_a_step_of_equal_groups_goes_on_and_changes_no_weight(model, std):
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), weights(model)
    batch = ppo.make_batch([made([2, 1, 2], [10, 20, 30]), made([1, 3, 1], [90, 80, 30]), made([1], [70], group=1), made([2], [70], group=1)])
    metrics = grpo.update(model, None, {"policy": optimizer}, batch, settings(std=std), random.Random(0))
    assert metrics["frac_zero_std_groups"] == 1 and finite(metrics)
    assert weights(model).equal(before)


def test_one_dialogue_of_one_token_that_survived_alone_is_no_error(model):
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    metrics = grpo.update(model, None, {"policy": optimizer}, ppo.make_batch([made([1], [70])]), settings(), random.Random(0))
    assert weights(model).equal(before)
    assert finite(metrics), metrics


def test_a_step_whose_dialogues_all_failed_changes_nothing_and_says_so_or_goes_on(model):
    failed = made([3, 3])
    failed.end_reason, before = "simulator_failed", weights(model)
    try:
        grpo.update(model, None, {"policy": torch.optim.AdamW(model.parameters(), lr=1e-2)}, ppo.make_batch([failed]), settings(), random.Random(0))
    except ValueError as error:
        assert "fail" in str(error)                                # one sentence for the user, not a shape error
    assert weights(model).equal(before)


# ---- it learns -------------------------------------------------------------------------------------------------------------

def test_grpo_learns_what_a_user_likes(byte_chat):  # noqa: F811
    scores, *_ = learn(byte_chat, grpo, size=4)
    assert gain(scores) > 0.25, scores


def test_grpo_learns_nothing_from_shuffled_feelings(byte_chat):  # noqa: F811
    scores, *_ = learn(byte_chat, grpo, "shuffled", size=4)
    assert abs(gain(scores)) < 0.12, scores


def test_grpo_does_not_move_at_all_when_everybody_always_feels_the_same(byte_chat):  # noqa: F811
    _, before, after = learn(byte_chat, grpo, "constant", size=4, steps=2)
    assert after.equal(before)


# ---- reward delta ------------------------------------------------------------------------------------------------------------

def deltas_of(emotions, std=True, ok=None):
    """The advantages of one group's dialogues that felt these emotions, turn by turn; and the share of groups that teach nothing."""
    batch = ppo.make_batch([made([1] * len(e), e, ok and ok[i]) for i, e in enumerate(emotions)], reward="delta")
    advantages, _, _, metrics = grpo.estimate(None, batch, settings(std=std, reward="delta"))
    return [part.tolist() for part in advantages.split(batch.turns)], metrics["frac_zero_std_groups"]


def test_with_deltas_a_turn_is_compared_with_the_same_turn_of_the_groups_other_dialogues():
    # to go: .9, .3 and .3; the first turns have mean .6; the second turn is alone, so it has nothing to be compared with
    assert deltas_of([[60, 90], [30]], std=False)[0] == [pytest.approx([0.3, 0.0]), pytest.approx([-0.3])]
    assert deltas_of([[60, 90], [30]])[0] == [pytest.approx([1.0, 0.0], rel=1e-4), pytest.approx([-1.0], rel=1e-4)]      # scale .3


def test_with_deltas_a_late_turn_that_gains_as_much_as_the_others_is_not_pushed_down():
    emotions = [[35, 45, 55, 65], [35, 45, 55, 60], [25, 35, 45, 55], [35, 45, 55, 70]]
    # to go, turn 1: .65 .60 .55 .70, mean .625; turn 2: .30 .25 .30 .35, mean .30; turn 3: .20 .15 .20 .25; turn 4: .10 .05 .10 .15
    expected = [[0.025, 0, 0, 0], [-0.025, -0.05, -0.05, -0.05], [-0.075, 0, 0, 0], [0.075, 0.05, 0.05, 0.05]]
    assert sum(deltas_of(emotions, std=False)[0], []) == pytest.approx(sum(expected, []), abs=1e-6)
    scale = math.sqrt((2 * 0.025 ** 2 + 2 * 0.075 ** 2 + 6 * 0.05 ** 2) / 16)                                # 0.0415
    assert sum(deltas_of(emotions)[0], []) == pytest.approx([a / scale for a in sum(expected, [])], abs=1e-3)


def test_with_deltas_a_malformed_gain_is_worse_than_the_same_gain_well_formed():
    # turn 1 to go: .5 and .3, turn 2: .1 and -.1 - but the first dialogue's second gain of .1 was malformed, so .4 and 0
    advantages, _ = deltas_of([[40, 50], [40, 30]], std=False, ok=[[True, False], [True, True]])
    assert advantages == [pytest.approx([0.05, 0.05]), pytest.approx([-0.05, -0.05])]


def test_with_deltas_a_group_that_felt_alike_and_a_dialogue_alone_teach_nothing():
    assert deltas_of([[35, 45], [35, 45]]) == ([[0, 0], [0, 0]], 1) and deltas_of([[35, 80]]) == ([[0, 0]], 1)


@fixed
@given(st.lists(st.lists(points, min_size=1, max_size=8), min_size=2, max_size=4))
def test_with_deltas_no_advantage_is_out_of_proportion_and_the_compared_ones_of_a_turn_sum_to_0(emotions):
    advantages, _ = deltas_of(emotions)
    # n numbers whose root mean square is 1 are at most sqrt n
    compared = [column for k in range(8) if len(column := [a[k] for a in advantages if len(a) > k]) > 1]
    assert all(math.isfinite(a) and abs(a) <= math.sqrt(sum(map(len, compared))) + 1e-4 for a in sum(advantages, [])), advantages
    assert all(sum(column) == pytest.approx(0, abs=1e-4) for column in compared)
    assert sum(abs(a) for a in sum(advantages, [])) == pytest.approx(sum(abs(a) for a in sum(compared, [])), abs=1e-5)    # the lone ones are 0


def test_with_deltas_stopping_early_is_neither_rewarded_nor_punished():
    """Two arms, stop or go on, of equal total reward: by enumeration over groups of two the expected gradient is 0."""
    stop, go_on = made([1], [80]), made([1, 1], [50, 80])
    for chance in (0.5, 0.2, 0.9):                                           # of going on
        expected = 0.0
        for group in [(a, b) for a in (stop, go_on) for b in (stop, go_on)]:
            batch = ppo.make_batch(list(group), reward="delta")
            per_turn = grpo.estimate(None, batch, settings(std=False, reward="delta"))[0].split(batch.tokens)
            probability = math.prod(chance if d is go_on else 1 - chance for d in group)
            # d log pi / d logit of the first choice; the second turn of `go_on` has no choice to make
            expected += probability * sum(a[0].item() * (1 - chance if d is go_on else -chance) for a, d in zip(per_turn, group))
        assert expected == pytest.approx(0, abs=1e-7)
