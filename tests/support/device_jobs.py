"""Jobs on a device that is not there, in processes of their own: a device of torch cannot be taken away again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import fake_device
import order_jobs
import resume_jobs
import unlatch
from unlatch.cli.prepare import make_run, prepare
from unlatch.cli.settings import read_settings
from unlatch.data.loader import Loader
from unlatch.data.tensors import TensorData
from unlatch.nn.device import Accelerator, find_device
from unlatch.transport import lanes
from unlatch.transport.lanes import BACKENDS, Backend, Lanes
from unlatch.transport.mail import Message
from unlatch.transport.staging import Leaving, Staging
from unlatch.transport.wire import Reader, Writer


def on_fake(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do a job where `device="auto"` finds the fake device, of which every process has one."""
    fake_device.install()
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    fake_device.counts.clear()
    return job(*args, **kwargs)


def counted(job: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
    """The same, and what the device counted meanwhile."""
    return on_fake(job, *args, **kwargs), dict(fake_device.counts)


def counted_inline(job: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, int]] | None:
    """The same in one process, on the first rank only."""
    return counted(job, *args, distributed=False) if int(os.environ["RANK"]) == 0 else None


def on_first(job: Callable[..., Any], *args: Any) -> Any:
    """Do a job, that of one process, on the first rank only."""
    return on_fake(job, *args) if int(os.environ["RANK"]) == 0 else None


def waits_in_steps_unchecked(method: str, batches: int) -> dict[str, int]:
    """The same where nobody asks whether values are finite."""
    return waits_in_steps(method, batches, nonfinite="ignore")


def waits_in_steps(method: str, batches: int, **options: Any) -> dict[str, int]:
    """How often the host waits for the device in steps that nobody looks at."""
    fake_device.install()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    run = unlatch.parallelize(
        net,
        method,
        stages=2,
        split=["2"],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        device="fake",
        distributed=False,
        **options,
    )
    data = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(batches)]
    for x, y in data:
        run.step(x, y)
    fake_device.counts.clear()
    for x, y in data:
        run.step(x, y)
    found = dict(fake_device.counts)
    run.close()
    return found


def resumed_wrongly(cases: Sequence[str], folder: str, distributed: bool | None = None) -> list[str]:
    """Cases that do not go on from a checkpoint with batches under way as if they had never stopped."""
    wrong = []
    for case in cases:
        path = f"{folder}/{case}"
        before = resume_jobs.unbroken(case, 1, path, distributed)
        if not resume_jobs.same(before, resume_jobs.continued(case, 1, path, distributed)):
            wrong.append(case)
    return wrong


def drained_wrongly(cases: Sequence[str], folder: str) -> list[str]:
    """Cases that do not go on from a drained checkpoint, whose optimizer goes by names, as the run that wrote it."""
    wrong = []
    for case in cases:
        adam = partial(torch.optim.AdamW, lr=0.01)
        with begun_with(case, adam) as run, begun_with(case, adam) as other:
            resume_jobs.feed(run, 0, 5)
            run.save(f"{folder}/{case} drained", exact=False)
            other.load(f"{folder}/{case} drained")
            if not resume_jobs.same(resume_jobs.ended(run), resume_jobs.ended(other)):
                wrong.append(case)
    return wrong


def begun_with(case: str, optimizer: Any) -> unlatch.Run:
    """A run of a chain with another optimizer than `begun` gives it."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    loss = nn.functional.mse_loss
    return unlatch.parallelize(
        net,
        case,
        stages=3,
        split=["1", "3"],
        loss_fn=loss,
        optimizer=optimizer,
        sample=order_jobs.data()[0],
        distributed=False,
    )


def places(method: str) -> dict[str, Any]:
    """Where things are while a run lasts, and afterwards."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    before = [p.detach().clone() for p in net.parameters()]
    run = unlatch.parallelize(
        net,
        method,
        stages=2,
        split=["2"],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
        distributed=False,
    )
    for _ in range(4):
        result = run.step(torch.randn(8, 4), torch.randn(8, 2))
    run.flush()
    stages = [s.stage for s in run.stations.values() if s.stage is not None]
    moments = [t for o in run.optimizers.values() for s in o.state.values() for k, t in s.items() if k != "step"]
    statistics = run.statistics()
    return {
        "stages": {str(p.device) for stage in stages for p in stage.module.parameters()},
        "moments": {str(t.device) for t in moments},
        "untouched": all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)),
        "given back": run.module() is net and {str(p.device) for p in net.parameters()},
        "trained": not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)),
        "loss": type(result.loss).__name__,
        "busy": all(s.busy_seconds > 0 for s in statistics),
    }


