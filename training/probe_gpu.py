"""Checks a GPU before training on it: the kernels against their definitions, and their speed.

    python -m training.probe_gpu
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from training.kernels import attend, kda_fla, kda_torch, sinkhorn_torch, sinkhorn_triton


def _difference(one: Tensor, two: Tensor) -> float:
    gap = (one.float() - two.float()).norm() / two.float().norm().clamp(min=1e-9)
    return float(gap)


def check_kda() -> None:
    torch.manual_seed(0)
    sizes = (2, 256, 4, 64)
    q, k, v, f = (torch.randn(sizes, device="cuda") for _ in range(4))
    b = torch.randn(sizes[:3], device="cuda")
    a_log = torch.randn(4, device="cuda") * 0.3
    bias = torch.randn(256, device="cuda") - 4
    grad = torch.randn(sizes, device="cuda")
    inputs = [q, k, v, f, b, a_log, bias]
    results = []
    for form, dtype in ((kda_torch, torch.float32), (kda_fla, torch.bfloat16)):
        given = [
            x.detach().to(dtype if place < 5 else torch.float32).requires_grad_()
            for place, x in enumerate(inputs)
        ]
        out = form(*given, -5.0)  # type: ignore[call-arg]
        results.append((out, *torch.autograd.grad(out, given, grad.to(out.dtype))))
    names = ("out", "dq", "dk", "dv", "df", "db", "dA_log", "dbias")
    gaps = [f"{n} {_difference(y, x):.1e}" for n, x, y in zip(names, *results, strict=True)]
    print("kda, fla in bf16 against torch in fp32:", ", ".join(gaps))


def check_sinkhorn() -> None:
    logits = (torch.randn(1000, 4, 4, device="cuda") * 2).requires_grad_()
    grad = torch.randn(1000, 4, 4, device="cuda")
    pairs = []
    for form in (sinkhorn_torch, sinkhorn_triton):
        out = form(logits, 20, 1e-6)
        pairs.append((out, *torch.autograd.grad(out, logits, grad)))
    gaps = [f"{_difference(y, x):.1e}" for x, y in zip(*pairs, strict=True)]
    print("sinkhorn, triton against torch:", ", ".join(gaps))


def time_attention() -> None:
    for length in (2048, 8192):
        batch = 65536 // length
        sizes = (batch, 4, length, 64)
        q, k, v = (
            torch.randn(sizes, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        mask = torch.ones(batch, length, length, dtype=torch.bool, device="cuda").tril()
        for name, seen in (("dense", None), ("masked", mask)):
            for attempt in range(3):
                torch.cuda.synchronize()
                start = time.monotonic()
                attend(q, k, v, seen).sum().backward()  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
                if attempt == 2:
                    print(f"attention {length} {name}: {1e3 * (time.monotonic() - start):.1f} ms")


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    check_kda()
    check_sinkhorn()
    time_attention()


if __name__ == "__main__":
    main()
