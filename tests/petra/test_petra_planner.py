"""The memory planner beside what is really alive: planned and measured bytes agree."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from recording import stages_of, waiting
from unlatch.methods import PETRA, buffer_settings
from unlatch.models.irevnet import IRevNet
from unlatch.models.revnet import RevNet, revnet_cifar
from unlatch.plan.memory import StageMemory, StageSize, stage_memory, stage_sizes

BATCH, SIDE = 16, 16
sgd = partial(torch.optim.SGD, lr=0.001)


def net(name: str) -> nn.Module:
    if name == "irevnet":
        return IRevNet((2, 2), width=8, in_channels=1)
    return revnet_cifar(14, width=8, in_channels=1)


def live_storages() -> dict[int, torch.UntypedStorage]:
    """All memory that belongs to a tensor somebody can reach, by address; while it is held no address is used again."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def started(model: nn.Module, method: PETRA) -> unlatch.Run:
    count = len(model.blocks())  # type: ignore[operator]
    return unlatch.parallelize(model, method, stages=count, loss_fn=cross_entropy, optimizer=sgd)


def planned_memory(sizes: list[StageSize], method: PETRA) -> list[StageMemory]:
    return stage_memory(sizes, method.rules(), method.schedule(len(sizes)))


def fed(run: unlatch.Run, batches: int) -> unlatch.Run:
    for _ in range(batches):
        run.step(torch.randn(BATCH, 1, SIDE, SIDE), torch.randint(10, (BATCH,)))
    return run


@pytest.mark.parametrize("order", ["ticked", "1f1b"])
@pytest.mark.parametrize("name", ["revnet14", "irevnet"])
@pytest.mark.parametrize("setting", list(buffer_settings()))
def test_queues_and_copies_are_as_planned(name: str, setting: str, order: str) -> None:
    """Per stage: the queue of inputs with the one at work, and old weights, for each setting of the paper's table."""
    model, method = net(name), replace(buffer_settings()[setting], microbatches=1, order=order)
    sizes = stage_sizes(model, (BATCH, 1, SIDE, SIDE))
    plan = planned_memory(sizes, method)
    # Versions of the weights are distinct only once both ends of the queue have seen updates.
    run = fed(started(model, method), 4 * len(sizes))
    for stage, found, planned in zip(stages_of(run)[:-1], run.statistics(), plan, strict=False):
        queue = planned.queue + (planned.at_work if planned.queue else 0)
        assert found.stored_bytes == pytest.approx(queue, rel=0.05), found.stage
        current = {p.data_ptr() for p in stage.params}
        old = {w.data_ptr(): w.nbytes for kept in stage.kept.values() for w in kept.weights or ()}
        copies = sum(size for address, size in old.items() if address not in current)
        assert copies == pytest.approx(planned.copies, rel=0.05), found.stage


def test_stages_with_some_reversible_blocks_keep_what_is_planned() -> None:
    """stem, R | R, down, R | R, R, head: nothing is inverted in a stage that cannot be inverted as a whole."""
    model = revnet_cifar(14, width=8, in_channels=1)
    starts = [0, 2, 5]
    sizes = stage_sizes(model, (BATCH, 1, SIDE, SIDE), starts)
    assert not any(size.reversible for size in sizes)
    method = PETRA(microbatches=1)
    run = unlatch.parallelize(
        model, method, stages=3, loss_fn=cross_entropy, optimizer=sgd, split=[size.name for size in sizes[1:]]
    )
    fed(run, 12)
    for found, planned in zip(run.statistics()[:-1], planned_memory(sizes, method), strict=False):
        assert planned.queue > 0
        assert found.stored_bytes == planned.queue + planned.at_work


@pytest.mark.parametrize("name", ["revnet14", "irevnet"])
def test_nothing_else_is_alive_between_ticks(name: str) -> None:
    """All reachable tensors, less those there before, are queues, messages under way and a few probed numbers."""
    model = net(name)
    sizes = stage_sizes(model, (BATCH, 1, SIDE, SIDE))
    method = PETRA(microbatches=1)
    run = started(model, method)
    before = live_storages()
    with waiting() as boxes:
        fed(run, 2 * len(sizes) + 3)
    alive = sum(memory.nbytes() for address, memory in live_storages().items() if address not in before)
    messages = {t.untyped_storage().data_ptr(): t.nbytes for m in boxes for t in _tensors(m.payload)}
    probes = {t.data_ptr(): t.nbytes for s in stages_of(run) for k in s.kept.values() for t in _tensors(k.probe)}
    shared = {t.data_ptr() for s in stages_of(run) for k in s.kept.values() for t in k.inputs}
    rest = sum(n for address, n in messages.items() if address not in shared) + sum(probes.values())
    planned = sum(s.queue for s in planned_memory(sizes, method))
    assert alive - rest == pytest.approx(planned, rel=0.05)


def _tensors(tree: object) -> list[torch.Tensor]:
    return unlatch.nn.flatten(tree)[0] if tree is not None else []  # type: ignore[arg-type]


def test_peak_does_not_depend_on_the_reversible_blocks_of_a_stage() -> None:
    """Two stages of couplings between stem and head: eight times the blocks, the same peak."""
    peaks = {}
    for blocks in (2, 16):
        model = RevNet((2 * blocks,), width=8, stem="small", classes=10, in_channels=1)
        starts = ["layer1.0", f"layer1.{blocks}", "head"]
        run = unlatch.parallelize(
            model, PETRA(microbatches=1), stages=4, loss_fn=cross_entropy, optimizer=sgd, split=starts
        )
        peaks[blocks] = [s.peak_bytes for s in fed(run, 8).statistics()]
    assert peaks[16] == peaks[2]
    assert min(peaks[2]) > 0