def pinned_batches() -> tuple[bool, dict[str, int]]:
    """Whether batches of the loader lie in pinned memory, and what moving one to the device costs."""
    data = TensorData(torch.arange(12.0).reshape(6, 2), torch.arange(6), classes=6)
    x, y = Loader(data, batch_size=3, pin_memory=True).batch(0, 1)
    fake_device.counts.clear()
    moved = find_device("fake").here((x, y))
    waits = {name: count for name, count in fake_device.counts.items() if name.startswith("waits")}
    right = torch.equal((moved[0] + 0).cpu(), data.x[3:]) and torch.equal((moved[1] + 0).cpu(), data.y[3:])
    return x.is_pinned() and y.is_pinned() and right, waits


# ------------------------------------------------------------------------ staging, step by step


class _Careless(Staging):
    """Staging that leaves out one thing."""

    def __init__(self, device: Accelerator, forgotten: str) -> None:
        super().__init__(device)
        self.forgotten = forgotten
        if forgotten == "leaving waits for the compute stream":
            self._out.wait_stream = lambda stream: None  # type: ignore[method-assign]

    def leaving(self, message: Message) -> Leaving:
        found = super().leaving(message)
        if self.forgotten == "the sender waits for the copy":
            found._there = None
        if self.forgotten == "tensors stay until they are copied":
            found._source.clear()
        return found

    def _landed(self, t: Tensor) -> Tensor:
        flight = self._flights.get(t)
        if flight is None:
            return super()._landed(t)
        if self.forgotten == "the compute stream waits for the arrival":
            return flight.tensor
        if self.forgotten == "memory is lent to the compute stream":
            fake_device.current_stream().wait_event(flight.there)
            return flight.tensor
        return super()._landed(t)

    def arriving(self, message: Message) -> Message:
        found = super().arriving(message)
        if self.forgotten == "buffers stay until they are read":
            self._read.clear()
        return found


def sent_and_received(forgotten: str = "") -> str:
    """Send a tensor that was computed just now to the same process, and compute with it.

    **Returns:** what goes wrong.
    """
    fake_device.install()
    device = find_device("fake")
    assert isinstance(device, Accelerator)
    staging, writer, reader = _Careless(device, forgotten), Writer(), Reader(0)
    for _ in range(3):
        given, target = torch.randn(2000), torch.arange(2000)
        x = device.here(given) * 2
        try:
            scalars: Any = {"loss": device.reading(x.sum())}
            outgoing = staging.leaving(Message("forward", 1, payload=({"x": x}, target), scalars=scalars))
            del x
            sealed = writer.seal(outgoing.on_host())
            envelope = reader.envelope(reader.head(sealed.header), sealed.body, staging.room)
            for to, block in zip(envelope.blocks, sealed.blocks, strict=True):
                to.copy_(block)
            del outgoing, sealed
            message = staging.arriving(envelope.message())
            del envelope
            state, arrived = staging.landed(message.payload)
            assert message.scalars is not None
            loss = message.scalars["loss"]
            del message
            result = state["x"] + 1
            if not (torch.equal(result.cpu(), given * 2 + 1) and loss == float((given * 2).sum())):
                return "garbage"
            if arrived.device.type != "cpu" or not torch.equal(arrived, target):
                return "the target left the host"
        except fake_device.Race as race:
            return f"race: {race}"
    return ""


# --------------------------------------------------------------------------- lanes, step by step


class _FakeNCCL:
    """A group of this process alone, with a stream of its own as NCCL has one, on which tensors are copied.

    Whoever posts something waits on the stream that his thread has on the device of the tensors.
    """

    def __init__(self) -> None:
        self.stream = fake_device.Stream()
        self.posted: list[tuple[Tensor, fake_device.Event]] = []

    def isend(self, t: Tensor, peer: int, group: Any) -> Any:
        ready = fake_device.Event()
        ready.record(self._side_stream(t))
        self.posted.append((t, ready))
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, t: Tensor, peer: int, group: Any) -> Any:
        source, ready = self.posted.pop(0)
        beside = self._side_stream(t)
        self.stream.wait_stream(beside)
        self.stream.wait_event(ready)
        t.record_stream(self.stream)  # type: ignore[arg-type]
        with fake_device.stream(self.stream):
            t.copy_(source)
        over = fake_device.Event()
        over.record(self.stream)
        return SimpleNamespace(wait=lambda: beside.wait_event(over))

    def _side_stream(self, t: Any) -> fake_device.Stream:
        found = fake_device.current_stream(t.memory.owner.device)
        if found in fake_device._defaults:
            raise fake_device.Race("the stream that computes would wait for the other rank")
        return found


