"""Geodesics of a learned metric of one dimension: the closed form in PyTorch, and shooting with torchdiffeq, torchode and diffrax.

The right-hand side has the exact derivative of the network, computed in one forward pass. Shooting solves 600 of the 18,030 problems at
a time, sequential shooting 3, and the figures are scaled: both costs are proportional to the number of problems. CPU time of one thread.
"""

import json
import math
import statistics
import sys
import time
from importlib.metadata import version as version_of

import numpy as np

PEER = sys.argv[1]
PPB = np.array([0.0, 10, 20, 30, 40, 60])
BREAKS = (PPB - 30) / 30
WAVELENGTHS = (np.arange(200, 801) - 500) / 300
PROBLEMS = 18_030
SAMPLE = 20
SEQUENTIAL = 3
NODES = 8
TOLERANCE = 1e-6
SECANT_STEPS = 8
TIMES = 50
REPEATS = 3
PAIRS = [(i, j) for i in range(6) for j in range(6) if i != j]


def parameters(stress):
    """Xavier weights; the stress metric has the first and the last layer times 4."""
    random = np.random.default_rng(1)
    layer = lambda a, b: (random.standard_normal((a, b)) * math.sqrt(2 / (a + b)), random.standard_normal(b) * 0.01)
    (w1, b1), (w2, b2), (w3, b3) = layer(2, 64), layer(64, 128), layer(128, 1)
    return [w1 * stress, b1, w2, b2, w3 * stress, b3]


def problems():
    """Start, end and wavelength of a sample of the problems."""
    chosen = np.linspace(-1, 1, SAMPLE)
    rows = [(BREAKS[i], BREAKS[j], l) for l in chosen for i, j in PAIRS]
    return np.array(rows).T


def measured(work, scale=1.0, repeats=REPEATS):
    work()
    took = []
    for _ in range(repeats):
        before = time.process_time()
        work()
        took.append((time.process_time() - before) * 1e3 * scale)
    return {"best": min(took), "median": statistics.median(took), "repeats": repeats}


def once(value):
    return {"best": value, "median": value, "repeats": 1}


rows = []


def row(quantity, way, metric, figure):
    rows.append({"workload": f"geodesic-{quantity}-{way}-{metric}", "memories": PROBLEMS, **figure})
    print(f"{PEER}: {rows[-1]['workload']}: {figure['median']:.3g}", file=sys.stderr)


