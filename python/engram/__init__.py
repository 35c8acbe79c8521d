"""Engram: learning memory.

Weighted records that decay and are reinforced, on one or many workers; replay buffers; numerics that need no cluster.

>>> import engram
>>> with engram.connect() as db:                    # a local cluster; or "grpc://host:7443", "cluster.yaml", "file:./data"
...     _ = db.insert([1, 2, 3], weights=[0.9, 0.5, 0.1])
...     _ = db.decay(0.25)
...     db.rank(limit=2).weights.round(2).tolist()
[0.65, 0.25]
"""

from . import aio as aio
from ._batch import Batch as Batch
from ._batch import Updated as Updated
from ._database import AsyncDatabase as AsyncDatabase
from ._database import Database as Database
from ._database import connect as connect
from ._errors import CapacityError as CapacityError
from ._errors import ConfigError as ConfigError
from ._errors import ConflictError as ConflictError
from ._errors import DeniedError as DeniedError
from ._errors import EngramError as EngramError
from ._errors import ForkedError as ForkedError
from ._errors import GpuError as GpuError
from ._errors import InvalidValueError as InvalidValueError
from ._errors import NotFoundError as NotFoundError
from ._errors import TimeoutError as TimeoutError
from ._errors import UnavailableError as UnavailableError
from ._errors import VersionMismatchError as VersionMismatchError
from ._learner import AsyncDistributedLearner as AsyncDistributedLearner
from ._learner import DistributedLearner as DistributedLearner
from ._learner import EpochReport as EpochReport
from ._learner import History as History
from ._learner import PutResult as PutResult
from ._replay_aio import AsyncReplayBuffer as AsyncReplayBuffer
from ._replay import ReplayBuffer as ReplayBuffer
from ._results import ClusterStatus as ClusterStatus
from ._results import Digest as Digest
from ._results import GroupQuality as GroupQuality
from ._results import Memories as Memories
from ._results import Quality as Quality
from ._results import Worker as Worker
from ._results import WriteResult as WriteResult
from ._samplers import Fifo as Fifo
from ._samplers import Groups as Groups
from ._samplers import Lifo as Lifo
from ._samplers import MinSize as MinSize
from ._samplers import Prioritized as Prioritized
from ._samplers import SampleToInsert as SampleToInsert
from ._samplers import Slices as Slices
from ._samplers import Uniform as Uniform
