"""`unlatch init`: a settings file to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError

__all__ = ["STARTER", "command"]

#: Keys behind a `#` are there to be uncommented: what they say is the default, or an example where there is none.
STARTER = """\
# Settings of a training run. Lines behind a # show what else can be set: the default, or an example.
# Any of them can be changed for one run: unlatch train FILE --set optimizer.lr=0.05

[model]
name = "resnet8"           # or mlp, resnet20, vgg11, gpt, revnet18, ...; or your own: "package.module:function"
# channels_last = false
# Further keys are arguments of the model, as in: width = 32

[data]
name = "digits"            # or cifar10, imagefolder, shakespeare, ...; or your own: "package.module:function"
batch_size = 64
# dir = "data"             # where the files are; also UNLATCH_DATA
# augment = true           # by default what is usual for the data set
# subset = 1000            # train on so many samples only
# holdout = 500            # judge on so many training samples, not on test samples: for whatever is chosen
# drop_last = false        # leave out the last batch of an epoch where it is smaller
# options = { seed = 0 }   # arguments of the data set

[method]
name = "dtrp"              # `unlatch methods` lists all; or your own: "package.module:Class"
# microbatches = "auto"    # options of the method; `unlatch methods dtrp` lists them
# accumulate = 1

[optimizer]
name = "SGD"               # any of torch.optim, or your own: "package.module:Class"
lr = 0.1
# momentum = 0.9
# nesterov = true
# weight_decay = 0.0005    # further keys are arguments of the optimizer

[lr]                       # the learning rate over the run, as a factor of optimizer.lr
# shape = "onecycle"       # or constant, cosine, step
# warmup = 0.2             # fraction of all updates
# final = 0.0              # what is left in the end
# milestones = [0.5, 0.75] # of a step: when it falls, as fractions of all updates
# factor = 0.1             # of a step: to which part

[run]
stages = 2                 # parts that the model is cut into
processes = 1              # that share the stages; 1 trains inline, with the same result
# replicas = 1             # copies of the network, each on its share of the processes and of every batch
epochs = 2
# seed = 0
# precision = "fp32"       # or bf16, fp16
# device = "auto"          # an accelerator if there is one; or cpu, cuda, "cuda:1"
# loss = "cross_entropy"   # of torch.nn.functional, or your own: "package.module:function"
# clip_grad_norm = 1.0
# clip_norm_of = "stage"    # or model, under methods that update all stages together
# nonfinite = "stop"       # or skip, ignore: what to do about NaN and infinity
# messages = "exact"       # or bf16, int8: fewer bytes between stages, for slow links; changes results
# compile = false          # or true, or the name of a backend: stages by torch.compile
# transport = "auto"       # or gloo: no shared memory; nccl: tensors from one cuda device to the next
# split = "auto"           # or names of the blocks that start the second and later stages: ["body.4"]
# plan = "plan.json"       # where `unlatch plan` places single tasks; with method layerpipe
# threads = 1              # per process
# out = "runs/first"       # by default the next free runs/METHOD-N
"""


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")] = Path("unlatch.toml"),
) -> None:
    """Write a settings file to begin with: it trains as it is.

    \b
    unlatch init && unlatch train unlatch.toml
    unlatch init experiments/first.toml

    It says beside each setting what else can be there. A file that exists is never replaced.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; expected the name of a file, as in {path / 'unlatch.toml'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError:
        raise ConfigError(f"{path}: exists, and is left as it is; choose another name") from None
    typer.echo(f"wrote {path}; train with: unlatch train {shlex.quote(str(path))}")
