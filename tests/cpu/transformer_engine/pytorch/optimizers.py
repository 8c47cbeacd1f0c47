"""AdamW as Transformer Engine has it: the number of steps is the group's, not a parameter's."""

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
        weight_decay=0.0, amsgrad=False, *, adam_w_mode=True, capturable=False,
    ):  # fmt: skip
        assert bias_correction and adam_w_mode and not amsgrad and not capturable
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})

    def initialize_state(self, p, store_param_remainders=False):
        """Moments of a parameter that has none."""
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[p][name] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.initialize_state(p)
                self.update(p, group)

    def update(self, p, group):
        """One step of one parameter."""
        m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
        (b1, b2), t = group["betas"], group["step"]
        m.lerp_(p.grad.float(), 1 - b1)
        v.mul_(b2).addcmul_(p.grad.float(), p.grad.float(), value=1 - b2)
        size = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(m / (1 - b1**t), size, value=-group["lr"])


class FusedSGD(torch.optim.SGD):
    """Named by Megatron, used by nobody."""
