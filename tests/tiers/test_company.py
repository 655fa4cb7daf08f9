"""Ranks that tell one another, over real stores: in time, late, never, and of another mind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.tiers.ranks import Ranks

from palingenesis.tiers import company
from palingenesis.tiers.company import KEPT, LATE_S, LATE_STEPS, Company, combined


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(company.time, "monotonic", lambda: now[0])
    return now


STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 2),
    "network": lambda folder: dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False),
    "prefix": lambda folder: dist.PrefixStore("run", dist.HashStore()),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return STORES[request.param](tmp_path)


def words(value: float, size: int = 3) -> dict[str, Any]:
    return {"outputs": np.full(size, value)}


def value(found: list[Any] | None) -> list[float] | None:
    return None if found is None else [float(one["outputs"][0]) for one in found]


# -- in time -----------------------------------------------------------------------------------------------


def test_numbers_arrive_as_they_were(store: Any) -> None:
    first, second = Ranks(2, store).companies()
    told = {
        "outputs": np.array([[1.5, -100.0], [np.nan, np.inf]]),
        "parts/table": np.arange(24, dtype=np.float64).reshape(2, 3, 4) / 7,
        "weights/square/0": np.array(2**-1074),
        "memory": np.zeros(0),
    }
    second.tell(5, told)
    (found,) = first.hear(5, 5) or []
    assert list(found) == list(told)
    for name, array in told.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.float64 and found[name].shape == array.shape


def test_one_process_is_alone() -> None:
    one = Company("alike")
    assert (one.size, one.rank, one.alone, one.met) == (1, 0, True, False)


def test_ranks_come_in_their_order() -> None:
    ranks = Ranks(4)
    first, *others = ranks.companies()
    for one in reversed(others):
        assert first.hear(3, 3) is None
        one.tell(3, words(one.rank))
    assert value(first.hear(3, 3)) == [1.0, 2.0, 3.0]
    assert first.met and all(one.met for one in others)
    assert not any(one.alone for one in (first, *others))


def test_nothing_to_tell_is_told_too() -> None:
    first, second = Ranks().companies()
    second.tell(3, {})
    assert first.hear(3, 3) == [{}]


def test_each_look_is_heard_once() -> None:
    first, second = Ranks().companies()
    second.tell(1, words(1))
    second.tell(2, words(2))
    assert value(first.hear(1, 2)) == [1.0]
    assert first.hear(1, 2) is None
    assert value(first.hear(2, 2)) == [2.0]


def test_a_step_told_again_is_the_newer_one() -> None:
    """As after a resume from an earlier step."""
    first, second = Ranks().companies()
    second.tell(7, words(1))
    second.tell(7, words(2))
    assert value(first.hear(7, 7)) == [2.0]


# -- late --------------------------------------------------------------------------------------------------


def test_a_rank_that_is_late_is_waited_for(clock: list[float]) -> None:
    first, second = Ranks().companies()
    for now in range(5, 30):
        assert first.hear(5, now) is None
        clock[0] += 0.7
    assert not first.alone
    for step in (5, 10, 15):
        second.tell(step, words(step))
    assert [value(first.hear(step, 30)) for step in (5, 10, 15)] == [[5.0], [10.0], [15.0]]
    # The patience for the next look begins anew.
    for _ in range(20):
        assert first.hear(20, 40) is None
        clock[0] += 0.7
    assert not first.alone and list(first._since) == [20]


def test_one_late_rank_of_several() -> None:
    ranks = Ranks(3)
    first, second, third = ranks.companies()
    for step in (1, 2, 3):
        second.tell(step, words(step))
        assert first.hear(1, step) is None
    third.tell(1, words(10))
    assert value(first.hear(1, 3)) == [1.0, 10.0]
    assert first.hear(2, 3) is None


def test_a_rank_keeps_a_few_looks_until_rank_0_listens() -> None:
    ranks = Ranks()
    second = ranks.company(1)
    for step in range(1, KEPT + 3):
        second.tell(step, words(step))
    assert not second.met and ranks.store.num_keys() == 0
    first = ranks.company(0)
    second.tell(KEPT + 3, words(KEPT + 3))
    assert second.met
    last = range(4, KEPT + 4)
    assert [value(first.hear(step, step)) for step in last] == [[float(step)] for step in last]
    assert first.hear(3, 3) is None


# -- never -------------------------------------------------------------------------------------------------


def test_a_silent_rank_is_done_without(clock: list[float]) -> None:
    first, second = Ranks().companies()
    assert first.hear(10, 10) is None
    clock[0] += LATE_S + 1
    # Long, but no step has been made since: an evaluation, a checkpoint.
    assert first.hear(10, 10 + LATE_STEPS - 1) is None
    assert not first.alone
    assert first.hear(10, 10 + LATE_STEPS) is None
    assert first.alone and first.given_up
    # Who comes after all is told, and says nothing more.
    second.tell(10, words(1))
    assert second.alone
    assert first._store.num_keys() == 2


def test_steps_alone_are_no_reason_to_give_up(clock: list[float]) -> None:
    first, _ = Ranks().companies()
    for now in range(1, 500):
        assert first.hear(1, now) is None
        clock[0] += 0.99 * LATE_S / 500
    assert not first.alone


def test_a_rank_that_falls_silent_later(clock: list[float]) -> None:
    first, second = Ranks().companies()
    for step in range(1, 6):
        second.tell(step, words(step))
        assert value(first.hear(step, step)) == [float(step)]
    for now in range(6, 60):
        if not first.alone:
            assert first.hear(6, now) is None
        clock[0] += 1
    assert first.alone


def test_giving_up_twice_is_giving_up() -> None:
    first, second = Ranks().companies()
    first.give_up()
    first.give_up()
    assert first.alone
    second.tell(1, words(1))
    assert second.alone


def test_another_rank_that_gives_up_does_not_speak_for_all() -> None:
    first, second, third = Ranks(3).companies()
    second.give_up()
    assert second.alone
    third.tell(1, words(1))
    assert not third.alone and not first.alone


def test_without_a_store_everybody_is_alone() -> None:
    """As under MPI."""
    ranks = Ranks()
    ranks.store = None
    assert all(one.alone for one in ranks.companies())


class Gone:
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        def gone(*given: Any) -> Any:
            raise dist.DistNetworkError("connection reset by peer")

        return gone


@pytest.mark.parametrize("last", [False, True])
def test_a_store_that_is_gone_ends_nothing(last: bool) -> None:
    ranks = Ranks()
    first, second = ranks.companies()
    for one in (first, second):
        one._store = Gone()
    assert first.hear(1, 1, last=last) is None
    assert first.alone
    first.give_up()
    second.tell(1, words(1))
    assert second.alone


# -- of another mind ---------------------------------------------------------------------------------------


def test_ranks_with_other_options_do_not_mix() -> None:
    ranks = Ranks()
    first, second = ranks.company(0, "every 10 steps"), ranks.company(1, "every 5 steps")
    second.tell(10, words(1))
    assert first.hear(10, 10) is None
    assert not first.met and not second.met


def test_the_second_monitor_of_a_process_does_not_hear_the_first(store: Any) -> None:
    ranks = Ranks(2, store)
    old, new = ranks.companies(), ranks.companies()
    old[1].tell(1, words(1))
    new[1].tell(1, words(2))
    assert value(new[0].hear(1, 1)) == [2.0]
    assert value(old[0].hear(1, 1)) == [1.0]
    old[0].give_up()
    assert not new[0].alone
    new[1].tell(2, words(3))
    assert not new[1].alone


# -- the end -----------------------------------------------------------------------------------------------


def test_at_the_end_what_is_there_is_taken(store: Any) -> None:
    first, second = Ranks(2, store).companies()
    second.tell(1, words(1))
    second.tell(2, words(2))
    assert value(first.hear(1, 2, last=True)) == [1.0]
    assert value(first.hear(2, 2, last=True)) == [2.0]


def test_at_the_end_the_others_have_a_moment() -> None:
    first, second = Ranks().companies()
    second.tell(1, words(1))
    first.hear(1, 1)
    later = threading.Timer(0.3, second.tell, (2, words(2)))
    later.start()
    assert value(first.hear(2, 2, last=True)) == [2.0]
    later.join()


def test_at_the_end_nobody_waits_long(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company, "LAST_S", 0.2)
    first, second = Ranks(2, store).companies()
    began = time.monotonic()
    assert first.hear(1, 1, last=True) is None  # it never met them
    second.tell(1, words(1))
    assert value(first.hear(1, 1, last=True)) == [1.0]
    assert first.hear(2, 2, last=True) is None
    assert not first.given_up  # the store is there: it is for the caller to close
    assert time.monotonic() - began < 4  # a store of files looks once a second


# -- what it leaves ----------------------------------------------------------------------------------------


def test_the_store_does_not_grow(store: Any) -> None:
    first, second = Ranks(2, store).companies()
    counts = []
    for step in range(1, 200):
        second.tell(step, words(step, 100))
        assert value(first.hear(step, step)) == [float(step)]
        counts.append(store.num_keys())
    assert len(set(counts)) == 1
    assert not first._since and not second._untold


def test_a_rank_that_nobody_hears_fills_nothing(clock: list[float]) -> None:
    ranks = Ranks()
    second = ranks.company(1)
    for step in range(1, 200):
        second.tell(step, words(step))
    assert ranks.store.num_keys() == 0 and len(second._untold) == KEPT


# -- joined ------------------------------------------------------------------------------------------------

SUMMED, EACH = frozenset({"weights", "drift"}), frozenset({"outputs", "memory"})


def join(own: Any, *others: Any) -> Any:
    return combined(own, list(others), summed=SUMMED, each=EACH)


def test_shares_are_added_and_what_each_has_is_stacked() -> None:
    one = {"weights/square/0": np.array([1.0, 2.0]), "outputs": np.array([5.0]), "losses": np.array([9.0])}
    two = {"weights/square/0": np.array([10.0, np.nan]), "outputs": np.array([6.0])}
    found, silent = join(one, two)
    assert silent == {}
    np.testing.assert_array_equal(found["weights/square/0"], [11.0, np.nan])
    np.testing.assert_array_equal(found["outputs"], [[5.0], [6.0]])
    np.testing.assert_array_equal(found["losses"], [9.0])  # of this rank alone


def test_alone_there_is_one_rank() -> None:
    found, silent = join({"outputs": np.array([5.0]), "weights/square/0": np.array([1.0])})
    assert silent == {}
    np.testing.assert_array_equal(found["outputs"], [[5.0]])
    np.testing.assert_array_equal(found["weights/square/0"], [1.0])


def test_a_family_that_a_rank_lacks_is_left_out_as_a_whole() -> None:
    one = {"weights/square/0": np.ones(2), "weights/count/0": np.ones(2), "memory": np.ones(5)}
    two = {"weights/square/0": np.ones(2), "memory": np.ones(5)}
    found, silent = join(one, two, two)
    assert list(found) == ["memory"] and silent == {"weights": [1, 2]}
    found, silent = join(two, one, one)  # of what this rank has not found itself, the others tell
    assert list(found) == ["memory"] and silent == {"weights": [0]}


def test_what_one_rank_tells_alone_of_itself_is_not_taken_for_this_ones() -> None:
    found, _ = join({"memory": np.ones(5)}, {"memory": np.ones(5), "losses": np.array([7.0])})
    assert list(found) == ["memory"]


def test_every_rank_that_is_silent_is_named() -> None:
    one = {"weights/square/0": np.ones(2), "weights/count/0": np.ones(2)}
    found, silent = join(one, {"weights/count/0": np.ones(2)}, {"weights/square/0": np.ones(2)})
    assert found == {} and silent == {"weights": [1, 2]}


def test_what_does_not_fit_together_is_left_out_and_nobody_is_blamed() -> None:
    found, silent = join({"outputs": np.ones((2, 12))}, {"outputs": np.ones((3, 12))})
    assert found == {} and silent == {"outputs": []}


def test_a_word_of_numbers_is_small() -> None:
    """A look of a model of 1,000 layers travels in far less than a store's usual limit of 8 MB."""
    told = {f"weights/{name}/0": np.random.default_rng(0).random(3000) for name in ("square", "count")}
    assert len(company._packed(told)) < 60_000
    assert json.dumps(sorted(company._unpacked(company._packed(told)))) == json.dumps(sorted(told))
