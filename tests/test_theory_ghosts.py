"""T13: ghost offsets against periodic kernels and the stated settings; the map over settings."""

import numpy as np
import pytest

from helpers.theory import (
    RuleSetting,
    aligned_carriers,
    alignment,
    ghost_map,
    ghost_offsets,
    group_sparse_rule,
    kernel,
    rotary_frequencies,
)


def test_a_periodic_kernel_has_a_ghost_every_period() -> None:
    theta = 2 * np.pi / 12 * np.array([1.0, 2.0])
    ghosts = ghost_offsets(aligned_carriers([1.0, 3.0], theta, 5), theta, 5, 12, 100)
    assert ghosts["delta"].tolist() == list(range(17, 100, 12))
    assert ghosts["strength"].to_numpy() == pytest.approx(np.zeros(7), abs=1e-10)
    assert ghosts["odds"].to_numpy() == pytest.approx(np.ones(7), abs=1e-10)


def test_a_kernel_that_peaks_elsewhere_has_strong_ghosts() -> None:
    # f(δ) = cos(2πδ/12 − π): it peaks at 6 (out of range for L = 6) with 1 − cos(π/6) more than at k = 5.
    ghosts = ghost_offsets([np.exp(1j * np.pi)], [2 * np.pi / 12], 5, 6, 8)
    assert ghosts["delta"].tolist() == [6, 7]
    assert ghosts["strength"].to_numpy() == pytest.approx([1 - np.cos(np.pi / 6), 0.0], abs=1e-12)
    assert ghosts["odds"][0] == pytest.approx(np.exp(1 - np.cos(np.pi / 6)))


def test_aligned_incommensurate_carriers_have_near_returns_only() -> None:
    # |c| (1 − cos 44) = 1.6e-4 |c|: 44 is nearly seven turns.
    carriers = aligned_carriers([5.0], [1.0], 3)
    assert ghost_offsets(carriers, [1.0], 3, 16, 100).empty
    near = ghost_offsets(carriers, [1.0], 3, 16, 100, tolerance=0.01)
    assert near["delta"].tolist() == [47, 91]
    assert near["strength"][0] == pytest.approx(5 * (np.cos(44) - 1))


def test_the_stated_settings() -> None:
    theta = rotary_frequencies(8)
    rule = group_sparse_rule(theta, 3, 16).carriers
    ghosts = ghost_offsets(rule, theta, 3, 16)
    assert ghosts["delta"].tolist()[:3] == [41, 47, 53]
    assert alignment(rule, theta, 3) == pytest.approx(0.71, abs=0.005)
    values = kernel(rule, theta, np.arange(4096))
    assert ghosts["delta"].tolist() == [d for d in range(16, 4096) if values[d] >= values[3]]

    theta = rotary_frequencies(32)
    rule = group_sparse_rule(theta, 5, 16).carriers
    assert ghost_offsets(rule, theta, 5, 16).empty
    assert alignment(rule, theta, 5) == pytest.approx(1.0, abs=5e-5)


def test_the_map_has_one_row_a_setting_and_agrees_with_the_parts() -> None:
    settings = [RuleSetting(16, 3, 8), RuleSetting(16, 5, 32), RuleSetting(8, 7, 4, 100.0)]
    table = ghost_map(settings)
    assert table["train_length"].tolist() == [16, 16, 8]
    assert table["first_ghost"].isna().tolist() == [False, True, False]
    assert table["first_ghost"][0] == 41
    assert (table["ghosts"] > 0).tolist() == [True, False, True]
    assert table["feasible"].all()
    assert ((table["closest_return"] >= 0) == (table["ghosts"] > 0)).all()
    # An aligned rule has its maximum at the target, so no ghost; the converse need not hold.
    assert not ((table["alignment"] > 1 - 1e-9) & (table["ghosts"] > 0)).any()
    for row, setting in zip(table.itertuples(), settings, strict=True):
        rule = group_sparse_rule(setting.frequencies, setting.offset, setting.train_length)
        assert row.margin == pytest.approx(rule.margin)
        values = kernel(rule.carriers, setting.frequencies, np.arange(4096))
        beyond = values[setting.train_length :].max() - values[setting.offset]
        assert row.closest_return == pytest.approx(beyond, abs=1e-9)


def test_the_map_shows_infeasible_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    # θ_0 = 1 separates any two offsets, if only by 1e-10 when L is beyond 100,000: here the frequencies are replaced.
    period = property(lambda setting: np.array([2 * np.pi / setting.head_dim]))
    monkeypatch.setattr(RuleSetting, "frequencies", period)
    table = ghost_map([RuleSetting(12, 3, 8), RuleSetting(12, 3, 14)], norm="l2")
    assert table["feasible"].tolist() == [False, True]
    assert table.loc[0, ["margin", "alignment", "active", "ghosts", "first_ghost", "closest_return"]].isna().all()
    assert len(ghost_map([])) == 0


def test_a_map_without_room_beyond_the_training_range() -> None:
    table = ghost_map([RuleSetting(8, 3, 4)], max_length=8)
    assert table["ghosts"].tolist() == [0]
    assert table["closest_return"].isna().all()


def test_zero_carriers_tie_everywhere() -> None:
    assert ghost_offsets([0.0], [1.0], 1, 4, 8)["delta"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RuleSetting(16, 16, 8), "offset=16"),
        (lambda: RuleSetting(1, 0, 8), "train_length=1"),
        (lambda: RuleSetting(16, 3, 7), "head_dim=7"),
        (lambda: RuleSetting(16, 3, 8, -1.0), "base=-1.0"),
        (lambda: ghost_offsets([1.0], [1.0], 3, 16, 8), "max_length=8"),
        (lambda: ghost_offsets([1.0], [1.0], 3, 16, 32, tolerance=-0.1), "tolerance=-0.1"),
        (lambda: ghost_map([RuleSetting(16, 3, 8)], norm="linf"), "norm='linf'"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
