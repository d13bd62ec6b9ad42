"""Unusual models, batches and settings, to be run inline and on ranks alike."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import unlatch
from rank_jobs import Outcome, conv_run, copied_state, falling_lr, momentum_sgd
from recording import feed, stages_of, taking
from small_nets import CONV_SPLITS, conv_net, images, tanh_net, vectors
from unlatch.transport.mail import BACKWARD

NAMES = ["bp", "1f1b", "zb-h1", "pipedream", "dtrp"]


def outcome(run: unlatch.Run, data: list[Any], **more: Any) -> Outcome:
    """Train, close, and tell what must not depend on where it ran."""
    with run:
        steps = [(r.step, r.batch, r.loss) for r in feed(run, data)]
        evaluation = run.evaluate(data[:2])
        state = copied_state(run.module())
    return {"steps": steps, "evaluation": evaluation, "state": state, **more}


def for_each(job: Any, names: list[str], *args: Any) -> dict[str, Any]:
    """One call to the ranks for many runs."""
    return {name: job(name, *args) for name in names}


# ---------------------------------------------------------------------------------------------- batches


def odd_batches(name: str, sizes: tuple[int, ...]) -> Outcome:
    return outcome(conv_run(name, 2), images(list(sizes)))


def data_only_where_it_is_read(name: str) -> Outcome:
    """Ranks that do not hold stage 0 pass no data."""
    data = images([8, 8, 3])
    run = conv_run(name, 2)
    if 0 not in run.stations:
        data = [(None, None)] * len(data)
    with run:
        steps = [(r.step, r.batch, r.loss) for r in feed(run, data)]
        state = copied_state(run.module())
    return {"steps": steps, "state": state}


def reused_buffers(name: str) -> Outcome:
    """The caller keeps one buffer for all targets, and writes the next batch into it as soon as step() returns."""
    run, target = conv_run(name, 2), torch.zeros(8, dtype=torch.int64)
    steps = []
    with run:
        for x, y in images([8] * 6):
            target.copy_(y)
            steps.append(run.step(x, target))
            target.zero_()
        steps += run.flush()
        state = copied_state(run.module())
    return {"steps": [(r.step, r.batch, r.loss) for r in steps], "state": state}


def accumulates(name: str) -> Outcome:
    """Three batches per update; the pipeline is emptied in the middle of an accumulation, twice, and goes on."""
    data = images([8] * 11)
    steps = []
    with conv_run(unlatch.methods.get(name, accumulate=3, microbatches=2), 2) as run:
        for part in (data[:4], data[4:9], data[9:]):
            steps += feed(run, part)
            steps += run.flush()  # nothing is left to do
        state = copied_state(run.module())
        updates = [s.updates for s in run.statistics()]
    return {"steps": [(r.step, r.batch, r.loss) for r in steps], "updates": updates, "state": state}


def leaves_early(name: str) -> list[str]:
    """Close a run with batches under way, and say which of its threads are left."""
    with conv_run(name, 2) as run:
        for x, y in images([8] * 3):
            run.step(x, y)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("unlatch")]


def evaluates_first(name: str) -> dict[str, Any]:
    with conv_run(name, 2) as run:
        before = copied_state(run.module())
        found = run.evaluate(images([7, 1, 30], seed=2))
        return {"evaluation": found, "before": before, "after": copied_state(run.module())}


# ----------------------------------------------------------------------------------------------- models


def frozen_stage(name: str, frozen: int) -> Outcome:
    model = conv_net()
    for block in (model[0], model[1]) if frozen == 0 else (model[2], model[3]):
        block.requires_grad_(False)
    run = unlatch.parallelize(
        model, name, stages=2, loss_fn=cross_entropy, optimizer=momentum_sgd, split=CONV_SPLITS[2], clip_grad_norm=0.5
    )
    return outcome(run, images([8, 8, 8, 8]))


def parameter_free_stage(name: str, free: int) -> Outcome:
    """A stage without parameters below, between or above those that have some."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 5)]
    blocks.insert(free, nn.Sequential(nn.Dropout(0.3), nn.Softplus()))
    model = nn.Sequential(*blocks).double()
    run = unlatch.parallelize(
        model, name, stages=3, loss_fn=mse_loss, optimizer=momentum_sgd, lr_scheduler=falling_lr, split=["1", "2"]
    )
    return outcome(run, vectors(5))


class Spread(nn.Module):
    """One tensor in; a nested tree of many dtypes out, with constants in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {
            "h": h,
            "positive": h > 0,
            "order": h.argsort(1),
            "pair": (h[:, :2], [h.to(torch.bfloat16), None, 3]),
            "angle": torch.polar(torch.ones_like(h), h),
            "wide": h.detach().repeat(1, 300),
        }


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, tree: dict[str, Any]) -> Tensor:
        left, (small, nothing, count) = tree["pair"]
        assert nothing is None
        h = torch.where(tree["positive"], tree["h"], tree["h"].gather(1, tree["order"]))
        total = h + left.sum(1, keepdim=True) * count + small.double() + tree["angle"].real + tree["angle"].imag
        return self.linear(total) + tree["wide"].mean()


def tree_activations(name: str) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(Spread(), Gather()).double()
    run = unlatch.parallelize(model, name, stages=2, loss_fn=mse_loss, optimizer=momentum_sgd, split=["1"])
    return outcome(run, vectors(5))


class Witness(nn.Module):
    """Passes its input on and writes down how it lies in memory, and how its gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], str]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append((x.stride(), str(x.dtype)))
        return x


