"""Lightning around a run: its loggers, callbacks and progress; the forward, backward and update are the run's.

    pip install lightning
    python examples/with_lightning.py

Lightning's Trainer reads the data and calls `training_step`; with manual optimization it leaves the rest to us.
"""

from __future__ import annotations

from functools import partial

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import unlatch


class Decoupled(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module, method: str, stages: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.start = partial(unlatch.parallelize, model, method, stages=stages, loss_fn=cross_entropy)

    def on_fit_start(self) -> None:
        self.run = self.start(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True))

    def configure_optimizers(self) -> None:
        return None  # one per stage, inside of the run

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        result = self.run.step(*batch)
        if result.loss is not None:  # of the batch that finished; none while the pipeline fills
            self.log("train/loss", result.loss, prog_bar=True)

    def on_train_end(self) -> None:
        self.run.flush()
        self.run.module()  # the newest weights, in `self.model`


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    train, test = unlatch.data.load("digits")
    module = Decoupled(unlatch.models.build("mlp", widths=(64, 128, 128, 128, 10)), "dtr", stages=2)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(train.x, train.y), batch_size=64, shuffle=True))
    loss = trainer.callback_metrics["train/loss"]
    found = module.run.evaluate(unlatch.data.Loader(test))
    print(f"after {trainer.current_epoch} epochs: loss {loss:.3f}, test accuracy {found['accuracy']:.3f}")


if __name__ == "__main__":
    main()
