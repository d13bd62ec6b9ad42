"""`compile=`: the results of a run without it within rounding, each shape once, and what cannot be compiled refused."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import compile_jobs
import unlatch
from compile_jobs import resumed, same, trained
from rank_jobs import plain_sgd
from recording import feed
from rev_nets import rev_run
from small_nets import tanh_net, vectors
from tied_nets import LENGTH, WORDS, TiedLM
from unlatch.errors import CompileFailed, ConfigError, StageFailed
from unlatch.nn.compiled import MOST_SHAPES

#: A graph that is used at once, graphs of several batches, inputs, predictions, own losses.
METHODS = ("bp", "1f1b", "pipedream", "fdg", "dtr", "dtrp", "petra", "dgl")


@pytest.fixture
def graphs():
    """The number of nodes of every graph that the backend "noted" was given."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    seen: list[int] = []

    def noted(graph, inputs):
        seen.append(len(graph.graph.nodes))
        return graph.forward

    register_backend(noted, name="noted")
    yield seen
    del _COMPILER_FNS["noted"]


def close(one: compile_jobs.Outcome, other: compile_jobs.Outcome) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one[1], other[1], rtol=1e-3, atol=1e-4)


def small(method: Any = "bp", **options: Any) -> unlatch.Run:
    settings = {"loss_fn": mse_loss, "optimizer": plain_sgd, "split": ["1"], "compile": "noted"}
    return unlatch.parallelize(tanh_net(2), method, stages=2, **{**settings, **options})


# ---------------------------------------------------------------------------------- results


@pytest.mark.parametrize("method", METHODS)
def test_results_are_those_without_within_rounding(method):
    """Dropout, batch norm that counts once, and a short batch included."""
    found, expected = trained(method), trained(method, compile=False)
    close(found, expected)
    counts = {key: int(t) for key, t in found[1].items() if key.endswith("num_batches_tracked")}
    assert set(counts.values()) == {len(compile_jobs.SIZES)}


def test_micro_batches():
    close(trained("1f1b", microbatches=3), trained("1f1b", microbatches=3, compile=False))


@pytest.mark.parametrize("method", ["1f1b", "dtr"])
def test_replicas(method):
    """Each replica of a stage has code of its own."""
    close(trained(method, replicas=2), trained(method, replicas=2, compile=False))


def test_half_precision():
    """Where numbers have 8 bits, rounding is another word."""
    found, expected = (trained("pipedream", precision="bf16", compile=way) for way in (compile_jobs.BACKEND, False))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=0.1, atol=1e-2)


@pytest.mark.parametrize("method", ["pipedream", "dtr"])
def test_resume_is_exact(method, tmp_path):
    expected = trained(method, str(tmp_path / "checkpoint"))
    assert same(resumed(method, str(tmp_path / "checkpoint")), expected)


@pytest.mark.parametrize("method", ["pipedream", "dtr"])
def test_tied_weights_and_skips_pass_through(method):
    def outcome(compile: bool | str) -> compile_jobs.Outcome:
        torch.manual_seed(0)
        run = unlatch.parallelize(
            TiedLM(),
            method,
            stages=2,
            split=["layers.1"],
            loss_fn=lambda y, t: cross_entropy(y.flatten(0, 1), t.flatten()),
            optimizer=plain_sgd,
            compile=compile,
        )
        words = torch.randint(WORDS, (5, 4, LENGTH), generator=torch.Generator().manual_seed(3))
        steps = [run.step(x, x) for x in words] + run.flush()
        return [s.loss for s in steps if s.loss is not None], dict(run.module().state_dict())

    close(outcome(compile_jobs.BACKEND), outcome(False))


def test_blocks_may_write_into_their_input_and_the_input_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    run = unlatch.parallelize(
        model, "dtr", stages=2, split=["2"], loss_fn=mse_loss, optimizer=plain_sgd, compile=compile_jobs.BACKEND
    )
    x = torch.randn(6, 4)
    before = x.clone()
    for _ in range(4):
        run.step(x, torch.zeros(6, 2))
    assert torch.equal(x, before)


def test_evaluation_runs_uncompiled(graphs):
    run = small()
    data = vectors(1)
    run.evaluate(data)
    assert graphs == []
    run.step(*data[0])
    assert len(graphs) == 2


# ----------------------------------------------------------------------------------- shapes


def test_each_shape_of_each_stage_is_compiled_once(graphs):
    run = small()
    for x, y in vectors(3) + vectors(2, size=4) + vectors(2) + vectors(1, size=4):
        run.step(x, y)
    assert len(graphs) == 2 * 2


def test_a_stage_that_runs_twice_has_code_with_and_without_a_graph(graphs):
    run = small("dtr")
    for x, y in vectors(6):
        run.step(x, y)
    run.flush()
    assert len(graphs) == 3


