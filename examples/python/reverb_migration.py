"""A Reverb program on Engram: what changed is the import, and the address of a client in another process.

    -import reverb
    +from engram import reverb

Two kinds of items: single steps with priorities, and overlapping trajectories of three steps. A worker is killed on the way.
"""

import numpy as np

import engram
from engram import reverb

STEPS = 300

tables = [
    reverb.Table(
        name="steps",
        sampler=reverb.selectors.Prioritized(priority_exponent=0.8),
        remover=reverb.selectors.Fifo(),
        max_size=10_000,
        rate_limiter=reverb.rate_limiters.MinSize(100),
    ),
    reverb.Table(
        name="trajectories",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=10_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    ),
]

# Reverb's server is one process; this is a cluster with two replicas of everything.
with engram.connect(workers=3, config={"replicationFactor": 2}) as db:
    server = reverb.Server(tables, db=db)
    client = server.localhost_client()
    random = np.random.default_rng(0)

    for step in range(STEPS // 3):
        client.insert({"obs": random.standard_normal(4, np.float32), "reward": np.float32(step)}, priorities={"steps": 1.0 + step})

    with client.trajectory_writer(num_keep_alive_refs=3) as writer:
        for step in range(STEPS // 3):
            writer.append({"obs": random.standard_normal(4, np.float32), "reward": np.float32(step)})
            if step >= 2:
                trajectory = {"obs": writer.history["obs"][-3:], "reward": writer.history["reward"][-3:]}
                writer.create_item("trajectories", priority=1.0, trajectory=trajectory)

    print(f"killed worker 1 (process {db.local.kill_worker(1)})")

    samples = [sample for (sample,) in client.sample("steps", num_samples=64)]
    rewards = np.array([sample.data["reward"] for sample in samples])
    print(f"steps: mean reward {rewards.mean():.1f} of {STEPS // 3 - 1}: later steps have greater priorities")
    client.mutate_priorities("steps", updates={sample.info.key: 0.1 for sample in samples}, deletes=[samples[0].info.key])

    for sample in client.sample("trajectories", num_samples=4, emit_timesteps=False):
        assert sample.data["obs"].shape == (3, 4) and (np.diff(sample.data["reward"]) == 1).all()
    sizes = {name: info["items"] for name, info in client.server_info().items()}
    print(f"items: {sizes}")
    assert sizes == {"steps": STEPS // 3 - 1, "trajectories": STEPS // 3 - 2}, "every item is there but the deleted one"
