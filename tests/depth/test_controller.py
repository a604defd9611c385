from __future__ import annotations

from typing import Any

import pytest

from async_rl.config import depth_at, slots_at
from async_rl.depth.choice import Forecast, near
from async_rl.depth.controller import DepthController, Move
from async_rl.messages.reports import GroupRecord
from async_rl.telemetry.metrics import reduce_metrics
from tests.kit.configs import make_config
from tests.kit.depth.steps import step_values

GROUPS = [GroupRecord(10.0, 0.0, 100, 2.0 + i % 3) for i in range(64)]


def controller(depth: float = 2.0, version: int = 0, **sections: Any) -> DepthController:
    config = make_config(staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": 8}, **sections)
    made = DepthController(config, depth, version)
    made.add_groups(GROUPS)
    return made


def steps(made: DepthController, first: int, last: int, **changed: float) -> list[Move]:
    moves = [made.add_step(version, step_values(**changed), is_disturbed=False) for version in range(first, last + 1)]
    return [move for move in moves if move]


def forecasts(**worth: float) -> dict[float, Forecast]:
    """Forecasts by depth, as `d1_5=6.0`, in steps a minute that all teach the same."""
    found = {float(name[1:].replace("_", ".")): speed for name, speed in worth.items()}
    return {depth: Forecast(depth, speed, depth, 0.8) for depth, speed in found.items()}


def test_the_first_decision_comes_after_eight_steps_and_the_next_after_fifteen() -> None:
    made = controller()
    steps(made, 1, 7)
    assert made.prospect() is None
    steps(made, 8, 8)
    assert made.prospect() is not None
    assert made.decide(forecasts(d1_5=1.0, d2=1.0)) is None
    steps(made, 9, 22)
    assert made.prospect() is None
    steps(made, 23, 23)
    assert made.prospect() is not None


def test_with_batches_of_one_group_an_alarm_takes_a_whole_group() -> None:
    config = make_config(staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": 1})
    made = DepthController(config, 2.0, 0)
    (move,) = steps(made, 1, 9, alarm__kl=1.0)
    assert (move.depth, move.slots) == (1.0, 2)


def test_a_depth_worth_two_percent_more_is_moved_to_and_one_percent_is_not() -> None:
    made = controller()
    steps(made, 1, 8)
    assert made.decide(forecasts(d2=5.0, d2_25=5.05)) is None
    steps(made, 9, 23)
    move = made.decide(forecasts(d2=5.0, d2_25=5.1, d2_5=5.0))
    assert move == Move(
        2.25, 26,
        "2 % more steps than 2, and each teaches about 0 % more; 2.5 gives 2 % fewer steps than 2.25, and each "
        "teaches about 0 % more",
    )
    assert (made.depth, made.wanted) == (2.0, 2.25)


def test_a_move_goes_up_by_a_batch_at_most_and_down_as_far_as_it_is_worth() -> None:
    made = controller(depth=1.0)
    steps(made, 1, 8)
    move = made.decide(forecasts(d1=5.0, d2=6.0, d3=9.0))
    assert move and move.depth == 2.0
    made = controller(depth=5.0)
    steps(made, 1, 8)
    move = made.decide(forecasts(d1=9.0, d5=5.0))
    assert move and move.depth == 1.0


def test_steps_are_not_given_up_for_what_only_the_whole_cost_of_staleness_is_worth() -> None:
    """6.6 steps of the newest data are worth more than 10 of efficiency 0.5, but less than 10 of 2 / 3."""
    made = controller(depth=1.0)
    steps(made, 1, 8)
    assert made.decide({0.0: Forecast(0.0, 6.6, 0.0, 1.0), 1.0: Forecast(1.0, 10.0, 1.0, 0.5)}) is None
    assert made.wanted == 1.0


def test_after_a_move_nothing_is_decided_until_the_old_groups_are_trained() -> None:
    made = controller(depth=4.0)
    steps(made, 1, 8)
    assert made.decide(forecasts(d4=5.0, d2=6.0))
    steps(made, 9, 13)
    made.change_servers(2)  # which asks for a decision 8 steps later, with groups measured since
    made.add_groups(GROUPS)
    steps(made, 14, 20)
    assert made.prospect() is None
    steps(made, 21, 21)
    assert made.prospect() is not None


def test_an_alarm_takes_half_a_batch_at_once_and_then_holds() -> None:
    made = controller(depth=2.0)
    steps(made, 1, 8)
    (move,) = steps(made, 9, 22, alarm__kl=1.0)  # 9 + 2 + 12 = 23 is the next that may move
    assert move == Move(1.5, 20, "half a batch less than 2, because the KL is high")
    assert made.prospect() is None
    (move,) = steps(made, 23, 23, alarm__ess=1.0)
    assert (move.depth, move.reason) == (1.0, "half a batch less than 1.5, because the ESS is low")


def test_an_alarm_leaves_the_depths_below_1_to_the_decisions() -> None:
    made = controller(depth=1.25)
    steps(made, 1, 8)
    (move,) = steps(made, 9, 9, alarm__kl=1.0)
    assert move.depth == 1.0
    assert steps(made, 10, 60, alarm__kl=1.0) == []
    decided = made.decide(forecasts(d0=9.0, d1=5.0))
    assert decided and decided.depth == 0.0


def test_an_alarm_goes_no_lower_than_the_learner_can_live_with() -> None:
    made = controller(depth=2.25, weight_sync={"every_steps": 3})
    steps(made, 1, 8)
    (move,) = steps(made, 9, 9, alarm__truncated=1.0)
    assert (move.depth, move.slots) == (2.0, 24)
    assert steps(made, 10, 60, alarm__truncated=1.0) == []


def test_a_decision_that_an_alarm_has_overtaken_is_dropped() -> None:
    made = controller(depth=2.0)
    steps(made, 1, 8)
    assert made.prospect() is not None
    assert steps(made, 9, 9, alarm__kl=1.0)
    assert made.decide(forecasts(d2=5.0, d3=9.0)) is None
    assert made.wanted == 1.5


def test_disturbed_steps_are_left_out_of_the_window() -> None:
    made = controller()
    steps(made, 1, 4, time__train_s=3.0)
    made.add_step(5, step_values(time__train_s=300.0), is_disturbed=True)
    steps(made, 6, 8, time__train_s=3.0)
    prospect = made.prospect()
    assert prospect and prospect.workload.train_s == pytest.approx(3.0)


def test_far_depths_are_not_looked_at_when_the_model_is_far_from_what_was_measured() -> None:
    """Steps take 5 s, 12 a minute. Forecasts of 5 a minute are 2.4 times too low."""
    made = controller(depth=2.0)
    steps(made, 1, 8)
    prospect = made.prospect()
    assert prospect and len(made.look(prospect)) > 5
    made.decide(forecasts(d2=5.0))
    assert made.measured_over_predicted == pytest.approx(2.4)
    made.change_servers(2)  # all depths are a candidate again
    assert sorted(made.look(prospect)) == [1.5, 1.75, 2, 2.25, 2.5]


def test_a_start_between_quarters_is_never_below_what_the_learner_can_live_with() -> None:
    """2 * 8 groups between pushes, of which 3 a batch are fresh: 16 slots, which are those of depth 4.25."""
    config = make_config(
        staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": 8}, weight_sync={"every_steps": 2},
        buffer={"max_uses": 3, "fresh_fraction": 0.375},
    )
    made = DepthController(config, 4.0, 0)
    made.add_groups(GROUPS)
    steps(made, 1, 8, buffer__trained=3.0)
    prospect = made.prospect()
    assert prospect and prospect.depth == 4.25
    assert min(made.look(prospect)) == 4.25


def test_the_metrics_say_the_depth_and_what_is_expected_of_it() -> None:
    made = controller()
    assert reduce_metrics(made.metrics()) == {"staleness/depth": 2.0, "auto/moves": 0.0}
    steps(made, 1, 8)
    move = made.decide(forecasts(d2=10.0, d3=12.0))
    on_its_way = reduce_metrics(made.metrics())
    assert (on_its_way["staleness/depth"], on_its_way["auto/moves"]) == (2.0, 0.0)
    assert move
    made.moved(move.slots)
    assert reduce_metrics(made.metrics()) == pytest.approx({
        "staleness/depth": 3.0, "auto/moves": 1.0, "auto/predicted_steps_per_min": 12.0, "auto/efficiency": 0.8,
        "auto/kl_per_version": 0.01, "auto/measured_over_predicted": 1.2,
    })


@pytest.mark.parametrize(("every_steps", "last"), [(1, 18), (3, 17)])
def test_no_move_is_wanted_that_only_the_last_push_could_make(every_steps: int, last: int) -> None:
    """In 20 steps the last push that opens admission is that of version 19, or 18 where every third is pushed."""
    def at(version: int) -> DepthController:
        made = controller(4.0, run={"steps": 20}, weight_sync={"every_steps": every_steps})
        steps(made, 1, version - 1)
        return made

    def is_decided(version: int) -> list[bool]:
        made = at(version)
        steps(made, version, version)
        return [made.prospect() is not None, made.decide(forecasts(d4=5.0, d3=6.0)) is not None]

    assert [len(steps(at(version), version, version, alarm__kl=1.0)) for version in (last, last + 1)] == [1, 0]
    assert [is_decided(version) for version in (last, last + 1)] == [[True, True], [False, False]]


def test_while_a_move_is_on_its_way_no_other_is_wanted() -> None:
    """Pushes are rare, so that it takes up to three steps."""
    made = controller(depth=4.0, weight_sync={"every_steps": 3})
    steps(made, 1, 9)
    move = made.decide(forecasts(d4=5.0, d2=6.0))
    assert move
    assert steps(made, 10, 12, alarm__kl=1.0) == []
    assert made.prospect() is None and made.decide(forecasts(d4=5.0, d3=6.0)) is None
    made.moved(move.slots)
    assert (made.depth, made.wanted) == (2.0, 2.0)


def test_the_outlook_says_what_twice_the_bound_would_have_given() -> None:
    made = controller(depth=8.0)
    assert made.last_prospect() is None
    made.add_groups([GroupRecord(4.0, 60.0 * (i % 8 == 0), 100, 2.0 + i % 3) for i in range(64)])
    steps(made, 1, 8)
    prospect = made.last_prospect()
    assert prospect
    text = made.outlook(prospect)
    assert text.startswith("depth 8 at the end, after 0 move(s). Simulated with the last groups, staleness.max 16 in ")
    assert "place of 8, which limits the depth, would give" in text


def test_a_decision_of_servers_that_are_gone_is_dropped_and_the_next_is_a_wide_one() -> None:
    made = controller(placement={"rollout": {"servers": 2}})
    steps(made, 1, 8)
    assert made.prospect()
    made.change_servers(1)
    assert made.decide(forecasts(d2=5.0, d2_5=9.0)) is None and made.wanted == 2.0
    made.add_groups(GROUPS)
    steps(made, 9, 16)
    prospect = made.prospect()
    assert prospect and len(made.look(prospect)) > 5
    assert made.decide(forecasts(d2=5.0, d2_5=9.0))


@pytest.mark.parametrize("fresh", [1, 2, 3])
def test_with_small_batches_each_depth_has_one_name(fresh: int) -> None:
    config = make_config(staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": fresh})
    made = DepthController(config, 2.0, 0)
    made.add_groups(GROUPS)
    steps(made, 1, 8)
    prospect = made.prospect()
    assert prospect
    seen = {depth: slots_at(depth, fresh) for depth in (*made.look(prospect), *near(prospect))}
    assert len(set(seen.values())) == len(seen) and min(seen) < 2 < max(seen)
    assert {depth: depth_at(slots, fresh) for depth, slots in seen.items()} == {depth: depth for depth in seen}
