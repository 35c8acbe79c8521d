"""Predictions of the generated modules with the saved weights: writes predictions.json. Needs torch, safetensors."""
import importlib
import json
import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.dont_write_bytecode = True
# Models that read rows.
DENSE = ("rows", "tropical")


def main():
    g = torch.Generator().manual_seed(5)
    rows = torch.randn(7, 6, generator=g)
    samples = [torch.randint(12, (n,), generator=g).tolist() for n in (3, 1, 0, 5, 2, 8)]
    indices = torch.tensor([i for s in samples for i in s])
    offsets = torch.tensor([sum(map(len, samples[:k])) for k in range(len(samples))])
    out = {}
    for name in ("rows", "bag", "attention", "tropical"):
        model = importlib.import_module(f"{name}_model").load(HERE / f"{name}.safetensors")
        with torch.no_grad():
            y = model(rows) if name in DENSE else model((indices, offsets))
        given = {"rows": rows.flatten().tolist()} if name in DENSE else {"features": samples}
        out[name] = given | {"predictions": y.flatten().tolist()}
    (HERE / "predictions.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
