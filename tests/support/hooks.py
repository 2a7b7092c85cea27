# SPDX-License-Identifier: Apache-2.0
"""Which of fedvitals' hooks are still attached to torch, a model or an optimiser."""

import torch
from torch.optim import optimizer as torch_optimizer


def hooks_left(model=None, *optimizers) -> list[str]:
    """Whatever of ours could still be called."""
    found = [f"global {len(h)}" for h in (torch_optimizer._global_optimizer_pre_hooks,) if h]
    found += [f"global post {len(h)}" for h in (torch_optimizer._global_optimizer_post_hooks,) if h]
    found += [type(o).__name__ for o in optimizers if o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks]
    if model is not None:
        found += [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
        found += [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks or p._backward_hooks]
    found += [m for m in ("step", "unscale_") if is_ours(getattr(torch.amp.GradScaler, m))]
    return found


def is_ours(function) -> bool:
    """By the module that defines it: `functools.wraps` copies `__module__`, and any folder may be called fedvitals."""
    return function.__globals__["__name__"].partition(".")[0] == "fedvitals"
