"""Thinning keeps extremes, scales fit, PNG files are PNG files."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from palingenesis.report.axes import loss_scale, round_values, step_ticks
from palingenesis.report.history import _outside
from palingenesis.report.png import encode
from palingenesis.report.svg import element
from palingenesis.report.thin import bin_edges, most_extreme, stretches, strokes


@pytest.mark.parametrize("spike", [0, 1, 49_999, 77_777, 99_999])
def test_no_spike_is_thinned_away(spike: int) -> None:
    x, y = np.arange(100_000.0), np.random.default_rng(0).standard_normal(100_000)
    y[spike], y[spike - 5] = 1e6, -1e6
    lines = strokes(x, y, 300, 0, 100_000)
    kept = np.concatenate([line.y for line in lines])
    assert len(lines) == 1
    assert len(kept) <= 600
    assert kept.max() == 1e6
    assert kept.min() == -1e6
    assert (np.diff(lines[0].x) > 0).all()


def test_a_line_breaks_where_values_are_missing() -> None:
    y = np.array([1.0, np.nan, 2.0, 3.0, np.inf, 4.0])
    assert [list(line.x) for line in strokes(np.arange(6.0), y, 10, 0, 6)] == [[0], [2, 3], [5]]
    assert strokes(np.arange(3.0), np.full(3, np.nan), 10, 0, 3) == []


def test_a_long_line_breaks_at_long_gaps_only() -> None:
    x, y = np.arange(100_000.0), np.ones(100_000)
    y[::2] = np.nan
    y[40_000:60_000] = np.nan
    assert len(strokes(x, y, 300, 0, 100_000)) < 310
    y[:] = 1
    y[40_000:60_000] = np.nan
    first, second = strokes(x, y, 300, 0, 100_000)
    assert first.x[-1] < 40_000 < 60_000 <= second.x[0]


def test_a_bin_shows_its_most_extreme_cell() -> None:
    score = np.zeros((2000, 3))
    codes = np.zeros((2000, 3), dtype=np.uint8)
    score[1234, 1], codes[1234, 1] = -0.0 + 7, 9
    edges = bin_edges(2000, 720)
    assert len(edges) == 721
    assert set(np.diff(edges)) <= {2, 3}
    kept, _ = most_extreme(codes, score, edges)
    assert kept.shape == (720, 3)
    assert kept.sum() == 9


def test_neighbouring_missing_values_are_one_stretch() -> None:
    mask = np.array([0, 1, 1, 0, 1, 0, 0, 0, 1], dtype=bool)
    assert stretches(np.arange(9.0), mask, 0) == [(1, 2, 2), (4, 4, 1), (8, 8, 1)]
    assert stretches(np.arange(9.0), mask, 2.5) == [(1, 4, 3), (8, 8, 1)]


def test_the_image_decodes_to_what_went_in() -> None:
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = encode(codes, [(n, n, n) for n in range(12)])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (4, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 5)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:] == codes).all()


def test_loss_scales() -> None:
    assert loss_scale(np.array([10.0, 0.1])).log
    assert not loss_scale(np.array([-10.0, 0.1])).log
    values = np.random.default_rng(0).standard_normal(1000)
    values[500] = 1e9
    scale = loss_scale(values)
    assert scale.high < 50
    assert 0 <= scale(values[:1])[0] <= 1
    assert scale(values[500:501])[0] > 1
    for odd in ([], [np.nan], [2.0], [0.0, 0.0], [1e308, -1e308], [5e-324, 1.0], [-3.0] * 5):
        scale = loss_scale(np.array(odd))
        assert np.isfinite([scale.low, scale.high]).all()
        assert scale.high > scale.low
        assert all(np.isfinite(tick.at) and tick.label for tick in scale.ticks(5))


@pytest.mark.parametrize(
    ("first", "last"), [(1, 2), (1, 600), (201, 500), (1, 10**9), (12_000_001, 12_000_400)]
)
def test_step_ticks_are_whole_steps_in_range(first: int, last: int) -> None:
    steps = [int(tick.label.replace(",", "")) for tick in step_ticks(first, last)]
    assert steps[0] == first
    assert steps == sorted(set(steps))
    assert steps[-1] <= last
    assert 2 <= len(steps) <= 11


def test_round_values_are_evenly_spaced() -> None:
    assert round_values(0, 10, 6) == [0, 2, 4, 6, 8, 10]
    assert round_values(3, 3, 6) == [3]


def test_markup_is_escaped() -> None:
    drawn = element("text", "<b>&", x='"><script>', class_="a")
    assert drawn == '<text x="&#34;&gt;&lt;script&gt;" class="a">&lt;b&gt;&amp;</text>'


def test_a_layer_that_joins_or_leaves_was_not_watched_before_or_after() -> None:
    steps = np.arange(10, 70, 10)
    unread = np.zeros((6, 3), dtype=bool)
    unread[:3, 0] = unread[3:, 1] = unread[4:, 2] = True
    outside = _outside(unread, steps, [40])
    assert outside[:, 0].tolist() == [True, True, True, False, False, False]
    assert outside[:, 1].tolist() == [False, False, False, True, True, True]
    assert outside[:, 2].tolist()[:4] == [False] * 4
    assert not _outside(unread, steps, []).any()
