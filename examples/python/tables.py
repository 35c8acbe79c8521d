"""Trains classifiers of two real tables on local workers: handwritten digits, and breast cancer (Wisconsin) from scikit-learn.

    pip install engram scikit-learn
    python tables.py

A tenth of the samples is held out. Each run compares its model with a ridge regression and boosted trees on the same samples, and says which is better.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile

from sklearn.datasets import load_breast_cancer

import engram

PROGRAM = os.environ.get("ENGRAM_BIN") or shutil.which("engram") or os.path.join(os.path.dirname(sys.executable), "engram")


def manifest(name: str, source: dict, features: tuple[str, int], target: str, classes: int) -> dict:
    field, width = features
    layers = [{"dense": 32, "activation": "Relu"}, {"dropout": 0.2}, {"dense": classes}]
    replay = {
        "source": source,
        "model": {
            "inputs": [{"field": field, "dim": width}],
            "layers": layers,
            "loss": {"kind": "CrossEntropy", "target": target},
        },
        "optimizer": {"rate": 0.003, "weightDecay": 0.01},
        "batch": 128,
        "steps": 400,
    }
    spec = {"clusterRef": {"name": "python"}, "kind": "Replay", "replay": replay}
    return {"apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": {"name": name}, "spec": spec}


def main() -> None:
    table = load_breast_cancer()
    with tempfile.TemporaryDirectory(prefix="tables-") as folder, engram.connect("file:" + folder + "/state", workers=2):
        path = os.path.join(folder, "breast-cancer.csv")
        with open(path, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([*table.feature_names, "benign"])
            rows.writerows([*features, label] for features, label in zip(table.data, table.target, strict=True))

        digits = manifest("digits", {"example": {"name": "Digits"}}, ("pixels", 64), "digit", 10)
        cancer = manifest("breast-cancer", {"csv": {"file": {"path": path}}}, ("features", table.data.shape[1]), "benign", 2)
        for run in [digits, cancer]:
            command = [PROGRAM, "run", "-", "--state-dir", folder + "/state"]
            subprocess.run(command, input=json.dumps(run), text=True, check=True)
        listed = subprocess.run([PROGRAM, "list", "runs", "-o", "json", "--state-dir", folder + "/state"], stdout=subprocess.PIPE, check=True)
        accuracies = {run["name"]: run["metrics"]["held_out_accuracy"] for run in json.loads(listed.stdout)["items"]}
        print("held-out accuracy:", ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in accuracies.items()))
        sys.exit(0 if min(accuracies.values()) > 0.9 else "a model has a held-out accuracy of at most 0.9")


if __name__ == "__main__":
    main()
