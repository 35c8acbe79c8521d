"""Progress bars of calls that take a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

#: Whether to show a bar; ``"auto"``: on a terminal and in a notebook.
Progress: TypeAlias = "bool | Literal['auto']"


@contextmanager
def progress_bar(total: int, unit: str, progress: Progress) -> Iterator[Callable[[int], object]]:
    """Shows a bar if tqdm is installed; yields the function that advances it."""
    if progress is not False:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            pass
        else:
            with tqdm(total=total, unit=unit, disable=None if progress == "auto" else False) as bar:
                yield bar.update
                return
    yield lambda _count: None
