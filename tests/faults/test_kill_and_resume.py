"""A session that is killed again and again, at random, ends with the weights of the one that never was."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import unlatch
from fault_jobs import resumes
from rank_jobs import differences
from unlatch import Faults
from unlatch.methods import get

#: Deaths of each session; a hundred in all with 15.
KILLS = int(os.environ.get("UNLATCH_TEST_KILLS", "2"))
#: Batches per life: a few checkpoints land in each, and without a new one a restart is no use.
LIFE = 8
METHODS = {
    "bp": get("bp"),
    "pipedream": get("pipedream"),
    "dtrp": get("dtrp"),
    "petra": get("petra"),
    "layerpipe stages": get("layerpipe", mode="stages"),
    "layerpipe tasks": get("layerpipe"),
    "auxnet": get("auxnet"),
}


def kills(seed: str, log: Path) -> Faults:
    """Any stage, any part of the work, any batch of the second half of a life."""
    draw = random.Random(seed)
    faults = Faults(log=str(log)).delay(0, ms=10, during="forward")
    for life in range(KILLS):
        at = life * LIFE + draw.randrange(LIFE // 2, LIFE)
        during = draw.choice(["forward", "backward", "update"])
        faults = faults.kill(draw.randrange(2), at, during=during, attempt=life)
    return faults


@pytest.mark.thorough
@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("name", METHODS)
def test_killed_again_and_again(row, tmp_path, name):
    line = row("F11", f"{KILLS} SIGKILLs at random, restarted each time, {name}")
    method, batches = METHODS[name], (KILLS + 1) * LIFE
    expected, plan = resumes(method, batches)
    log = tmp_path / "struck"
    args = (method, batches, str(tmp_path / "checkpoints"), kills(name, log), plan)
    for outcome, _ in unlatch.launch(resumes, 2, args=args, max_restarts=KILLS):
        assert differences(expected, outcome) == []
    assert len(log.read_text().splitlines()) == KILLS
    line.found("ends with the weights of the undisturbed run, bit for bit")
