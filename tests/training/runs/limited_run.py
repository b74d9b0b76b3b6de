"""A training whose files may not grow from step 20 on."""

import resource
import signal
import sys
import time

import torch
from torch import nn

from torchhook import Monitor
from torchhook.training.runs.summary import summarize


def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing raises, as on a full disk
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Monitor(model, optimizer, every=5, price=None, to=sys.argv[1]) as monitor:
        for step in range(40):
            if step == 20:
                while summarize(monitor.run).last_step != 15:
                    time.sleep(0.01)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)


if __name__ == "__main__":
    main()
