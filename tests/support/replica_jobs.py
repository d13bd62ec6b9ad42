"""Runs with replicas of the network, on ranks and in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import unlatch
from rank_jobs import Outcome, conv_run, copied_state, momentum_sgd, train_conv
from small_nets import images, tanh_net, vectors


def train_each(methods: tuple[str, ...], stages: int, replicas: int) -> dict[str, Outcome]:
    """What must not depend on where it ran: batch norm, dropout, a short last batch, evaluations."""
    return {name: train_conv(name, stages, replicas=replicas) for name in methods}


def smooth_run(method: Any, stages: int, **options: Any) -> unlatch.Run:
    """A network in float64 without batch norm and dropout, which replicas train as one does."""
    settings: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "optimizer": momentum_sgd,
        "split": [str(block) for block in range(1, stages)],
        "sample": vectors(1, size=12)[0],
    }
    return unlatch.parallelize(tanh_net(stages), method, stages=stages, **{**settings, **options})


def train_smooth(method: Any, stages: int, size: int = 11, **options: Any) -> Outcome:
    """Losses and weights, and every replica's own weights that are in this process."""
    with smooth_run(method, stages, **options) as run:
        steps = [run.step(x, y) for x, y in vectors(6, size=size)] + run.flush()
        return {
            "losses": [s.loss for s in steps if s.loss is not None],
            "state": copied_state(run.module()),
            "own": {s.number: [p.detach().clone() for p in s.stage.params] for s in run.stations.values() if s.stage},
        }


def train_smooth_each(methods: tuple[Any, ...], stages: int, replicas: int) -> list[Outcome]:
    return [train_smooth(method, stages, replicas=replicas) for method in methods]


__all__ = ["conv_run", "images", "torch", "train_each", "train_smooth", "train_smooth_each"]