class _CarelessLanes(Lanes):
    """Lanes that leave out one thing."""

    def __init__(self, device: Accelerator, forgotten: str) -> None:
        super().__init__(device)
        self.forgotten = forgotten

    def _known(self, t: Tensor, *, forget: bool) -> Tensor:
        if self.forgotten == "the compute stream waits for the arrival" and forget:
            return t
        if self.forgotten == "copies of what is under way wait for it" and not forget:
            return t
        if self.forgotten == "memory is lent to the compute stream":
            if (there := self._arrivals.get(t)) is not None:
                self.module.current_stream(self.device.torch).wait_event(there)
            return t
        return super()._known(t, forget=forget)


def _on_a_thread(work: Callable[[], Any]) -> Any:
    """Do it on a new thread, which means the first device when it names none."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


def sent_over_a_lane(forgotten: str = "") -> str:
    """Send a tensor that was computed just now over a lane to the same process, and compute with it.

    All of it on the second device, and what a run does on other threads on threads that were never told of it.

    **Returns:** what goes wrong.
    """
    fake_device.install(devices=2)
    device = find_device("fake:1")
    assert isinstance(device, Accelerator)
    nccl, before = _FakeNCCL(), lanes.dist
    lanes.dist = nccl  # type: ignore[assignment]
    try:
        there, writer, reader = _CarelessLanes(device, forgotten), Writer(), Reader(0)
        there._groups = {(0, 0): nccl}  # type: ignore[dict-item]
        _on_a_thread(lambda: there._try_out(nccl, (0, 0)))  # type: ignore[arg-type]
        nccl.posted.clear()
        lane = there.to(0)
        if forgotten == "the lane waits for the compute stream":
            lane._out.wait_event = lambda event: None
        for number in range(3):
            given, target = torch.randn(2000), torch.arange(2000)
            x = device.here(given) * 2
            scalars: Any = {"loss": device.reading(x.sum())}
            outgoing = lane.leaving(Message("forward", 1, payload=({"x": x.t()}, target), scalars=scalars))
            sealed = writer.seal(_on_a_thread(outgoing.on_host))
            envelope = reader.envelope(reader.head(sealed.header), sealed.body, lane.room)
            for to, block in zip(envelope.blocks, sealed.blocks, strict=True):
                to.copy_(block)
            if _on_a_thread(outgoing.follow) != x.nbytes or len(sealed.blocks) != 1:
                return "other tensors went over the lane"
            announced = envelope.message()
            message = _on_a_thread(partial(lane.arriving, announced))
            if "copies" in forgotten or (not forgotten and number == 1):
                # The stream that copies has then waited; elsewhere that would hide what was forgotten.
                kept = _on_a_thread(partial(there.copied, message.payload))[0]["x"]
                if kept.device.type != "cpu" or not torch.equal(kept, given * 2):
                    return "the copy of what is under way is another one"
            state, arrived = there.landed(message.payload)
            assert message.scalars is not None
            result = state["x"] + 1
            if not (torch.equal(result.cpu(), given * 2 + 1) and message.scalars["loss"] == float((given * 2).sum())):
                return "garbage"
            if arrived.device.type != "cpu" or not torch.equal(arrived, target):
                return "the target left the host"
    except fake_device.Race as race:
        return f"race: {race}"
    finally:
        lanes.dist = before
    return ""


def prepared_without_a_compiler(*overrides: str, method: str = "dtr") -> str:
    """Prepare and begin a run from settings, where a transport is for the fake device and no C++ compiler is there.

    **Returns:** what is refused.
    """
    from torch._inductor import config as inductor

    before = BACKENDS["nccl"]
    BACKENDS["nccl"] = Backend("gloo", "fake")
    try:
        settings = read_settings(None, ["model.name=mlp", *overrides], method=method, stages=2)[0]
        with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
            prepared = prepare(settings)
            make_run(prepared, distributed=False).close()
    except unlatch.errors.ConfigError as error:
        return str(error)
    finally:
        BACKENDS["nccl"] = before
    return ""


def devices_asked(*asked: tuple[str, int, int]) -> list[str]:
    """What is found, or said, for (device, ranks, local rank) where there are two devices."""
    fake_device.install(devices=2)
    found = []
    for device, ranks, local in asked:
        os.environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(ranks))
        try:
            found.append(str(find_device(device, ranks=ranks).torch))
        except unlatch.errors.ConfigError as error:
            found.append(str(error))
    return found
