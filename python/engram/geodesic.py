"""The geodesic spectral model: predicts the absorbance spectrum at one concentration from the spectra at others.

>>> from engram import geodesic
>>> ppb, nm, absorbance = geodesic.example(step=20)                  # six spectra, or your own arrays
>>> model = geodesic.fit(ppb, nm, absorbance, steps=40)
>>> spectrum = model.predict(25.0)
>>> spectrum.shape == nm.shape
True
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

import numpy as np

from . import _engram
from ._arrays import F64, matrix, vector
from ._errors import invalid

#: Steps between reports of progress.
REPORTED_STEPS = 50


def example(step: int = 1) -> tuple[F64, F64, F64]:
    """Returns synthetic spectra: concentrations in ppb, wavelengths in nm (every ``step``-th of 601), absorbances [ppb, nm]."""
    return _engram.geodesic_example(step)


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model."""

    ppb: F64
    nm: F64
    absorbance: F64
    _trainer: _engram.GeodesicTrainer

    def predict(self, ppb: float) -> F64:
        """Returns the spectrum at a concentration, as the mean over all training spectra as sources.

        Of a training concentration it is predicted from the others; the model has seen it, so this says nothing about new ones.
        """
        if not math.isfinite(ppb):
            raise invalid(f"ppb is {ppb}; allowed: finite numbers")
        return _engram.GeodesicTrainer.predict(self._trainer, float(ppb))

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self._trainer.progress()[0]

    @property
    def validation_loss(self) -> float:
        """Least loss of the inner validation split, standardised."""
        return self._trainer.progress()[2]

    def plot(self, ppb: float, path: str | None = None) -> Any:
        """Plots the measured spectra and the prediction at ``ppb`` with matplotlib; writes a file if ``path`` is given."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        for known, row in zip(self.ppb, self.absorbance, strict=True):
            axes.plot(self.nm, row, linewidth=0.8, label=f"{known:g} ppb")
        axes.plot(self.nm, self.predict(ppb), color="black", linewidth=2, label=f"{ppb:g} ppb, predicted")
        axes.set(xlabel="wavelength (nm)", ylabel="absorbance")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


@dataclass(frozen=True)
class Report:
    """A leave-one-out: every concentration is predicted by models that have not seen its spectrum."""

    #: All figures, as of ``engram report``.
    data: dict[str, Any]
    #: The same as a table.
    text: str

    @property
    def verdict(self) -> str:
        """A sentence on the model and the best simple baseline."""
        return str(self.data["verdict"])

    @property
    def rmse(self) -> F64:
        """Root of the mean squared error of each fold."""
        return np.array([fold["scores"]["rmse"] for fold in self.data["folds"]])

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def fit(ppb: object, nm: object, absorbance: object, *, start: int = 0, **settings: Any) -> Model:
    """Trains a model on spectra: ascending ``ppb``, ascending ``nm``, ``absorbance`` [ppb, nm].

    ``settings`` are those of a manifest: ``steps``, ``seed``, ``stride``, ``patience``, ``metric_rate``, ``decoder_rate``, ...
    """
    arrays = _spectra(ppb, nm, absorbance)
    trainer = _engram.GeodesicTrainer(*arrays, settings=_settings(settings), start=start)
    while not trainer.advance(REPORTED_STEPS):
        pass
    return Model(*arrays, trainer)


def leave_one_out(
    ppb: object, nm: object, absorbance: object, *, starts: int = 1, threads: int | None = None, **settings: Any
) -> Report:
    """Predicts each concentration from the others, on all processors, and compares with simple baselines."""
    if starts < 1:
        raise invalid(f"starts is {starts}; allowed: at least 1")
    arrays = _spectra(ppb, nm, absorbance)
    build = partial(_engram.GeodesicTrainer, *arrays, settings=_settings(settings))
    trainers = [build(fold=fold, start=start) for start in range(starts) for fold in range(len(arrays[0]))]
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(_train, trainers))
    data, text = trainers[0].report(results)
    return Report(json.loads(data), text)


def _train(trainer: _engram.GeodesicTrainer) -> str:
    while not trainer.advance(REPORTED_STEPS):
        pass
    return trainer.result()


def _spectra(ppb: object, nm: object, absorbance: object) -> tuple[F64, F64, F64]:
    first, second = vector("ppb", ppb, np.float64), vector("nm", nm, np.float64)
    third = matrix("absorbance", absorbance, np.float64)
    if third.shape != (len(first), len(second)):
        raise invalid(f"absorbance has shape {third.shape}; required: ({len(first)}, {len(second)}), [ppb, nm]")
    return first, second, third


def _settings(settings: dict[str, Any]) -> str:
    def camel(name: str) -> str:
        first, *rest = name.split("_")
        return first + "".join(word.capitalize() for word in rest)

    return json.dumps({camel(name): value for name, value in settings.items()})
