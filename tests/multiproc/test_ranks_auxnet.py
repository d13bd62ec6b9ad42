"""Variants of AuxNet on real ranks: the same weights, losses and evaluations as inline, bit for bit."""

from __future__ import annotations

import pytest

import rank_jobs
import timing_jobs
import unlatch
from unlatch.methods import AuxNet, get

VARIANTS = {
    "explicit": AuxNet(correction="explicit", aux_steps=2),
    "replay": AuxNet(form="lagrangian"),
    "synthesiser": AuxNet(form="lagrangian", multiplier="synthesiser"),
    "rebuild": AuxNet(form="lagrangian", multiplier="rebuild"),
    "shared": AuxNet(shared=True),
    "steps": AuxNet(stage_steps=2),
    "mixed": AuxNet(true_share=0.5),
    "echo": AuxNet(form="lagrangian", echo=0.5),
    "serial": AuxNet(form="lagrangian", serial_first=1, serial_every=3),
    "parts": AuxNet(microbatches=2, accumulate=2),
    "shallow": AuxNet(ablation="shallow"),
    "frozen": AuxNet(ablation="frozen"),
    "one tensor down": AuxNet(form="lagrangian", border_norm=False, ablation="no-adjoint", beta=((0, 1.0), (4, 3.0))),
    "auxvar": get("auxvar", form="lagrangian"),
    "dni": get("dni", microbatches=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_on_two_ranks(ranks2, variant):
    method = VARIANTS[variant]
    for rank, outcome in enumerate(ranks2.run(rank_jobs.train_conv, method, 3)):
        assert rank_jobs.differences(rank_jobs.train_conv(method, 3), outcome) == [], rank


def test_every_rank_builds_its_own_data(ranks2):
    """The loop feeds every rank, so that no raw data is sent; the result is that of sending it."""
    outcomes = ranks2.run(rank_jobs.train_conv, AuxNet(data="build"), 2)
    assert rank_jobs.differences(rank_jobs.train_conv(AuxNet(), 2), outcomes[1]) == []


def test_o14_a_rank_with_other_data_is_found(ranks2):
    with pytest.raises(unlatch.errors.DataError, match=r"stage 1 has other data for batch 1 than stage 0"):
        ranks2.run(rank_jobs.train_on_own_data, AuxNet(data="build"))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ((2, 3), "the loader of stage 1 goes on after 2 batches, where that of stage 0 ended"),
        ((3, 2), "the loader of stage 1 ends after 2 batches, before that of stage 0"),
    ],
)
def test_loaders_of_different_length_are_found(ranks2, batches, words):
    with pytest.raises(unlatch.errors.DataError, match=words):
        ranks2.run(rank_jobs.fit_uneven, AuxNet(data="build"), batches, timeout=120)


def test_ranks_that_build_their_data_stop_where_the_first_one_does(ranks2):
    inline = rank_jobs.fit_stopped(AuxNet(data="build"), 2)
    assert (inline["epochs"], inline["samples_into_epoch"]) == (0, 24)
    for outcome in ranks2.run(rank_jobs.fit_stopped, AuxNet(data="build"), 2, timeout=120):
        assert rank_jobs.differences(inline, outcome) == []


def test_a_rank_that_leaves_early_is_missed_by_name(ranks2):
    with pytest.raises(unlatch.errors.PeerLost, match=r"rank 1 \(stage 1\)"):
        ranks2.run(rank_jobs.leave_early, AuxNet())


def test_fit_and_statistics_on_two_ranks(ranks2):
    inline = rank_jobs.fit_conv(AuxNet())
    for outcome in ranks2.run(rank_jobs.fit_conv, AuxNet()):
        assert outcome["epochs"] == inline["epochs"]
        assert outcome["violations"] == inline["violations"]
    for outcome in ranks2.run(rank_jobs.fit_conv, AuxNet(data="build")):
        assert outcome["epochs"] == inline["epochs"]


def test_a_checkpoint_of_two_ranks_continues_inline(ranks2, tmp_path):
    ranks2.run(rank_jobs.save_conv, AuxNet(form="lagrangian"), str(tmp_path / "c"))
    one = rank_jobs.resume_conv(AuxNet(form="lagrangian"), str(tmp_path / "c"))
    for other in ranks2.run(rank_jobs.resume_conv, AuxNet(form="lagrangian"), str(tmp_path / "c")):
        assert rank_jobs.differences(one, other) == []


def test_a_rank_that_ran_ahead_after_a_long_warmup_was_taken_for_one_that_broke_its_schedule(ranks4):
    """The mail had room for what is under way in the warm-up, which is less."""
    method = AuxNet(form="lagrangian", serial_first=12)
    inline = rank_jobs.train_with_a_slow_stage(method, 18)
    assert ranks4.run(rank_jobs.train_with_a_slow_stage, method, 18) == [inline] * 4


@pytest.mark.parametrize(("aux_seconds", "pays"), [(0.005, True), (0.06, False)])
def test_o16_the_formula_predicts_the_step_time_of_two_ranks_and_whether_they_gain(ranks2, aux_seconds, pays):
    """One stage has half of the layers and the AuxNet: with a heavy one the gain would begin beyond two stages."""
    seconds, tries = 0.02, []
    # Layers only sleep, but on a crowded machine they wake up late: it is given some chances.
    while not tries or (not all(tries[-1].values()) and len(tries) < 6):
        serial = timing_jobs.serial_step(seconds)
        outcomes = ranks2.run(timing_jobs.auxnet_step, seconds, aux_seconds)
        # Ranks wait for each other, so that both have the same pace.
        step, times = max(found for found, _ in outcomes), outcomes[0][1]
        tries.append(
            {
                f"a step takes {times.step(2):.3f} s, not {step:.3f}": step == pytest.approx(times.step(2), rel=0.25),
                f"{times.speed_up(2):.2f} times as fast": serial / step == pytest.approx(times.speed_up(2), rel=0.25),
                "two stages pay": (serial > step) == pays == (times.break_even < 2),
            }
        )
    assert all(tries[-1].values()), tries
