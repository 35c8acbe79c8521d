"""Adapter for Flower: an unmodified ``flwr.clientapp.ClientApp`` takes part in a run of Engram.

The app is called in this process with a train message, as Flower's own nodes call it; no server of Flower is needed. Tested with flwr 1.42.

>>> import engram, engram.fed.flower
>>> accepted = engram.fed.flower.run(app, "grpc://fed.example.com:7443", "mnist", "hospital-3")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._database import Database
from .._errors import invalid
from . import Model, Task, tasks

#: Name of the metric with the number of samples, as Flower's strategies have it.
SAMPLES = "num-examples"
#: Names of metrics that are taken for the loss, the first that there is.
LOSSES = ("loss", "train_loss", "eval_loss", "train-loss")


def run(
    app: Any,
    db: Database | str | os.PathLike[str],
    run: str,
    client: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    node_config: Mapping[str, Any] | None = None,
    run_config: Mapping[str, Any] | None = None,
    node_id: int = 1,
    **options: Any,
) -> int:
    """Takes part in a run with Flower's ``ClientApp`` until it ends. Returns the number of updates that were accepted.

    The message has the arrays of the model by their layer in ``arrays`` and the settings of the run in ``config``, with ``server-round``. The reply
    has the trained arrays by the same names, and ``num-examples`` in its metrics.
    """
    from flwr.app import Context, RecordDict

    context = Context(
        run_id=1, node_id=node_id, node_config=dict(node_config or {}), state=RecordDict(), run_config=dict(run_config or {})
    )
    accepted = 0
    for task in tasks(db, run, client, keys=keys, **options):
        reply = app(_message(task, node_id), context)
        trained, samples, loss = _result(reply, task)
        accepted += task.reply(trained, samples=samples, loss=loss)
    return accepted


def _message(task: Task, node_id: int) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict

    config: dict[str, Any] = {**task.settings, "server-round": task.round}
    if task.proximal_weight > 0:
        config["proximal-mu"] = task.proximal_weight
    arrays = ArrayRecord({name: Array(array) for name, array in task.model.items()})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    metadata = Metadata(
        run_id=1,
        message_id=str(task.number),
        src_node_id=0,
        dst_node_id=node_id,
        reply_to_message_id="",
        group_id=str(task.round),
        created_at=time.time(),
        ttl=task.lease_seconds,
        message_type="train",
    )
    # Its declared overloads leave out the metadata, which a message to a running node has.
    create: Any = Message
    return create(content=content, metadata=metadata)


def _result(reply: Any, task: Task) -> tuple[Model, int, float | None]:
    if reply.has_error():
        raise RuntimeError(f"the Flower app failed: {reply.error}")
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        raise invalid(f"the reply of the Flower app has {len(records)} array records; required: 1")
    trained = {name: np.asarray(array.numpy(), np.float32) for name, array in records[0].items()}
    if set(trained) != set(task.model) and len(trained) == len(task.model):
        # Made from a list of arrays, which has numbers for names.
        trained = dict(zip(task.model, trained.values(), strict=True))
    metrics = {name: value for record in reply.content.metric_records.values() for name, value in record.items()}
    if SAMPLES not in metrics:
        raise invalid(f"the metrics of the reply of the Flower app have no {SAMPLES!r}: they have {sorted(metrics)}")
    loss = next((float(metrics[name]) for name in LOSSES if name in metrics), None)
    return trained, int(metrics[SAMPLES]), loss
