"""DQN on CartPole with a replay buffer that survives `kill -9` of a worker.

    pip install engram torch gymnasium
    python dqn_cartpole.py                          # a local cluster of three workers with two replicas of everything
    python dqn_cartpole.py --address grpc://worker-0:7443

Learns until the mean return of the last 100 episodes is 195. On a local cluster a worker is killed on the way; --no-kill leaves it alone.
"""

import argparse
import time
from collections import deque

import gymnasium
import numpy as np
import torch
from torch import nn

import engram
from engram.torch import ReplayBuffer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--address", help="an existing cluster: grpc://host:port, or a manifest")
parser.add_argument("--no-kill", action="store_true")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--steps", type=int, default=60_000, help="most steps of the environment")
parser.add_argument("--target", type=float, default=195.0, help="mean return of the last 100 episodes to reach")
arguments = parser.parse_args()

GAMMA, BATCH, WARM_UP, TRAIN_EVERY, COPY_EVERY = 0.99, 128, 500, 2, 200


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def connect() -> engram.Database:
    if arguments.address:
        return engram.connect(arguments.address)
    return engram.connect(workers=3, config={"replicationFactor": 2})


torch.manual_seed(arguments.seed)
torch.set_num_threads(1)
random = np.random.default_rng(arguments.seed)
environment = gymnasium.make("CartPole-v1")
online, target = network(), network()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.AdamW(online.parameters(), lr=1e-3)


def learn(buffer: ReplayBuffer, batch: engram.Batch) -> None:
    values = online(batch["obs"]).gather(1, batch["action"][:, None])[:, 0]
    with torch.no_grad():
        best = online(batch["next"]).argmax(1, keepdim=True)
        expected = batch["reward"] + GAMMA * ~batch["done"] * target(batch["next"]).gather(1, best)[:, 0]
    error = expected - values
    loss = (nn.functional.huber_loss(values, expected, reduction="none") * batch["weight"]).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    optimizer.step()
    buffer.update_priority(batch, error.detach().abs() + 1e-2)


with connect() as db:
    name = f"cartpole-{time.time_ns()}"
    sampler = engram.Prioritized(alpha=0.5, beta=0.5)
    buffer = ReplayBuffer(db, name, capacity=50_000, batch_size=BATCH, sampler=sampler, seed=arguments.seed, prefetch=2)
    batches = buffer.stream()
    returns: deque[float] = deque(maxlen=100)
    rows: list[dict[str, object]] = []
    observation, _ = environment.reset(seed=arguments.seed)
    score, killed, episodes, started = 0.0, arguments.no_kill or db.local is None, 0, time.monotonic()
    for step in range(arguments.steps):
        epsilon = max(0.02, 1.0 - step / 3_000)
        with torch.no_grad():
            greedy = int(online(torch.from_numpy(observation)).argmax())
        action = int(random.integers(2)) if random.random() < epsilon else greedy
        following, reward, terminated, truncated, _ = environment.step(action)
        rows.append({"obs": observation, "action": action, "reward": np.float32(reward), "next": following, "done": terminated})
        observation, score = following, score + float(reward)
        if len(rows) == 16:
            buffer.extend({field: np.array([row[field] for row in rows]) for field in rows[0]})
            rows.clear()
        if step >= WARM_UP and step % TRAIN_EVERY == 0:
            learn(buffer, next(batches))
        if step % COPY_EVERY == 0:
            target.load_state_dict(online.state_dict())
        if not (terminated or truncated):
            continue
        returns.append(score)
        observation, _ = environment.reset()
        score, episodes = 0.0, episodes + 1
        mean = sum(returns) / len(returns)
        if episodes % 20 == 0:
            print(f"step {step:6}, episode {episodes:4}: mean return {mean:6.1f}, {len(buffer)} items", flush=True)
        if not killed and episodes >= 100 and mean >= 40:
            before = len(buffer)
            print(f"killed worker 1 (process {db.local.kill_worker(1)}); {before} items", flush=True)
            assert len(buffer) == before, "every stored item is still there"
            killed = True
        if len(returns) == 100 and mean >= arguments.target:
            print(f"solved after {episodes} episodes, {step} steps, {time.monotonic() - started:.0f} s: mean return {mean:.1f}")
            break
    else:
        raise SystemExit(f"not solved in {arguments.steps} steps: mean return {sum(returns) / len(returns):.1f}")
    batches.close()
