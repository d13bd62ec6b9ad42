"""The memory planner: the paper's table with the paper's counting, and the corrected one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import ConfigError, PlanError
from unlatch.models.irevnet import IRevNet
from unlatch.models.rev_transformer import RevGPT
from unlatch.models.revnet import RevNet, revnet18, revnet50, revnet_cifar
from unlatch.nn.reversible import Coupling, Split
from unlatch.plan.petra_memory import (
    CORRECTED,
    PAPER,
    SETTINGS,
    Buffers,
    Counting,
    StageSize,
    buffer_table,
    plan_memory,
    stage_sizes,
    stage_table,
    total_bytes,
)

GB = 1e9


@pytest.fixture(scope="module")
def revnet50_sizes() -> list[StageSize]:
    with torch.device("meta"):
        model = revnet50()
    return stage_sizes(model, (64, 3, 224, 224))


def totals(sizes: list[StageSize], counting: Counting, k: int = 1) -> list[float]:
    return [total_bytes(plan_memory(sizes, keep, k=k, counting=counting)) / GB for keep in SETTINGS]


def test_the_papers_table(revnet50_sizes: list[StageSize]) -> None:
    found = totals(revnet50_sizes, PAPER)
    assert [round(total, 1) for total in found] == [44.5, 43.6, 21.2, 20.3]
    assert found == pytest.approx([44.45, 43.58, 21.20, 20.33], abs=0.005)
    assert buffer_table(revnet50_sizes, counting=PAPER).splitlines()[2:] == [
        "| yes | yes | 44.5 | 0.0 % |",
        "| yes | no | 43.6 | 2.0 % |",
        "| no | yes | 21.2 | 52.3 % |",
        "| no | no | 20.3 | 54.3 % |",
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


def test_fifos_of_the_papers_models(revnet50_sizes: list[StageSize]) -> None:
    """Gigabytes at the stages that are not reversible, the stem first."""
    stages = plan_memory(revnet50_sizes)
    held = {j: round(stage.fifo / GB, 2) for j, stage in enumerate(stages, 1) if stage.fifo}
    assert held == {1: 1.31, 2: 3.29, 5: 10.69, 9: 3.7, 15: 0.62}
    with torch.device("meta"):
        model = revnet18()
    stages = plan_memory(stage_sizes(model, (64, 3, 224, 224)))
    held = {j: round(stage.fifo / GB, 2) for j, stage in enumerate(stages, 1) if stage.fifo}
    assert held == {1: 0.69, 4: 1.23, 6: 0.41, 8: 0.1}


def test_fifo_is_delay_times_input_at_stages_that_are_not_reversible() -> None:
    sizes = stage_sizes(revnet_cifar(14, width=4), (8, 3, 16, 16))
    for size, stage in zip(sizes, plan_memory(sizes), strict=True):
        assert stage.fifo == (0 if size.reversible else stage.delay * size.input_bytes)
    assert [stage.delay for stage in plan_memory(sizes)] == [14, 12, 10, 8, 6, 4, 2, 0]


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


def test_stages_of_several_blocks_keep_the_inputs_of_what_cannot_be_inverted() -> None:
    model = RevNet((2, 2), width=4, stem="small", classes=10)  # stem, R, R, down, R, head
    one_each = stage_sizes(model, (8, 3, 16, 16))
    two = stage_sizes(model, (8, 3, 16, 16), starts=[0, 2])
    assert [size.name for size in two] == ["stem", "layer1.1"]
    assert not any(size.reversible for size in two)
    assert two[0].stored_bytes == one_each[0].input_bytes
    assert two[1].stored_bytes == one_each[3].input_bytes + one_each[5].input_bytes
    assert two[1].parameter_bytes == sum(size.parameter_bytes for size in one_each[2:])
    assert [stage.fifo for stage in plan_memory(two)] == [2 * one_each[0].input_bytes, 0]


def test_memory_does_not_depend_on_the_number_of_reversible_blocks_per_stage() -> None:
    def fifo(blocks: int) -> int:
        model = RevNet((blocks,), width=4, stem="small", classes=10)
        return sum(stage.fifo for stage in plan_memory(stage_sizes(model, (8, 3, 8, 8), starts=[0, 1, blocks // 2])))

    assert fifo(8) == fifo(32) > 0


def test_k_divides_the_parameter_copies() -> None:
    sizes = stage_sizes(revnet_cifar(8, width=4), (8, 3, 8, 8))
    keep = Buffers(inputs=False, parameters=True)
    for k, copies in ((1, [8, 6, 4, 2, 0]), (2, [4, 3, 2, 1, 0]), (3, [3, 2, 2, 1, 0]), (100, [1, 1, 1, 1, 0])):
        stages = plan_memory(sizes, keep, k=k)
        assert [stage.copies // stage.parameters for stage in stages] == copies
    assert totals(sizes, CORRECTED, k=4)[1::2] == totals(sizes, CORRECTED, k=1)[1::2]


def test_other_schedules_have_other_delays() -> None:
    sizes = stage_sizes(revnet_cifar(8, width=4), (8, 3, 8, 8))
    ticked, alternating = plan_memory(sizes), plan_memory(sizes, delays=[4, 3, 2, 1, 0])
    assert [2 * stage.fifo for stage in alternating] == [stage.fifo for stage in ticked]


def test_stage_table_has_a_line_per_stage() -> None:
    stages = plan_memory(stage_sizes(revnet_cifar(8, width=4), (8, 3, 8, 8)))
    lines = stage_table(stages).splitlines()
    assert len(lines) == 2 + len(stages)
    assert lines[2].startswith("| stem | 8 |")
    assert {line.count("|") for line in lines} == {9}


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(PlanError, match=r"block '1' cannot take an input of shape \(2, 5, 4, 4\): 5 channels"):
        stage_sizes(nn.Sequential(nn.Conv2d(3, 5, 1), Split()), (2, 3, 4, 4))
    with pytest.raises(PlanError, match=r"block '1' cannot take .*\(2, 2, 4, 4\), .*got \(2, 2, 2, 2\)"):
        stage_sizes(nn.Sequential(Split(), Coupling(nn.Conv2d(2, 2, 2, stride=2))), (2, 4, 4, 4))


def test_bad_settings() -> None:
    sizes = stage_sizes(nn.Sequential(nn.Linear(2, 2)), (1, 2))
    with pytest.raises(ConfigError, match="1 or more, got 0"):
        plan_memory(sizes, k=0)
    with pytest.raises(PlanError, match="2 delays were given for 1 stages"):
        plan_memory(sizes, delays=[1, 0])
