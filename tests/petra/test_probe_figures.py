"""Figures of probes: every stage has its lines, and what a run wrote can be drawn later."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from recording import feed
from rev_nets import regression, rev_run
from unlatch.io.metrics import Metrics
from unlatch.methods import PETRA
from unlatch.report.probe import probe_figure, read_probe, reconstruction_figure
from unlatch.train.probe import as_metrics

sgd = partial(torch.optim.SGD, lr=0.05)


def test_probe_figure_from_written_metrics(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    run = rev_run("SRRH", PETRA(microbatches=1), sgd)
    probe = run.probe_gradients(every=4, on_found=lambda found: metrics.log(found[0].update, as_metrics(found)))
    feed(run, regression(16))
    metrics.close()
    again = read_probe(tmp_path)
    assert sorted(again, key=repr) == sorted(probe.found, key=repr)
    figure = probe_figure(again, "petra")
    assert [len(axes.lines) for axes in figure.axes] == [8, 8, 8]
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 4, 8, 12]
    figure.savefig(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_reconstruction_figure(tmp_path: Path) -> None:
    run = rev_run("SRRDRH", PETRA(microbatches=2), sgd)
    feed(run, regression(30))
    figure = reconstruction_figure(run.statistics(), "petra", per_update=2)
    assert [line.get_label() for line in figure.axes[0].lines] == ["stage 1", "stage 2", "stage 4"]
    figure.savefig(tmp_path / "reconstruction.png")
    empty = reconstruction_figure(rev_run("SDH", "dsp", sgd).statistics())
    assert not empty.axes[0].lines
