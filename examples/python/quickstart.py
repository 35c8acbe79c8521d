"""The roadmap's example: learning epochs on a local cluster of five workers.

With an address the same program uses an existing cluster: quickstart.py grpc://worker-0:7443
"""

import sys

from engram import DistributedLearner

learner = DistributedLearner(
    num_nodes=5,
    gpu_enabled="auto",  # True requires a GPU
    memory_capacity=10_000_000,
    decay_rate=0.01,
    address=sys.argv[1] if len(sys.argv) > 1 else None,
)
with learner:
    for epoch in range(10):
        report = learner.run_epoch()
        print(f"epoch {report.epoch:2}: convergence {report['convergence']:.4f}, {report.seconds * 1000:.0f} ms")
    print(learner.quality())