def quadrature(nodes):
    """Points and weights in c per interval."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    half, middle = np.diff(BREAKS) / 2, (BREAKS[1:] + BREAKS[:-1]) / 2
    return middle[:, None] + half[:, None] * x, half[:, None] * w


def torch_peer():
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    tensor = torch.tensor

    class Metric:
        def __init__(self, stress):
            self.p = [tensor(p) for p in parameters(stress)]

        def value(self, c, l):
            w1, b1, w2, b2, w3, b3 = self.p
            h = torch.tanh(torch.stack([c, l], -1) @ w1 + b1)
            return torch.nn.functional.softplus((torch.tanh(h @ w2 + b2) @ w3 + b3)[..., 0]) + 0.1

        def gamma(self, c, l):
            """g_c / (2 g)."""
            w1, b1, w2, b2, w3, b3 = self.p
            h1 = torch.tanh(torch.stack([c, l], -1) @ w1 + b1)
            d1 = (1 - h1 * h1) * w1[0]
            h2 = torch.tanh(h1 @ w2 + b2)
            d2 = (1 - h2 * h2) * (d1 @ w2)
            z, dz = (h2 @ w3 + b3)[..., 0], (d2 @ w3)[..., 0]
            return torch.sigmoid(z) * dz / (2 * (torch.nn.functional.softplus(z) + 0.1))

    first, second = (torch.tensor(side) for side in zip(*PAIRS))

    def closed(metric, nodes):
        """Length, mean and largest velocity of all problems, [pair, wavelength]."""
        points, weights = (tensor(it) for it in quadrature(nodes))
        l = tensor(WAVELENGTHS)
        c = points.reshape(-1, 1).expand(-1, len(l))
        root = metric.value(c, l.expand_as(c)).sqrt().reshape(5, nodes, -1)
        ends = tensor(BREAKS)[:, None].expand(-1, len(l))
        borders = metric.value(ends, l.expand_as(ends)).sqrt()
        part = lambda f: torch.cat([torch.zeros(1, len(l)), (f * weights[..., None]).sum(1).cumsum(0)])
        s, m = part(root), part(root * points[..., None])
        least = torch.minimum(root.amin(1), torch.minimum(borders[1:], borders[:-1]))
        k = s[second] - s[first]
        smallest = torch.stack([least[min(i, j) : max(i, j)].amin(0) for i, j in PAIRS])
        return k.abs(), (m[second] - m[first]) / k, k.abs() / smallest

    if PEER == "torchdiffeq":
        from torchdiffeq import odeint

        def integrate(field, state, times):
            return odeint(field, state, times, rtol=TOLERANCE, atol=TOLERANCE, method="dopri5")
    else:
        import torchode

        def integrate(field, state, times):
            def flat(t, y):
                d = field(t, tuple(y.unbind(-1)))
                return torch.stack(d, -1)

            term = torchode.ODETerm(flat)
            control = torchode.IntegralController(atol=TOLERANCE, rtol=TOLERANCE, term=term)
            solver = torchode.AutoDiffAdjoint(torchode.Dopri5(term=term), control)
            start = torch.stack(state, -1)
            problem = torchode.InitialValueProblem(y0=start, t_eval=times.expand(len(start), -1))
            return solver.solve(problem).ys.movedim(1, 0).unbind(-1)

    def shoot(metric, start, end, l, times=None):
        """Secant shooting: v0, residual, and c at the times."""

        def field(_, state):
            c, v, _ = state
            return v, -metric.gamma(c, l) * v * v, c

        ends = tensor([0.0, 1.0])

        def path(v, at):
            return integrate(field, (start, v, torch.zeros_like(start)), at)

        v = end - start
        c = path(v, ends)[0][-1]
        other, other_miss = v, c - end
        v = v * (end - start) / (c - start)
        for _ in range(SECANT_STEPS):
            miss = path(v, ends)[0][-1] - end
            if miss.abs().max() < TOLERANCE:
                break
            slope = (miss - other_miss) / (v - other)
            step = torch.where(slope.abs() > 1e-12, miss / slope, torch.zeros_like(miss))
            other, other_miss, v = v, miss, v - step
        return v, miss, None if times is None else path(v, times)[0]

    with torch.no_grad():
        for name, stress in (("xavier", 1.0), ("stress", 4.0)):
            metric = Metric(stress)
            start, end, l = (tensor(it) for it in problems())
            scale = PROBLEMS / len(start)
            row("features", "shooting", name, measured(lambda: shoot(metric, start, end, l), scale))
            v, miss, _ = shoot(metric, start, end, l)
            length = v.abs() * metric.value(start, l).sqrt()
            # The same problems by a fine rule.
            x, w = np.polynomial.legendre.leggauss(64)
            half = (end - start) / 2
            nodes = (start + half)[:, None] + half[:, None] * tensor(x)
            exact = (half[:, None] * tensor(w) * metric.value(nodes, l[:, None].expand_as(nodes)).sqrt()).sum(1).abs()
            row("error", "shooting", name, once(float(((length - exact) / exact).abs().max())))
            times = torch.linspace(0, 1, TIMES)
            row("path", "shooting", name, measured(lambda: shoot(metric, start, end, l, times), scale))
            if PEER != "torchdiffeq":
                continue
            few = torch.arange(SEQUENTIAL) * 7

            def sequential():
                for i in few:
                    shoot(metric, start[i : i + 1], end[i : i + 1], l[i : i + 1])

            row("features", "sequential", name, measured(sequential, PROBLEMS / SEQUENTIAL, 1))
            row("features", "closed", name, measured(lambda: closed(metric, NODES), repeats=5))
            fine, coarse = closed(metric, 64)[0], closed(metric, NODES)[0]
            row("error", "closed", name, once(max(float(((coarse - fine) / fine).abs().max()), 1e-16)))

            def gradient():
                with torch.enable_grad():
                    metric.p = [p.detach().requires_grad_() for p in metric.p]
                    sum(it.sum() for it in closed(metric, NODES)).backward()

            row("gradient", "closed", name, measured(gradient, repeats=5))
    return f"{version_of(PEER)} with PyTorch {torch.__version__}"


def diffrax_peer():
    import diffrax
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def value(p, c, l):
        w1, b1, w2, b2, w3, b3 = p
        h = jnp.tanh(jnp.stack([c, l]) @ w1 + b1)
        return jax.nn.softplus((jnp.tanh(h @ w2 + b2) @ w3 + b3)[0]) + 0.1

    def field(_, y, args):
        p, l = args
        g, slope = jax.jvp(lambda c: value(p, c, l), (y[0],), (1.0,))
        return jnp.stack([y[1], -slope / (2 * g) * y[1] ** 2, y[0]])

    def path(p, start, v, l, times):
        saved = diffrax.SaveAt(ts=times) if times is not None else diffrax.SaveAt(t1=True)
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Dopri5(), 0.0, 1.0, 0.1, jnp.stack([start, v, 0.0]), (p, l),
            saveat=saved, stepsize_controller=diffrax.PIDController(rtol=TOLERANCE, atol=TOLERANCE),
        ).ys

    def shoot(p, start, end, l, times):
        """Secant shooting of one problem with its own steps; vmapped."""
        v = end - start
        miss = path(p, start, v, l, None)[-1, 0] - end
        state = (v, miss, v * (end - start) / (miss + end - start), 0)

        def step(state):
            other, other_miss, v, n = state
            miss = path(p, start, v, l, None)[-1, 0] - end
            slope = (miss - other_miss) / jnp.where(v == other, 1.0, v - other)
            return v, miss, v - jnp.where(jnp.abs(slope) > 1e-12, miss / slope, 0.0), n + 1

        running = lambda state: (state[3] < SECANT_STEPS) & ((state[3] == 0) | (jnp.abs(state[1]) >= TOLERANCE))
        v, _, _, _ = jax.lax.while_loop(running, step, state)
        return v if times is None else path(p, start, v, l, times)

    batch = jax.vmap(lambda p, a, b, l: shoot(p, a, b, l, None), (None, 0, 0, 0))
    paths = jax.vmap(lambda p, a, b, l: shoot(p, a, b, l, jnp.linspace(0, 1, TIMES)), (None, 0, 0, 0))
    batch, paths = jax.jit(batch), jax.jit(paths)
    for name, stress in (("xavier", 1.0), ("stress", 4.0)):
        p = [jnp.asarray(it) for it in parameters(stress)]
        start, end, l = (jnp.asarray(it) for it in problems())
        scale = PROBLEMS / len(start)
        row("features", "shooting", name, measured(lambda: batch(p, start, end, l).block_until_ready(), scale))
        v = batch(p, start, end, l)
        root = lambda c, l: jnp.sqrt(value(p, c, l))
        length = jnp.abs(v) * jax.vmap(root)(start, l)
        x, w = np.polynomial.legendre.leggauss(64)
        half = (end - start) / 2
        nodes = (start + half)[:, None] + half[:, None] * x
        roots = jax.vmap(jax.vmap(root, (0, None)))(nodes, l)
        exact = jnp.abs((half[:, None] * w * roots).sum(1))
        row("error", "shooting", name, once(float(jnp.abs((length - exact) / exact).max())))
        row("path", "shooting", name, measured(lambda: paths(p, start, end, l).block_until_ready(), scale))
    return diffrax.__version__


version = diffrax_peer() if PEER == "diffrax" else torch_peer()
json.dump({"peer": PEER, "version": version, "threads": 1, "rows": rows}, sys.stdout)
