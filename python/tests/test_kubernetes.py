"""The proxy behind `kube://`, on a local cluster: clusters in Kubernetes are reached through the same socket and the same client."""

import os
from pathlib import Path

import numpy as np
import pytest

import engram
from engram._database import proxied_database


def test_client_reaches_workers_through_the_proxy_only() -> None:
    with engram.connect(workers=2, config={"partitions": 4}) as db:
        assert db.local is not None
        db.insert([1, 2, 3], weights=[0.5, 0.25, 0.75])
        with proxied_database(["--state-dir", str(db.local.folder)], 30.0, "kube://test") as proxied:
            assert proxied.get([1, 2, 3]).weights.tolist() == [0.5, 0.25, 0.75]
            buffer = engram.ReplayBuffer(proxied, "proxied", capacity=1_000)
            buffer.extend({"x": np.zeros((64, 8_000))})
            assert buffer.sample(16)["x"].shape == (16, 8_000)
            proxy = proxied._proxy
            assert proxy is not None
            db.local.kill_worker(0)
            assert proxied.get([1, 2, 3], timeout=60).weights.tolist() == [0.5, 0.25, 0.75]
            # Every connection is through the proxy: without it there is none.
            proxy.process.kill()
            with pytest.raises((engram.UnavailableError, engram.TimeoutError)):
                proxied.get([1], timeout=1)
        assert db.get([1]).weights.tolist() == [0.5]


def test_errors_of_the_proxy_are_exceptions_with_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("kube://research", "kube://Research/words", "kube://a/b/c", "kube://a/b?namespace=c"):
        with pytest.raises(engram.ConfigError, match="required: kube://NAMESPACE/CLUSTER") as refused:
            engram.connect(address)
        assert refused.value.code == "ENG-0103"
    with pytest.raises(engram.ConfigError, match="allowed: file:FOLDER"):
        engram.connect("http://host")
    # Nothing listens there.
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    with pytest.raises(engram.EngramError) as failed:
        engram.connect("kube://research/words")
    assert failed.value.code.startswith("ENG-") and "LearnerCluster" in str(failed.value)
    with pytest.raises(engram.ConfigError, match="staging"):
        engram.connect("kube://research/words?context=staging")
    monkeypatch.setenv("ENGRAM_BIN", os.fspath(tmp_path / "none"))
    with pytest.raises(engram.ConfigError, match="failed to start"):
        engram.connect("kube://research/words")
