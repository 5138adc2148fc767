"""Checks to make on the GPU before time is spent there: parity, memory and speed.

    python training/device_check.py [--speed]

Prints the distance of the GPU delta rule (outputs and gradients) from the fp32 reference, the
distance of the whole model's loss and gradients and, if asked, the speed of a few training steps.
Exit status 1 means that training would compute something else than the reference.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch
from fla_backend import fla_delta_rule, random_problem
from model import ModelConfig, Parts, SurefootModel, delta_rule_reference
from optim import make_optimisers


def relative(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """|a - b| / |b| in fp32; a missing tensor is infinitely far."""
    if a is None or b is None:
        return float("inf")
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20))


def main() -> None:
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    started = time.monotonic()
    rule = fla_delta_rule()
    print(f"backend chosen in {time.monotonic() - started:.1f} s", flush=True)
    bad = False
    for seed, speed, length in ((11, 1.0, 512), (12, 0.05, 2048), (13, 8.0, 512), (14, 1.0, 2052)):
        inputs = random_problem(seed, speed, length=length)
        exact = [x.detach().float().requires_grad_() for x in inputs]
        upstream = torch.randn_like(exact[2])
        found, wanted = rule(*inputs), delta_rule_reference(*exact)
        errors = [relative(found, wanted)]
        if length % 64 == 0:
            torch.autograd.backward(found, upstream.bfloat16())
            torch.autograd.backward(wanted, upstream)
            errors += [relative(a.grad, b.grad) for a, b in zip(inputs, exact, strict=True)]
        print(f"decay x{speed}, T {length}: o dq dk dv dg dbeta", " ".join(f"{e:.1e}" for e in errors), flush=True)
        bad |= not max(errors) < 3e-2
    config = ModelConfig()
    torch.manual_seed(0)
    exact_model = SurefootModel(config).cuda()
    model = SurefootModel(replace(config, compute_dtype="bfloat16"), Parts(rule)).cuda()
    model.load_state_dict(exact_model.state_dict())
    window = torch.randint(8192, (2, 512 + 3), device="cuda")
    for m in (exact_model, model):
        main_loss, ahead = m.losses(window, 512, 2)
        torch.autograd.backward(main_loss + 0.3 * ahead[0] + 0.1 * ahead[1])
        print("loss", main_loss.item(), [x.item() for x in ahead], flush=True)
    named = dict(exact_model.named_parameters())
    distances = {n: relative(p.grad, named[n].grad) for n, p in model.named_parameters()}
    worst = sorted(distances.items(), key=lambda item: -item[1])[:4]
    print("largest gradient distances", [(n, f"{e:.1e}") for n, e in worst], flush=True)
    bad |= not worst[0][1] < 0.15
    del exact_model, model, named
    torch.cuda.empty_cache()
    if bad:
        print("PARITY FAILED", flush=True)
        sys.exit(1)
    if "--speed" not in sys.argv:
        return
    for compiled, rows in ((True, 64), (False, 64)):
        torch.cuda.reset_peak_memory_stats()
        parts = Parts(rule)
        model = SurefootModel(replace(config, compute_dtype="bfloat16"), parts.compiled() if compiled else parts).cuda()
        optimisers = make_optimisers(list(model.named_parameters()), 5e-3, 3e-3, 0.1, True)
        window = torch.randint(8192, (rows, 2051), device="cuda")
        times = []
        for _ in range(14):
            torch.cuda.synchronize()
            before = time.monotonic()
            main_loss, ahead = model.losses(window, 2048, 2)
            torch.autograd.backward(main_loss + 0.21 * ahead[0] + 0.09 * ahead[1])
            torch.cuda.synchronize()
            middle = time.monotonic()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append((middle - before, time.monotonic() - middle))
        whole = sorted(sum(t) for t in times[4:])[5]
        print(
            f"compiled {compiled}, {rows} rows: first step {sum(times[0]):.1f} s, then {whole * 1e3:.1f} ms "
            f"(optimiser {times[-1][1] * 1e3:.1f} ms), {rows * 2048 / whole / 1e6:.3f} M tokens/s, "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
