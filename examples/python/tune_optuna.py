"""Hyper-parameter search with Optuna over runs: each trial is a LearnerRun on a local cluster.

    pip install engram optuna
    python tune_optuna.py

The learning rate, the width and the dropout of a model of handwritten digits are searched. The report of a study is Optuna's own; the runs stay on the
cluster, `engram list runs` shows them.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import optuna

import engram

TRIALS = 8
PROGRAM = os.environ.get("ENGRAM_BIN") or shutil.which("engram") or os.path.join(os.path.dirname(sys.executable), "engram")


def manifest(trial: optuna.Trial) -> dict:
    layers = [
        {"dense": trial.suggest_int("width", 8, 64, log=True), "activation": "Relu"},
        {"dropout": trial.suggest_float("dropout", 0.0, 0.5)},
        {"dense": 10},
    ]
    replay = {
        "source": {"example": {"name": "Digits"}},
        "model": {
            "inputs": [{"field": "pixels", "dim": 64}],
            "layers": layers,
            "loss": {"kind": "CrossEntropy", "target": "digit"},
        },
        "optimizer": {"rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True)},
        "batch": 128,
        "steps": 100,
    }
    spec = {"clusterRef": {"name": "python"}, "kind": "Replay", "replay": replay}
    return {"apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": {"name": f"trial-{trial.number}"}, "spec": spec}


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="tune-") as folder, engram.connect("file:" + folder + "/state", workers=2):

        def engram_command(*arguments: str, text: str = "") -> str:
            line = [PROGRAM, *arguments, "--state-dir", folder + "/state"]
            return subprocess.run(line, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout

        def objective(trial: optuna.Trial) -> float:
            engram_command("run", "-", text=json.dumps(manifest(trial)))
            runs = json.loads(engram_command("list", "runs", "-o", "json"))["items"]
            metrics = next(run["metrics"] for run in runs if run["name"] == f"trial-{trial.number}")
            print(f"trial {trial.number}: {trial.params}, accuracy {metrics['held_out_accuracy']:.3f}", flush=True)
            return metrics["held_out_accuracy"]

        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
        study.optimize(objective, n_trials=TRIALS)
        print(f"best: {study.best_params}, accuracy {study.best_value:.3f}")
        sys.exit(0 if study.best_value > 0.9 else "no trial reached an accuracy of 0.9")


if __name__ == "__main__":
    main()