def watched_activations(name: str, precision: str = "fp32") -> dict[str, Any]:
    """Strides and dtypes that stage 1 sees, and those of the gradients that come back to stage 0."""
    model, witness = conv_net(), Witness()
    chain = [model[0], model[1], nn.Sequential(witness, model[2]), model[3]]
    run = unlatch.parallelize(
        chain, name, stages=2, loss_fn=cross_entropy, optimizer=momentum_sgd, split=["2"], precision=precision
    )
    with taking() as taken:
        result = outcome(run, images([8, 8, 3]))
    gradients = [message.payload[0][0].stride() for message in taken if (message.kind, message.stage) == (BACKWARD, 0)]
    return {"activations": witness.seen, "gradients": gradients, "outcome": result}


class Slices(nn.Module):
    """Returns views with lateness, overlaps and swapped dimensions, which no wire carries as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x)
        return h[:, ::2], h[:, :1].expand(-1, 4), h.t()


class Combine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        a, b, c = parts
        return self.linear(a @ torch.ones(4, 4, dtype=a.dtype) + b * c[:4].t())


def strided_activations(name: str) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(Slices(), Combine()).double()
    run = unlatch.parallelize(model, name, stages=2, loss_fn=mse_loss, optimizer=momentum_sgd, split=["1"])
    return outcome(run, vectors(5))


def bf16(name: str) -> Outcome:
    return outcome(conv_run(name, 2, precision="bf16"), images([8, 8, 8, 3]))


def compensated(m: int) -> Outcome:
    method = unlatch.methods.DTRP(microbatches=2, compensate=m, compensate_lr="linear", compensate_warmup=3)
    run = unlatch.parallelize(tanh_net(3), method, stages=3, loss_fn=mse_loss, optimizer=momentum_sgd, split=["1", "2"])
    return outcome(run, vectors(7))


# -------------------------------------------------------------------------------------------------- fit


def fits(name: str, compensate: int = 1) -> dict[str, Any]:
    """Three epochs with a DataLoader that only the first rank has, and a short last batch."""
    method = unlatch.methods.DTRP(compensate=compensate) if compensate > 1 else name
    run = conv_run(method, 2)
    seen: list[Any] = []

    class Seen(unlatch.callbacks.Callback):
        def on_step(self, trainer: unlatch.Trainer, result: unlatch.StepResult) -> None:
            seen.append(result)

    loader = held_out = None
    if 0 in run.stations:
        x, y = images([29])[0]
        shuffled = torch.Generator().manual_seed(4)
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=shuffled)
        held_out = DataLoader(TensorDataset(*images([10], seed=2)[0]), batch_size=4)
    with run:
        epochs = unlatch.Trainer(run, callbacks=[Seen()]).fit(loader, epochs=3, eval_loader=held_out)
        state = copied_state(run.module())
    return {
        "epochs": [(e.epoch, e.loss, e.samples, e.evaluation) for e in epochs],
        "steps": [(s.step, s.batch, s.loss) for s in seen],
        "state": state,
    }


# ------------------------------------------------------------------------------------------ checkpoints


def saves_and_goes_on(name: str, path: str) -> dict[str, Any]:
    """Train, save, and train on: what a resumed run must reproduce."""
    data = images([12] * 8)
    with conv_run(name, 2) as run:
        for x, y in data[:4]:
            run.step(x, y)
        run.save(path, exact=False)
        saved = copied_state(run.module())
        evaluation = run.evaluate(images([9], seed=2))
        rates = learning_rates(run)
        later = outcome(run, data[4:])
    return {"saved": saved, "evaluation": evaluation, "rates": rates, "later": later}


def resumes(name: str, path: str, stages: int = 2) -> dict[str, Any]:
    data = images([12] * 8)
    with conv_run(name, stages) as run:
        run.load(path)
        found = copied_state(run.module())
        evaluation = run.evaluate(images([9], seed=2))
        rates = learning_rates(run)
        later = outcome(run, data[4:])
    return {"saved": found, "evaluation": evaluation, "rates": rates, "later": later}


def learning_rates(run: unlatch.Run) -> set[float]:
    return {stage.updater.optimizer.param_groups[0]["lr"] for stage in stages_of(run)}


def cannot_save(folder: str) -> str:
    """A file stands where the checkpoint should go; every rank must hear of it."""
    Path(folder, "taken").write_text("x")
    with conv_run("dtr", 2) as run:
        run.step(*images([8])[0])
        try:
            run.save(Path(folder, "taken"))
        except unlatch.errors.CheckpointMismatch as error:
            text = str(error)
        run.step(*images([8])[0])  # the run is unharmed
    return text


def measures(name: str, stages: int) -> list[tuple[int, int, float, float]]:
    with conv_run(unlatch.methods.get(name, microbatches=1), stages) as run:
        feed(run, images([4] * 40))
        return [(s.stage, s.updates, s.staleness, s.predicted_staleness) for s in run.statistics()]
