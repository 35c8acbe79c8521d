"""The PyTorch module in a checkpoint predicts what the cluster predicts."""

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import engram
from engram._local import program

pytestmark = pytest.mark.torch

DENSE = [{"dense": 16, "activation": "Gelu"}, {"dropout": 0.1}, {"layerNorm": {}}, {"residual": [{"dense": 16, "activation": "Tanh"}]}, {"dense": 1}]
TROPICAL = [{"dense": 16, "activation": "Tanh"}, {"tropical": 8}, {"residual": [{"tropical": 8, "activation": "Tanh"}]}, {"dense": 1}]
ATTENTION = [{"featureAttention": 8, "heads": 2}, {"dense": 1, "activation": "Sigmoid"}]
SETS = [[3, 7, 19], [0], list(range(20)), [5, 6]]


def run(name: str, layers: list[dict[str, Any]], ensemble: int) -> dict[str, Any]:
    replay = {
        "source": {"synthetic": {"features": 30, "samples": 300, "smallest": 2, "largest": 10}},
        "model": {"inputs": [{"field": "mask", "dim": 30}], "layers": layers, "loss": {"kind": "Mse", "target": "score"}},
        "optimizer": {"rate": 0.01}, "batch": 64, "steps": 20, "ensemble": ensemble,
    }
    spec = {"clusterRef": {"name": "python"}, "kind": "Replay", "replay": replay}
    return {"apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": {"name": name}, "spec": spec}


def load(state_dir: Path, name: str) -> tuple[Any, Path]:
    """Returns the generated module of the newest checkpoint, and its folder."""
    latest = max(state_dir.glob("workers/*/training/*/LATEST"), key=lambda path: path.stat().st_mtime)
    folder = latest.parent / latest.read_text().strip()
    spec = importlib.util.spec_from_file_location(f"model_{name}", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, folder


@pytest.mark.timeout(240)
def test_generated_module_of_a_checkpoint_predicts_what_the_cluster_predicts(tmp_path: Path) -> None:
    import torch

    state_dir = tmp_path / "state"
    with engram.connect(f"file:{state_dir}", workers=2):

        def command(*arguments: str, text: str) -> str:
            line = [program(), *arguments, "--state-dir", str(state_dir)]
            return subprocess.run(line, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout

        lines = "".join(",".join(map(str, features)) + "\n" for features in SETS)
        for name, layers, ensemble in (("dense", DENSE, 2), ("tropical", TROPICAL, 1), ("attention", ATTENTION, 1)):
            command("run", "-", text=json.dumps(run(name, layers, ensemble)))
            served = json.loads(command("predict", name, "--input", "-", "-o", "json", text=lines))["items"]
            module, folder = load(state_dir, name)
            if name != "attention":
                inputs: Any = torch.tensor([[float(feature in features) for feature in range(30)] for features in SETS])
            else:
                offsets = [sum(map(len, SETS[:at])) for at in range(len(SETS))]
                inputs = torch.tensor(sum(SETS, [])), torch.tensor(offsets)
            means, deviations = module.predict(module.load_all(folder), inputs)
            expected = torch.tensor([[item["prediction"]] for item in served])
            assert expected.std() > 0, served
            torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-5)
            if ensemble > 1:
                expected = torch.tensor([[item["deviation"]] for item in served])
                assert deviations.min() > 0, served
                torch.testing.assert_close(deviations, expected, rtol=1e-4, atol=1e-5)
