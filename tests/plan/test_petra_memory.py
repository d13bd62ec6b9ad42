"""The memory planner: the paper's table with the paper's counting, and the corrected one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import PlanError
from unlatch.methods import buffer_settings
from unlatch.models.irevnet import IRevNet
from unlatch.models.rev_transformer import RevGPT
from unlatch.models.revnet import RevNet, revnet18, revnet50, revnet_cifar
from unlatch.nn.reversible import Coupling, Split
from unlatch.plan.memory import (
    CORRECTED,
    PAPER,
    Counting,
    StageMemory,
    StageSize,
    memory_table,
    stage_memory,
    stage_sizes,
)
from unlatch.schedule import one_f_one_b_async, ticked

GB = 1e9


@pytest.fixture(scope="module")
def revnet50_sizes() -> list[StageSize]:
    with torch.device("meta"):
        model = revnet50()
    return stage_sizes(model, (64, 3, 224, 224))


def plan_memory(
    sizes: list[StageSize], setting: str = "nothing", k: int = 1, counting: Counting = CORRECTED
) -> list[StageMemory]:
    """Under PETRA's order and the rules of one of the paper's four settings."""
    rules, schedule = buffer_settings()[setting].rules(), ticked(len(sizes))
    return stage_memory(sizes, rules, schedule, accumulate=k, counting=counting)


def table(sizes: list[StageSize], counting: Counting, k: int = 1) -> dict[str, list[StageMemory]]:
    return {setting: plan_memory(sizes, setting, k, counting) for setting in buffer_settings()}


def totals(sizes: list[StageSize], counting: Counting, k: int = 1) -> list[float]:
    return [sum(stage.kept for stage in stages) / GB for stages in table(sizes, counting, k).values()]


def test_the_papers_table(revnet50_sizes: list[StageSize]) -> None:
    found = totals(revnet50_sizes, PAPER)
    assert [round(total, 1) for total in found] == [44.5, 43.6, 21.2, 20.3]
    assert found == pytest.approx([44.45, 43.58, 21.20, 20.33], abs=0.005)
    assert memory_table(table(revnet50_sizes, PAPER)).splitlines()[2:] == [
        "| inputs+weights | 44.5 | 0.0 % |",
        "| inputs | 43.6 | 2.0 % |",
        "| weights | 21.2 | 52.3 % |",
        "| nothing | 20.3 | 54.3 % |",
    ]


def test_both_streams_counted(revnet50_sizes: list[StageSize]) -> None:
    found = totals(revnet50_sizes, Counting(both_streams=True, stem="paper"))
    assert found[0] == pytest.approx(67.45, abs=0.05)
    assert found[3] == pytest.approx(21.4, abs=0.05)
    assert round(100 * (1 - found[3] / found[0])) == 68


def test_the_stem_in_or_out(revnet50_sizes: list[StageSize]) -> None:
    reread = totals(revnet50_sizes, Counting(both_streams=False, stem="reread"))
    assert reread[0] == pytest.approx(43.1, abs=0.05)
    assert reread[3] == pytest.approx(20.3, abs=0.05)
    assert 100 * (1 - reread[3] / reread[0]) == pytest.approx(52.9, abs=0.05)
    stored = totals(revnet50_sizes, CORRECTED)
    out = totals(revnet50_sizes, Counting(stem="reread"))
    assert [a - b for a, b in zip(stored, out, strict=True)] == pytest.approx([1.31] * 4, abs=0.005)


def test_queues_of_the_papers_models(revnet50_sizes: list[StageSize]) -> None:
    """Gigabytes queued at the stages that are not reversible, the stem first."""
    stages = plan_memory(revnet50_sizes)
    held = {j: round(stage.queue / GB, 2) for j, stage in enumerate(stages, 1) if stage.queue}
    assert held == {1: 1.31, 2: 3.29, 5: 10.69, 9: 3.7, 15: 0.62}
    with torch.device("meta"):
        model = revnet18()
    stages = plan_memory(stage_sizes(model, (64, 3, 224, 224)))
    held = {j: round(stage.queue / GB, 2) for j, stage in enumerate(stages, 1) if stage.queue}
    assert held == {1: 0.69, 4: 1.23, 6: 0.41, 8: 0.1}


def test_a_queue_is_delay_times_input_at_stages_that_are_not_reversible() -> None:
    sizes = stage_sizes(revnet_cifar(14, width=4), (8, 3, 16, 16))
    for size, stage in zip(sizes, plan_memory(sizes), strict=True):
        assert stage.queue == (0 if size.reversible else (stage.in_flight - 1) * size.input_bytes)
    assert [stage.in_flight for stage in plan_memory(sizes)] == [15, 13, 11, 9, 7, 5, 3, 1]


def test_sizes_are_those_of_the_real_tensors() -> None:
    model = IRevNet((1, 2), width=4)
    x: Tensor = torch.randn(3, 3, 8, 8)
    for block, size in zip(model.blocks(), stage_sizes(model, x), strict=True):
        streams = [x] if isinstance(x, Tensor) else list(x)
        assert size.input_bytes == sum(stream.nbytes for stream in streams)
        assert size.stream_bytes == streams[0].nbytes
        assert size.parameter_bytes == sum(p.nbytes for p in block.parameters())
        assert size.buffer_bytes == sum(b.nbytes for b in block.buffers())
        x = block(x)
        outputs = [x] if isinstance(x, Tensor) else list(x)
        assert size.output_bytes == sum(output.nbytes for output in outputs)


def test_looking_at_a_model_changes_nothing() -> None:
    model = revnet_cifar(8, width=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    stage_sizes(model, (4, 3, 8, 8))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tokens_are_sized_by_a_sample() -> None:
    sizes = stage_sizes(RevGPT(vocabulary=5, context=6, depth=1, width=8, heads=2), torch.zeros(2, 6, dtype=torch.long))
    assert [size.input_bytes for size in sizes] == [96, 768, 768]
    assert sizes[-1].output_bytes == 2 * 6 * 5 * 4


def test_stages_of_several_blocks_keep_their_input_unless_all_can_be_inverted() -> None:
    model = RevNet((2, 2), width=4, stem="small", classes=10)  # stem, R, R, down, R, head
    one_each = stage_sizes(model, (8, 3, 16, 16))
    found = stage_sizes(model, (8, 3, 16, 16), starts=[0, 2, 3])
    assert [size.name for size in found] == ["stem", "layer1.1", "layer2.0"]
    assert [size.reversible for size in found] == [False, True, False]
    assert found[2].parameter_bytes == sum(size.parameter_bytes for size in one_each[3:])
    assert [stage.queue for stage in plan_memory(found)] == [4 * one_each[0].input_bytes, 0, 0]
    mixed = stage_sizes(model, (8, 3, 16, 16), starts=[0, 2, 5])
    assert [stage.queue for stage in plan_memory(mixed)] == [
        4 * one_each[0].input_bytes,
        2 * one_each[2].input_bytes,
        0,
    ]


def test_memory_does_not_depend_on_the_number_of_reversible_blocks_per_stage() -> None:
    def queued(blocks: int) -> float:
        model = RevNet((blocks,), width=4, stem="small", classes=10)
        return sum(stage.queue for stage in plan_memory(stage_sizes(model, (8, 3, 8, 8), starts=[0, 1, blocks // 2])))

    assert queued(8) == queued(32) > 0


def test_k_divides_the_parameter_copies() -> None:
    sizes = stage_sizes(revnet_cifar(8, width=4), (8, 3, 8, 8))
    for k, copies in ((1, [8, 6, 4, 2, 0]), (2, [4, 3, 2, 1, 0]), (3, [3, 2, 2, 1, 0]), (100, [1, 1, 1, 1, 0])):
        stages = plan_memory(sizes, "weights", k=k)
        assert [stage.copies // stage.parameters for stage in stages] == copies
    assert totals(sizes, CORRECTED, k=4)[1::2] == totals(sizes, CORRECTED, k=1)[1::2]


def test_other_schedules_have_other_delays() -> None:
    sizes = stage_sizes(revnet_cifar(8, width=4), (8, 3, 8, 8))
    rules = buffer_settings()["weights"].rules()
    alternating = stage_memory(sizes, rules, one_f_one_b_async(5))
    for half, whole in zip(alternating, plan_memory(sizes, "weights"), strict=True):
        assert (2 * half.queue, 2 * half.copies) == (whole.queue, whole.copies)


def test_gradients_optimizer_and_messages_come_on_top() -> None:
    sizes = stage_sizes(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), (32, 4))
    rules = buffer_settings()["nothing"].rules()
    for slots in (0, 2):
        found = stage_memory(sizes, rules, ticked(2), optimizer_slots=slots)
        assert [stage.gradients for stage in found] == [160, 72]
        assert [stage.optimizer for stage in found] == [slots * 160, slots * 72]
        # Three micro-batches are under way, and all of them may lie before the slower stage.
        assert [stage.messages for stage in found] == [3 * 1024, 3 * 1024]
        assert all(stage.total == stage.kept + stage.gradients + stage.optimizer + 3 * 1024 for stage in found)
    weighed = stage_memory(sizes, rules, ticked(2), message_bytes=lambda route: 7 if route[0] == "forward" else 0)
    assert [stage.messages for stage in weighed] == [0, 21]


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(PlanError, match=r"block '1' cannot take an input of shape \(2, 5, 4, 4\): 5 channels"):
        stage_sizes(nn.Sequential(nn.Conv2d(3, 5, 1), Split()), (2, 3, 4, 4))
    with pytest.raises(PlanError, match=r"block '1' cannot take .*\(2, 2, 4, 4\), .*got \(2, 2, 2, 2\)"):
        stage_sizes(nn.Sequential(Split(), Coupling(nn.Conv2d(2, 2, 2, stride=2))), (2, 4, 4, 4))


def test_bad_settings() -> None:
    sizes = stage_sizes(nn.Sequential(nn.Linear(2, 2)), (1, 2))
    rules = buffer_settings()["nothing"].rules()
    with pytest.raises(PlanError, match="2 delays were given for 1 stages"):
        stage_memory(sizes, rules, ticked(1), delays=[1, 0])
    with pytest.raises(PlanError, match="the schedule is for 2 stages, but there are sizes of 1"):
        stage_memory(sizes, rules, ticked(2))