def test_beyond_the_most_shapes_stages_run_uncompiled_and_say_so(graphs, caplog):
    sizes = range(2, 2 + MOST_SHAPES + 3)
    data = [batch for size in sizes for batch in vectors(1, size=size)]
    run, plain = small(), small(compile=False)
    with caplog.at_level(logging.WARNING, "unlatch"):
        losses = [run.step(x, y).loss for x, y in data]
    assert len(graphs) == 2 * MOST_SHAPES
    told = [note for note in run.notes if f"has code for {MOST_SHAPES} shapes" in note]
    assert [note.split(" has")[0] for note in told] == ["stage 0", "stage 1"]
    assert sum(f"has code for {MOST_SHAPES} shapes" in record.getMessage() for record in caplog.records) == 2
    torch.testing.assert_close(losses, [plain.step(x, y).loss for x, y in data])


def test_compiled_and_uncompiled_graphs_of_one_stage_bear_each_other(monkeypatch):
    """Batch norm counts in both while graphs of both kinds wait for their backward."""
    monkeypatch.setattr("unlatch.nn.compiled.MOST_SHAPES", 1)
    close(trained("pipedream"), trained("pipedream", compile=False))


def test_which_shapes_have_code_is_part_of_the_state(graphs, tmp_path):
    """After a resume a shape that came too late must not get code because others have not come yet."""
    run = small()
    for size in range(2, 2 + MOST_SHAPES + 1):
        run.step(*vectors(1, size=size)[0])
    run.save(tmp_path / "checkpoint")
    again = small()
    again.load(tmp_path / "checkpoint")
    before = len(graphs)
    again.step(*vectors(1, size=2 + MOST_SHAPES)[0])
    assert len(graphs) == before
    again.step(*vectors(1, size=2)[0])
    assert len(graphs) == before + 2


class Scaled(nn.Module):
    """Takes a number beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5).double()

    def forward(self, state: dict[str, Any]) -> Tensor:
        return self.inner(state["x"]) * state["by"]


def scaled(method: str, asked: bool | str | dict[str, Any]) -> unlatch.Run:
    torch.manual_seed(0)
    return unlatch.parallelize(
        nn.Sequential(Scaled(), nn.Linear(5, 5).double()),
        method,
        stages=2,
        split=["1"],
        loss_fn=mse_loss,
        optimizer=plain_sgd,
        compile=asked,
    )


@pytest.mark.parametrize("method", ["bp", "dtr"])
def test_numbers_beside_tensors_are_part_of_the_shape(graphs, method):
    """Torch makes code for each of them, and gives up at the ninth."""
    run, plain = scaled(method, "noted"), scaled(method, False)
    batches = [({"x": x, "by": by}, y) for by, (x, y) in enumerate(vectors(MOST_SHAPES + 3), start=1)]
    losses = [step.loss for step in [run.step(x, y) for x, y in batches] + run.flush()]
    torch.testing.assert_close(losses, [step.loss for step in [plain.step(x, y) for x, y in batches] + plain.flush()])
    told = [note for note in run.notes if f"has code for {MOST_SHAPES} shapes" in note]
    assert [note.split(" has")[0] for note in told] == ["stage 0"]
    first, second = ({"bp": (1, 1), "dtr": (2, 1)})[method]
    assert len(graphs) == first * MOST_SHAPES + second


def test_dynamic_shapes_share_code(graphs):
    run = small(compile={"backend": "noted", "dynamic": True})
    for size in range(2, 2 + MOST_SHAPES + 3):
        run.step(*vectors(1, size=size)[0])
    assert len(graphs) == 2
    assert run.notes == small(compile=False).notes


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("zb-h1", "zb-h1 does the two halves of a backward apart"),
        (unlatch.methods.get("fdg", weights="latest"), 'fdg gives a kept graph other weights \\(weights="latest"\\)'),
        (unlatch.methods.get("auxnet", form="lagrangian", multiplier="rebuild"), "auxnet goes backward twice"),
        (unlatch.methods.get("layerpipe", mode="stages", weights="average"), 'weights="average"'),
        (unlatch.methods.get("layerpipe", mode="stages", split_backward=True), "two halves of a backward apart"),
    ],
)
def test_methods_that_take_apart_what_is_compiled_are_refused(method, said):
    with pytest.raises(ConfigError, match=f"^compile: .*{said}"):
        small(method, compile="aot_eager")


class Shift(nn.Module):
    """A block with an inverse that is no coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def inverse(self, y: Tensor) -> Tensor:
        return y - self.by


def test_stages_that_compute_their_input_back_are_refused():
    model = nn.Sequential(nn.Linear(5, 5), Shift(), nn.Linear(5, 5)).double()
    settings = {"stages": 3, "split": ["1", "2"], "loss_fn": mse_loss, "optimizer": plain_sgd, "compile": "eager"}
    with pytest.raises(ConfigError, match="petra computes inputs back from outputs"):
        unlatch.parallelize(model, "petra", **settings)


