"""Fisher matrices of a softmax regression in NumPy float64: `python make_golden.py` writes fisher.json."""
import json, numpy as np
r = np.random.default_rng(20)
N, D, K = 40, 3, 3
X = np.round(r.normal(size=(N, D)), 3).astype(np.float32).astype(np.float64)
W = np.round(r.normal(size=(K, D)), 3).astype(np.float32).astype(np.float64)
b = np.round(r.normal(size=K), 3).astype(np.float32).astype(np.float64)
y = r.integers(0, K, N)
Z = X @ W.T + b
Pr = np.exp(Z - Z.max(1, keepdims=True)); Pr /= Pr.sum(1, keepdims=True)
def scores(lab):
    E = -Pr.copy(); E[np.arange(N), lab] += 1
    return np.concatenate([(E[:, :, None] * X[:, None, :]).reshape(N, -1), E], 1)
S = scores(y); emp = S.T @ S / N
mod = np.zeros_like(emp)
for i in range(N):
    J = np.zeros((K, K * D + K))
    for k in range(K):
        J[k, k * D:(k + 1) * D] = X[i]; J[k, K * D + k] = 1
    mod += J.T @ (np.diag(Pr[i]) - np.outer(Pr[i], Pr[i])) @ J
mod /= N
json.dump({"values": X.ravel().tolist(), "labels": y.tolist(), "parameters": np.concatenate([W.ravel(), b]).tolist(),
  "empirical": emp.ravel().tolist(), "model": mod.ravel().tolist(), "model_eigenvalues": np.linalg.eigvalsh(mod).tolist()}, open("fisher.json", "w"))
