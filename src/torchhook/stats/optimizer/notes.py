"""What exactly is measured around a step, by port."""

NOTES = {
    "param": "as it was before the step",
    "param_grad": "of the whole step, before clipping (and before ranks average theirs), without a GradScaler's scale",
    "step_grad": "as the optimizer was given it: of the whole step, after clipping, without a GradScaler's scale",
    "update": "the change that the step made",
    "param_norm": "before the step; a value a step",
    "param_grad_norm": "of the whole step, before clipping; a value a step",
    "step_grad_norm": "as the optimizer was given it, after clipping; a value a step",
    "update_norm": "of the change that the step made; a value a step",
    "update_ratio": "the norm of the update over that of the parameter; a value a step",
}
