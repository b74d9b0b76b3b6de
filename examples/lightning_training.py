"""Can training with Lightning be stopped as soon as it breaks?

One callback watches everything that the Trainer trains. Here the loss is a hand-written cross entropy, the logarithm of
a softmax, and the steps are so large that a probability soon becomes 0. The first error the rules find stops training.
Needs scikit-learn and lightning in addition to '.[all]'.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchhook.integrations.lightning import TorchhookCallback

OUTPUT = Path("examples-output")
EPOCHS = 20


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        probabilities = self.net(batch[0]).softmax(1)
        return -probabilities.gather(1, batch[1][:, None]).log().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # more threads do not help such a small network
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    loader = DataLoader(TensorDataset(pixels, torch.tensor(labels)), batch_size=32, shuffle=True)

    callback = TorchhookCallback(every=5, on_finding="stop", to=OUTPUT / "runs", name="lightning")
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), loader)

    print(callback.report)
    finding = callback.report.findings[0]
    print(
        f"Answer: it was stopped after {trainer.global_step} of {EPOCHS * len(loader)} steps, because at step"
        f" {finding.step} {finding.message} ({finding.code}, {finding.site or 'the model'})."
    )


if __name__ == "__main__":
    main()
