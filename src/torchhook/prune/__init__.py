"""Prune a model: score its channels, choose those to remove, and remove them.

importance = torchhook.prune.importance(model, loader, by="taylor")
pruned = torchhook.prune.apply(model, torchhook.prune.plan(importance, ratio=0.3), loader=test_loader)
"""

from torchhook.prune.ablation import sensitivity
from torchhook.prune.planner import Plan, plan
from torchhook.prune.scores import Importance, importance
from torchhook.prune.surgery import Pruned, apply

__all__ = ["Importance", "Plan", "Pruned", "apply", "importance", "plan", "sensitivity"]
