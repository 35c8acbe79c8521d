"""Times a native training step of the reference model and PyTorch's in turn, after comparing their gradients.

    cargo build --release -p engram-neural --example train_step
    python compare_step.py PATH/TO/train_step [ROUNDS [THREADS]]          # needs torch and numpy; prints one JSON object
"""
import json
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from torch import nn

BATCH = 512
THREADS = int(sys.argv[3]) if len(sys.argv) > 3 else 2


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def model():
    torch.manual_seed(42)
    m = nn.Sequential(nn.Linear(500, 256), nn.ReLU(), Residual(), Residual(), nn.Linear(256, 128), nn.ReLU(),
                      nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
    for p in m.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return m


def data():
    """Masks with 10 to 100 of 500 features, targets, weights. Samples at the kink of a relu get weight 0: there,
    rounding decides the derivative."""
    g = torch.Generator().manual_seed(7)
    x = torch.zeros(BATCH, 500)
    for i, count in enumerate(torch.randint(10, 101, (BATCH,), generator=g)):
        x[i, torch.randperm(500, generator=g)[:count]] = 1
    y, w = torch.rand(BATCH, 1, generator=g), 0.5 + torch.rand(BATCH, 1, generator=g)
    m, near = model().double(), torch.zeros(BATCH, dtype=torch.bool)

    def mark(_module, _input, out):
        near.logical_or_((out.abs() < 2e-6).any(1))

    for module in m.modules():
        if isinstance(module, nn.Linear) and module.out_features > 1:
            module.register_forward_hook(mark)
    m(x.double())
    w[near] = 0
    return x, y, w


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def torch_times(steps, x, y, w):
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), 1e-4, weight_decay=1e-5, fused=True)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        (w * (m(x) - y) ** 2).mean().backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    times = sorted(times[min(steps // 10, 20):])
    return times[0], times[len(times) // 2], flat(m.parameters())


def main():
    binary, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    torch.set_num_threads(THREADS)
    x, y, w = data()
    folder = tempfile.mkdtemp()
    for name, t in (("parameters", flat(model().parameters())), ("x", x), ("y", y), ("w", w)):
        t.numpy().astype("<f4").tofile(f"{folder}/{name}.f32")

    def native(steps, first):
        out = subprocess.run([binary, folder, str(THREADS), str(steps), first], check=True, capture_output=True, text=True)
        return json.loads(out.stdout)

    exact = model().double()
    (w.double() * (exact(x.double()) - y.double()) ** 2).mean().backward()
    gradient = flat(p.grad for p in exact.parameters())
    report = {"torch": torch.__version__, "threads": THREADS, "batch": BATCH, "parameters": gradient.numel()}
    after = torch_times(10, x, y, w)[2]
    for first in ("dense", "bag"):
        native(10, first)
        error = lambda name, to: (torch.from_numpy(np.fromfile(f"{folder}/{name}.f32", "<f4")) - to).norm() / to.norm()
        report[f"{first}_gradient_error"] = error("gradient", gradient).item()
        report[f"{first}_parameter_error_after_10_steps"] = error("after", after).item()
        assert report[f"{first}_gradient_error"] < 1e-5, report
    rows = {"torch_fused": [], "dense": [], "bag": []}
    for _ in range(rounds):
        rows["torch_fused"].append(torch_times(220, x, y, w)[:2])
        for first in ("dense", "bag"):
            t = native(220, first)
            rows[first].append((t["best_ms"], t["median_ms"]))
    for name, r in rows.items():
        report[f"{name}_best_ms"] = round(min(v[0] for v in r), 3)
        report[f"{name}_median_ms"] = round(statistics.median(v[1] for v in r), 3)
    for first in ("dense", "bag"):
        report[f"{first}_ratio_best"] = round(report["torch_fused_best_ms"] / report[f"{first}_best_ms"], 2)
        report[f"{first}_ratio_median"] = round(report["torch_fused_median_ms"] / report[f"{first}_median_ms"], 2)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
