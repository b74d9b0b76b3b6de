"""Which of my MLflow runs is unhealthy, and where?

Handwritten digits are learned with three learning rates, each in an MLflow run. A monitor logs its measurements and
findings to the active run; MLflow alone then answers. Needs scikit-learn and mlflow in addition to '.[all]'.
"""

from __future__ import annotations

import logging
from pathlib import Path

import mlflow
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import torchhook as th
from torchhook.integrations.mlflow import MLflow

OUTPUT = Path("examples-output")
RATES = (0.0005, 0.05, 5.0)


def train(rate: float) -> None:
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    with th.Monitor(net, optimizer, every=15, to=MLflow()) as monitor:
        for _ in range(150):
            batch = torch.randint(len(images), (64,))
            loss = F.cross_entropy(net(images[batch].float() / 16), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)


def main() -> None:
    torch.set_num_threads(1)  # more threads do not help such a small network
    OUTPUT.mkdir(exist_ok=True)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(f"sqlite:///{OUTPUT}/mlflow.db")
    if mlflow.get_experiment_by_name("digits") is None:
        mlflow.create_experiment("digits", artifact_location=(OUTPUT / "mlflow").absolute().as_uri())
    mlflow.set_experiment("digits")
    runs = {}
    for rate in RATES:
        with mlflow.start_run(run_name=f"rate {rate}") as run:
            mlflow.log_param("rate", rate)
            train(rate)
        runs[rate] = run.info.run_id

    answers = []
    for rate, run_id in runs.items():
        run = mlflow.get_run(run_id)
        found = [text for key, text in sorted(run.data.tags.items()) if key.startswith("torchhook.TH")] or ["healthy"]
        layers = [key for key in run.data.metrics if key.startswith("torchhook/std/")]
        print(f"rate {rate}: {run.data.tags['torchhook.report']}; {len(run.data.metrics)} metrics, among them {layers}")
        answers.append(f"rate {rate} ends with a loss of {run.data.metrics['torchhook/loss']:.2f} ({', '.join(found)})")
    print(f"Answer: {'; '.join(answers)}.")


if __name__ == "__main__":
    main()
