"""Search for a set of features, guided by a model that is trained on what the search has evaluated.

    pip install engram numpy
    python search_loop.py

A tree search (UCT) grows sets of features on a local cluster. Each iteration predicts the scores of all successors of a set, evaluates the best of them, and
appends the result to a replay buffer. Every 100 iterations a run of kind Replay trains the model on the buffer, starting from the weights of the last run.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np

import engram

FEATURES, LARGEST, ITERATIONS, TRAIN_EVERY, EXPLORATION = 30, 6, 300, 100, 0.1
PROGRAM = os.environ.get("ENGRAM_BIN") or shutil.which("engram") or os.path.join(os.path.dirname(sys.executable), "engram")
random = np.random.default_rng(7)


def evaluate(features: frozenset) -> float:
    """Stands for an expensive measurement: six features count, some of them only together; each other one costs a little."""
    has = [float(feature in features) for feature in range(6)]
    useful = 0.25 * has[0] + 0.15 * has[1] + 0.3 * has[2] * has[3] + 0.3 * has[4] * has[5]
    return useful - 0.02 * sum(feature >= 6 for feature in features) + 0.005 * random.standard_normal()


def manifest(number: int) -> dict:
    model = {
        "inputs": [{"field": "mask", "dim": FEATURES}],
        "layers": [{"dense": 32, "activation": "Relu"}, {"dense": 16, "activation": "Relu"}, {"dense": 1}],
        "loss": {"kind": "Mse", "target": "score"},
    }
    if number > 1:
        model["init"] = {"run": f"model-{number - 1}"}
    source = {"name": "evaluated", "sampler": "Uniform"}
    replay = {"source": {"buffer": source}, "model": model, "optimizer": {"rate": 0.01}, "batch": 64, "steps": 200}
    spec = {"clusterRef": {"name": "python"}, "kind": "Replay", "replay": replay}
    return {"apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": {"name": f"model-{number}"}, "spec": spec}


class Model:
    """The newest trained model, reached by the command line."""

    def __init__(self, state_dir: str) -> None:
        self.state_dir, self.trained = state_dir, 0

    def engram(self, *arguments: str, text: str = "") -> str:
        line = [PROGRAM, *arguments, "--state-dir", self.state_dir]
        return subprocess.run(line, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout

    def train(self) -> None:
        self.engram("run", "-", text=json.dumps(manifest(self.trained + 1)))
        self.trained += 1

    def predict(self, sets: list) -> np.ndarray:
        """Returns the predicted score of each set; random numbers before the first training."""
        if self.trained == 0:
            return random.random(len(sets))
        lines = "".join(",".join(map(str, sorted(features))) + "\n" for features in sets)
        found = json.loads(self.engram("predict", f"model-{self.trained}", "--input", "-", "-o", "json", text=lines))
        return np.array([item["prediction"] for item in found["items"]])


class Node:
    """A set of features. Its successors have one more."""

    def __init__(self, features: frozenset) -> None:
        self.features, self.children, self.visits, self.total = features, [], 0, 0.0

    def best_child(self) -> "Node":
        def bound(child: "Node") -> float:
            return child.total / child.visits + EXPLORATION * math.sqrt(math.log(self.visits) / child.visits)

        return max(self.children, key=bound)


def successors(node: Node) -> list:
    if len(node.features) == LARGEST:
        return []
    return [node.features | {feature} for feature in range(FEATURES) if feature not in node.features]


def iterate(root: Node, model: Model, known: dict) -> None:
    """Descends to a leaf, adds its most promising successor that is not known, evaluates it, and updates the path to it."""
    path = [root]
    while path[-1].children and len(path[-1].children) >= math.sqrt(path[-1].visits):
        path.append(path[-1].best_child())
    candidates = [features for features in successors(path[-1]) if features not in known]
    if candidates:
        child = Node(candidates[int(model.predict(candidates).argmax())])
        path[-1].children.append(child)
        path.append(child)
    score = known.setdefault(path[-1].features, evaluate(path[-1].features))
    for node in path:
        node.visits, node.total = node.visits + 1, node.total + score


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="search-") as folder, engram.connect("file:" + folder + "/state", workers=2) as db:
        model, root, known, best = Model(folder + "/state"), Node(frozenset()), {}, []
        with engram.ReplayBuffer(db, "evaluated", capacity=10_000) as buffer:
            for iteration in range(1, ITERATIONS + 1):
                before = len(known)
                iterate(root, model, known)
                for features, score in list(known.items())[before:]:
                    mask = np.array([[feature in features for feature in range(FEATURES)]], np.float32)
                    buffer.extend({"mask": mask, "score": np.array([score], np.float32)})
                if iteration % TRAIN_EVERY == 0:
                    model.train()
                    best.append(max(known, key=known.get))
                    print(f"{iteration} iterations, {len(known)} sets: best {sorted(best[-1])}, score {known[best[-1]]:.3f}", flush=True)
        sys.exit(0 if known[best[-1]] > 0.6 else "the search found no good set")


if __name__ == "__main__":
    main()
