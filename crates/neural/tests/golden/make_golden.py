"""Golden values of layers, losses and optimizers, computed by PyTorch.

    python make_golden.py          # needs torch and safetensors; writes layers.json and optimizers.json

Layers and losses: float64 with parameters and inputs that are exact in float32. Optimizers: float32, as users run them.
Gradients are of the SUM over samples of weight times loss, plus n times the correlation penalty.
"""
import json
import pathlib

import torch
from torch import nn
from torch.nn import functional as F

HERE = pathlib.Path(__file__).parent
ACTIVATIONS = {"Relu": nn.ReLU, "Gelu": nn.GELU, "Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid}


class Chain(nn.Module):
    """Layers of a specification, with the parameter names of the Rust crate."""

    def __init__(self, inputs, specs):
        super().__init__()
        self.layers = nn.ModuleList()
        self.width = inputs
        for spec in specs:
            self.layers.append(self.layer(spec))
        self.specs = specs

    def layer(self, spec):
        inputs = self.width
        if "dense" in spec:
            self.width = spec["dense"]
            return nn.Linear(inputs, self.width, bias=spec.get("bias", True))
        if "tropical" in spec:
            self.width = spec["tropical"]
            return Tropical(inputs, self.width, spec.get("bias", True))
        if "featureBag" in spec:
            self.width = spec["featureBag"]
            return Bag(inputs, self.width)
        if "featureAttention" in spec:
            self.width = spec["featureAttention"]
            return Attention(inputs, self.width, spec["heads"])
        if "layerNorm" in spec:
            return nn.LayerNorm(inputs, eps=spec["layerNorm"].get("epsilon", 1e-5))
        if "residual" in spec:
            return Chain(inputs, spec["residual"])
        return nn.Identity()

    def forward(self, x):
        for spec, layer in zip(self.specs, self.layers):
            y = layer(x)
            if "residual" in spec:
                y = x + y
            if "activation" in spec:
                y = ACTIVATIONS[spec["activation"]]()(y)
            x = y
        return x


class Tropical(nn.Module):
    def __init__(self, inputs, outputs, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x):
        edges = x.unsqueeze(-1) + self.weight
        if self.bias is not None:
            edges = torch.cat([edges, self.bias.expand(len(x), 1, -1)], dim=-2)
        best = edges.topk(2, dim=-2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3, "too near a tie"
        return best[:, 0]


class Bag(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(features, width)), nn.Parameter(torch.empty(width))

    def forward(self, samples):
        mask = torch.zeros(len(samples), len(self.weight), dtype=self.weight.dtype)
        for i, sample in enumerate(samples):
            for feature in sample:
                mask[i, feature] += 1
        return mask @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, features, width, heads):
        super().__init__()
        self.embedding = nn.Embedding(features, width)
        self.embedding_bias = nn.Parameter(torch.empty(width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, samples):
        rows = []
        for sample in samples:
            if not sample:
                rows.append(self.attention.out_proj.bias)
                continue
            tokens = (self.embedding(torch.tensor(sample)) + self.embedding_bias).unsqueeze(0)
            rows.append((tokens + self.attention(tokens, tokens, tokens)[0]).mean(1)[0])
        return torch.stack(rows)


def objective(loss, p, y, w):
    """Sum over samples, and per-sample losses and errors."""
    kind, n = loss["kind"], len(p)
    if kind == "CrossEntropy":
        each = F.cross_entropy(p, y, reduction="none")
        error = 1 - p.softmax(1)[torch.arange(n), y]
    elif kind == "Bce":
        each = F.binary_cross_entropy_with_logits(p, y, reduction="none").mean(1)
        error = (p.sigmoid() - y).abs().mean(1)
    else:
        error = (p - y).abs().mean(1)
        each = ((p - y) ** 2 if kind == "Mse" else F.huber_loss(p, y, reduction="none", delta=loss["delta"])).mean(1)
    total = (w * each).sum()
    if "correlation" in loss:
        corr = torch.corrcoef(torch.stack([p[:, 0], y[:, 0]]))[0, 1]
        total = total + n * loss["correlation"]["weight"] * torch.clamp(loss["correlation"]["target"] - corr, min=0)
    return total, each, error


def single(tensor):
    """Rounded to float32, held in float64."""
    return tensor.float().double()


CASES = [
    ("dense_tanh_mse", 7, [{"dense": 5, "activation": "Tanh"}, {"dense": 3, "bias": False}], {"kind": "Mse"}),
    ("relu_huber", 6, [{"dense": 8, "activation": "Relu"}, {"dense": 2}], {"kind": "Huber", "delta": 0.4}),
    ("gelu_sigmoid_bce", 5, [{"dense": 6, "activation": "Gelu"}, {"activation": "Sigmoid"}, {"dense": 2}], {"kind": "Bce"}),
    ("norm_residual_cross_entropy", 6,
     [{"layerNorm": {"epsilon": 0.001}}, {"residual": [{"activation": "Tanh"}, {"dense": 9, "activation": "Tanh"}, {"layerNorm": {}}, {"dense": 6}]},
      {"activation": "Gelu"}, {"dense": 4}], {"kind": "CrossEntropy"}),
    ("nested_residual_mse", 5,
     [{"residual": [{"residual": [{"dense": 5, "activation": "Tanh"}]}, {"activation": "Sigmoid"}, {"dense": 5, "activation": "Sigmoid"}]},
      {"dense": 1}], {"kind": "Mse"}),
    ("bag_correlation", 11, [{"featureBag": 6, "activation": "Tanh"}, {"dense": 1, "activation": "Sigmoid"}],
     {"kind": "Mse", "correlation": {"weight": 0.1, "target": 0.9}}),
    ("attention_mse", 11, [{"featureAttention": 8, "heads": 2, "activation": "Tanh"}, {"dense": 2}], {"kind": "Mse"}),
    ("tropical_mse", 4, [{"tropical": 5}, {"dense": 3, "activation": "Tanh"}, {"tropical": 4, "bias": False, "activation": "Sigmoid"}, {"dense": 2}],
     {"kind": "Mse"}),
]


def case(number, name, inputs, specs, loss):
    g = torch.Generator().manual_seed(100 + number)
    rand = lambda *shape: single(torch.rand(*shape, generator=g) * 2 - 1)
    model, n = Chain(inputs, specs).double(), 9
    for p in model.parameters():
        p.data = rand(*p.shape)
    record = {"name": name, "spec": {"inputs": inputs, "layers": specs}, "loss": loss}
    if "featureBag" in specs[0] or "featureAttention" in specs[0]:
        samples = [torch.randint(inputs, (int(c),), generator=g).tolist() for c in [4, 1, 0, 6, 3, 3, 5, 2, 4]]
        record["features"], x = samples, samples
    else:
        x = rand(n, inputs)
        record["rows"] = x.flatten().tolist()
    outputs = model.width
    if loss["kind"] == "CrossEntropy":
        y = torch.randint(outputs, (n,), generator=g)
        record["classes"] = y.tolist()
    else:
        y = rand(n, outputs).abs() if loss["kind"] == "Bce" else rand(n, outputs)
        record["targets"] = y.flatten().tolist()
    w = single(0.5 + torch.rand(n, generator=g))
    p = model(x)
    if loss["kind"] == "Huber":
        assert ((p - y).abs() - loss["delta"]).abs().min() > 1e-3, "too near the kink of the loss"
        assert model.layers[0](x).abs().min() > 1e-4, "too near the kink of a relu"
    total, each, error = objective(loss, p, y, w)
    total.backward()
    record["weights"] = w.tolist()
    record["parameters"] = {k: v.detach().flatten().tolist() for k, v in model.state_dict().items()}
    record["gradient"] = {k: v.grad.flatten().tolist() for k, v in model.named_parameters()}
    record |= {"predictions": p.detach().flatten().tolist(), "objective": total.item(), "losses": each.tolist(),
               "errors": error.tolist()}
    return record


OPTIMIZERS = [
    ({"kind": "AdamW", "weightDecay": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01)),
    ({"kind": "AdamW", "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "weightDecay": 0.1},
     lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
    ({"kind": "Sgd"}, lambda p: torch.optim.SGD(p, lr=0.01)),
    ({"kind": "Sgd", "momentum": 0.9, "weightDecay": 0.05}, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.05)),
    ({"kind": "Sgd", "momentum": 0.9, "nesterov": True}, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True)),
]


def optimizer(number, spec, make):
    g = torch.Generator().manual_seed(200 + number)
    p = nn.Parameter(torch.randn(12, generator=g))
    start = p.detach().tolist()
    scales = torch.tensor([1e-6, 1e-3, 1, 1e3]).repeat(3)
    gradients = [torch.randn(12, generator=g) * scales for _ in range(20)]
    optim = make([p])
    clipped = []
    for gradient in gradients:
        p.grad = gradient.clone()
        clipped.append(nn.utils.clip_grad_norm_([p], 100.0).item())
        optim.step()
    return {"spec": spec, "start": start, "gradients": [x.tolist() for x in gradients], "norms": clipped, "end": p.detach().tolist()}


if __name__ == "__main__":
    write = lambda name, rows: (HERE / name).write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    write("layers.json", [case(i, *c) for i, c in enumerate(CASES)])
    write("optimizers.json", [optimizer(i, *o) for i, o in enumerate(OPTIMIZERS)])
