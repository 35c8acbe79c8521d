"""A pytest plugin that runs TransferQueue's own tests of a storage backend, unchanged, on the backend Engram.

TQ_TEST_BACKEND=Engram python -m pytest -p transfer_queue_engram SITE_PACKAGES/tests/e2e/test_kv_interface_e2e.py
"""

import pytest

import engram.transfer_queue

CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": engram.transfer_queue.BACKEND, engram.transfer_queue.BACKEND: {"capacity": 100_000}},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the configuration to the tables of the test modules before their fixtures read them."""
    for item in items:
        module = getattr(item, "module", None)
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS[engram.transfer_queue.BACKEND] = CONFIG
