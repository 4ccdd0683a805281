"""Turns, spreads and paired ratios on made-up samples."""

import pytest
import torch

from benchmarks.stats import Ratio, paired_ratio, spread
from benchmarks.timing import LEAST_TURNS, take_turns


def _turns(seconds):
    return [[float(value)] for value in seconds]


def _lognormal(deviation, count):
    return (deviation * torch.randn(count)).exp()


def test_spread_is_over_turn_medians():
    # The outlier of 9 s within one turn does not reach the spread.
    assert spread([[1.0, 1.0, 9.0], [2.0], [3.0], [4.0], [5.0]]) == (3.0, 2.0, 4.0)


def test_drift_cancels_in_a_paired_ratio():
    drift = torch.linspace(1.0, 3.0, 15)
    ratio = paired_ratio(_turns(4 * drift), _turns(drift))
    assert ratio == pytest.approx((4.0, 4.0, 4.0))


def test_interval_holds_the_true_ratio_about_as_often_as_it_says():
    held = 0
    for _ in range(400):
        ours, peer = (factor * _lognormal(0.1, 21) for factor in (1.0, 2.0))
        ratio = paired_ratio(_turns(peer), _turns(ours))
        assert ratio.low <= ratio.value <= ratio.high
        held += ratio.low <= 2.0 <= ratio.high
    assert 0.88 <= held / 400 <= 0.995


def test_interval_narrows_with_more_rounds_and_is_repeatable():
    widths = []
    for rounds in (10, 160):
        turns = _turns(_lognormal(0.2, rounds)), _turns(_lognormal(0.2, rounds))
        ratio = paired_ratio(*turns)
        assert ratio == paired_ratio(*turns)
        widths.append(ratio.high - ratio.low)
    assert widths[1] < 0.6 * widths[0]


def test_ratio_in_another_unit():
    assert Ratio(1.0, 0.5, 2.0).times(10.0) == (10.0, 5.0, 20.0)


@pytest.mark.parametrize(("left", "right"), [([], []), ([[1.0]], [[1.0], [2.0]])], ids=["none", "unequal"])
def test_turns_that_are_no_pairs_are_refused(left, right):
    with pytest.raises(ValueError, match="expected as many on both sides"):
        paired_ratio(left, right)


def test_contestants_run_in_turn():
    order = []
    turns = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert {name: len(rounds) for name, rounds in turns.items()} == {"a": 3, "b": 3}
    changes = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    # Once for an estimate, and then three rounds.
    assert changes == ["a", "b"] * 4


def test_those_with_threads_of_their_own_wait_for_the_others_and_they_for_them(monkeypatch):
    order = []
    monkeypatch.setattr("time.sleep", lambda seconds: order.append("rest"))
    runs = {name: lambda name=name: order.append(name) for name in ("a", "own", "b", "c")}
    take_turns(runs, repeats=2, own_threads={"own"})
    changes = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert changes == ["a", "own", "b", "c", *["a", "rest", "own", "rest", "b", "c"] * 2]


def test_short_budget_still_gives_the_least_number_of_turns():
    assert len(take_turns({"a": lambda: None}, seconds=0.0)["a"]) == LEAST_TURNS