@pytest.mark.parametrize("method", ["petra", "bp"])
def test_couplings_are_refused(method):
    with pytest.raises(ConfigError, match=f"{method} would train reversible couplings, which draw"):
        rev_run("SRH", method, plain_sgd, compile="aot_eager")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "compile is empty"),
        (3, "compile must be True, the name of a backend or a dict of backend, mode"),
        ("inducktor", "no backend 'inducktor'.* Did you mean 'inductor'"),
        ({"backend": "aot_eager", "full_graph": True}, "compile has no 'full_graph'. Did you mean 'fullgraph'"),
        ({"fullgraph": "yes"}, "fullgraph must be a bool, got 'yes'"),
        ({"mode": "fastest"}, "there is no mode 'fastest'"),
        ({"backend": "aot_eager", "mode": "default"}, "only 'inductor' has modes"),
        ({"mode": "reduce-overhead"}, "CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
        ("cudagraphs", "CUDA graphs"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_makes_no_sense_is_refused(asked, said):
    with pytest.raises(ConfigError, match=said):
        small(compile=asked)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_machine_without_a_compiler_is_told_before_anything_runs():
    from torch._inductor import config

    said = r"needs a C\+\+ compiler, and finds none on this machine"
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError, match=said):
        small(compile=True)


# ---------------------------------------------------------------------------------- failures


class Printing(nn.Module):
    """Breaks a graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


# A broken graph passes on tensors that are no leaves, which torch looks at.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_graph_breaks_are_errors_that_say_what_to_do_and_may_be_allowed():
    blocks = nn.Sequential(nn.Linear(5, 5), nn.Sequential(Printing(), nn.Linear(5, 5))).double()

    def run(asked: Any) -> unlatch.Run:
        return unlatch.parallelize(
            blocks, "bp", stages=2, split=["1"], loss_fn=mse_loss, optimizer=plain_sgd, compile=asked
        )

    with pytest.raises(CompileFailed, match=r'stage 1 cannot be compiled .*compile=\{"fullgraph": False\}'):
        run("eager").step(*vectors(1)[0])
    assert run({"backend": "eager", "fullgraph": False}).step(*vectors(1)[0]).loss is not None


class Counting(nn.Module):
    """Counts how often it was called, in Python."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


# Torch tells on its own, too, what it compiled too often.
@pytest.mark.filterwarnings("ignore:torch._dynamo hit config.recompile_limit")
def test_a_python_value_that_changes_is_named_as_what_cannot_be_compiled():
    blocks = nn.Sequential(nn.Linear(5, 5), Counting(), nn.Linear(5, 5)).double()
    run = unlatch.parallelize(
        blocks, "bp", stages=2, split=["1"], loss_fn=mse_loss, optimizer=plain_sgd, compile="eager"
    )
    with pytest.raises(CompileFailed, match=r"stage 1 cannot be compiled .*A Python value .*a buffer") as caught:
        feed(run, vectors(MOST_SHAPES + 4))
    assert "another backend" not in str(caught.value)


def test_a_backend_that_fails_is_named():
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    def broken(graph, inputs):
        raise OSError("no room for code")

    register_backend(broken, name="broken")
    try:
        with pytest.raises(CompileFailed, match=r"stage 0 cannot be compiled \(backend 'broken'\).*no room for code"):
            small(compile="broken").step(*vectors(1)[0])
    finally:
        del _COMPILER_FNS["broken"]


def test_mistakes_of_the_model_are_told_as_without():
    def fails(compile: bool | str) -> str:
        torch.manual_seed(0)
        run = unlatch.parallelize(
            nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2)),
            "bp",
            stages=2,
            split=["1"],
            loss_fn=mse_loss,
            optimizer=plain_sgd,
            compile=compile,
        )
        with pytest.raises(StageFailed) as caught:
            run.step(torch.zeros(2, 4), torch.zeros(2, 2))
        return str(caught.value)

    assert fails("eager") == fails(False)


# ------------------------------------------------------------------------------------ inductor


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and g++ is not here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_gives_the_results_without_within_rounding_dropout_included():
    def outcome(compile: bool) -> compile_jobs.Outcome:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)), nn.Linear(4, 5))
        run = unlatch.parallelize(
            model, "dtr", stages=2, split=["1"], loss_fn=mse_loss, optimizer=plain_sgd, compile=compile
        )
        data = [(x.float(), y.float()) for x, y in vectors(4)]
        steps = [run.step(x, y) for x, y in data] + run.flush()
        return [s.loss for s in steps if s.loss is not None], dict(run.module().state_dict())

    close(outcome(True), outcome(False))
