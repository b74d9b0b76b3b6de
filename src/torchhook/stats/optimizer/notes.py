"""What exactly is measured around a step of the optimizer, by port."""

NOTES = {
    "param": "as it was before the step",
    "param_grad": "of the whole step, before clipping (and before ranks average theirs), without a GradScaler's scale",
    "step_grad": "as the optimizer got it: of the whole step, after clipping, without a GradScaler's scale",
    "update": "the change that the step made",
    "param_norm": "before the step; one value per step",
    "param_grad_norm": "of the whole step, before clipping; one value per step",
    "step_grad_norm": "as the optimizer got it, after clipping; one value per step",
    "update_norm": "of the change that the step made; one value per step",
    "update_ratio": "the norm of the update over that of the parameter; one value per step",
}
