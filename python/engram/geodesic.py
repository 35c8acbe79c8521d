"""The geodesic spectral model: predicts the absorbance spectrum at one concentration from the spectra at others.

>>> from engram import geodesic
>>> ppb, nm, absorbance = geodesic.example(step=20)                  # six spectra, or your own arrays
>>> model = geodesic.fit(ppb, nm, absorbance, steps=40)
>>> spectrum = model.predict(25.0)
>>> spectrum.shape == nm.shape
True
>>> found = model.invert(absorbance[2])                              # which concentration has this spectrum?
>>> found.low <= found.ppb <= found.high
True
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Inversion:
    """A concentration that was estimated from a spectrum."""

    #: The estimate.
    ppb: float
    #: Lower end of the interval.
    low: float
    #: Upper end of the interval.
    high: float
    #: RMSE of the closest prediction: far above the noise means that the spectrum is of something else.
    rmse: float
    #: Whether the estimate lies at an end of the range of concentrations that were tried.
    at_limit: bool


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model: the mean of its random starts."""

    ppb: F64
    nm: F64
    absorbance: F64
    _trainers: tuple[_engram.GeodesicTrainer, ...]

    def predict(self, ppb: float) -> F64:
        """Returns the spectrum at a concentration, as the mean over all training spectra as sources.

        Of a training concentration it is predicted from the others; the model has seen it, so this says nothing about new ones.
        """
        if not math.isfinite(ppb):
            raise invalid(f"ppb is {ppb}; allowed: finite numbers")
        spectra = [_engram.GeodesicTrainer.predict(trainer, float(ppb)) for trainer in self._trainers]
        mean: F64 = np.mean(spectra, axis=0)
        return mean

    def invert(self, spectrum: object, *, confidence: float = 0.9) -> Inversion:
        """Estimates the concentration of a spectrum on the wavelengths ``nm``, with an interval.

        The interval is a bootstrap over blocks of 20 nm and over the starts.
        """
        values = vector("spectrum", spectrum, np.float64)
        return Inversion(*_engram.geodesic_invert(self._trainers, values, confidence))

    @property
    def steps(self) -> int:
        """Number of training steps of all starts."""
        return sum(trainer.progress()[0] for trainer in self._trainers)

    @property
    def validation_loss(self) -> float:
        """Least loss of the inner validation split, standardised, in the mean over the starts."""
        return float(np.mean([trainer.progress()[2] for trainer in self._trainers]))

    @property
    def metric(self) -> dict[str, Any]:
        """The learned metric of the first start: ``g`` and ``gamma`` [nm, ppb], and geodesics ``paths`` [nm, times] in ppb."""
        figure: dict[str, Any] = json.loads(self._trainers[0].metric())
        return {name: np.array(values) for name, values in figure.items()}

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

    def plot_metric(self, path: str | None = None) -> Any:
        """Plots the learned metric and how far its geodesics are from straight lines."""
        import matplotlib.pyplot as plt

        metric = self.metric
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for nm, g, way in zip(metric["nm"], metric["g"], metric["paths"], strict=True):
            left.plot(metric["ppb"], g, label=f"{nm:g} nm")
            right.plot(metric["times"], way - (way[0] + metric["times"] * (way[-1] - way[0])), label=f"{nm:g} nm")
        left.set(xlabel="concentration (ppb)", ylabel="g")
        right.set(xlabel="time", ylabel="distance from a straight line (ppb)")
        left.legend()
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

    @property
    def estimates(self) -> list[Inversion]:
        """Concentration estimated from each held-out spectrum, with an interval of 90 %."""
        found = (fold["inversion"] for fold in self.data["folds"])
        return [Inversion(it["ppb"], it["low"], it["high"], it["rmse"], it["atLimit"]) for it in found]

    @property
    def coverage(self) -> F64 | None:
        """Part of each held-out spectrum inside its 90 % band; ``None`` without bands."""
        bands = [fold["band"] for fold in self.data["folds"]]
        return None if None in bands else np.array([band["coverage"] for band in bands])

    def plot(self, path: str | None = None) -> Any:
        """Plots each fold, measured and predicted with its band, the residuals, and the RMSE next to the baselines."""
        import matplotlib.pyplot as plt

        folds, nm = self.data["folds"], np.array(self.data["nm"])
        figure, axes = plt.subplots(3, len(folds), figsize=(3.2 * len(folds), 8), layout="constrained", squeeze=False)
        for fold, (top, middle) in zip(folds, axes[:2].T, strict=True):
            truth, predicted = np.array(fold["truth"]), np.array(fold["prediction"])
            top.plot(nm, truth, label="measured")
            top.plot(nm, predicted, label="predicted")
            middle.plot(nm, truth - predicted, linewidth=0.8)
            if fold["band"] is not None:
                low, high = np.array(fold["band"]["low"]), np.array(fold["band"]["high"])
                top.fill_between(nm, low, high, alpha=0.25, label="90 % band")
                middle.fill_between(nm, low - predicted, high - predicted, alpha=0.25)
            top.set_title(f"{fold['ppb']:g} ppb{', extrapolation' if fold['extrapolation'] else ''}", fontsize=9)
        axes[0, 0].legend(fontsize=8)
        axes[0, 0].set_ylabel("absorbance")
        axes[1, 0].set_ylabel("residual")
        names = ["geodesic model", *(it["baseline"] for it in folds[0]["baselines"])]
        for fold, bottom in zip(folds, axes[2], strict=True):
            values = [fold["scores"]["rmse"], *(it["scores"]["rmse"] for it in fold["baselines"])]
            bottom.barh(names, values, color=["C1", *["0.6"] * (len(values) - 1)])
            bottom.invert_yaxis()
            bottom.set_xlabel("RMSE")
        for bottom in axes[2, 1:]:
            bottom.set_yticklabels([])
        figure.suptitle(self.verdict.split(". ")[0], fontsize=9)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def fit(
    ppb: object, nm: object, absorbance: object, *, start: int = 0, starts: int = 1, threads: int | None = None, **settings: Any
) -> Model:
    """Trains a model on spectra: ascending ``ppb``, ascending ``nm``, ``absorbance`` [ppb, nm].

    ``starts`` models with different initial parameters are trained, on all processors; their mean is the prediction.
    ``settings`` are those of a manifest: ``steps``, ``seed``, ``stride``, ``patience``, ``metric_rate``, ``decoder_rate``, ... ``engine``
    is ``ClosedForm``, ``BatchedShooting`` or ``ChristoffelGrid``: what solves the geodesics of predictions.
    """
    if starts < 1:
        raise invalid(f"starts is {starts}; allowed: at least 1")
    arrays = _spectra(ppb, nm, absorbance)
    build = partial(_engram.GeodesicTrainer, *arrays, settings=_settings(settings))
    trainers = tuple(build(start=start + number) for number in range(starts))
    _run(trainers, threads)
    return Model(*arrays, trainers)


def leave_one_out(
    ppb: object,
    nm: object,
    absorbance: object,
    *,
    starts: int = 1,
    bands: bool = False,
    threads: int | None = None,
    **settings: Any,
) -> Report:
    """Predicts each concentration from the others, on all processors, and compares with simple baselines.

    With ``bands`` models without two concentrations are trained too; they calibrate a band of 90 % around each prediction.
    """
    if starts < 1:
        raise invalid(f"starts is {starts}; allowed: at least 1")
    arrays = _spectra(ppb, nm, absorbance)
    pairs = _engram.geodesic_calibration_pairs(len(arrays[0])) if bands else []
    if bands and not pairs:
        raise invalid(f"bands is True with {len(arrays[0])} concentrations; allowed: at least 5 of them")
    build = partial(_engram.GeodesicTrainer, *arrays, settings=_settings(settings))
    models = [build(fold=fold, start=start) for start in range(starts) for fold in range(len(arrays[0]))]
    calibrations = [build(fold=first, other=second) for first, second in pairs]
    _run([*models, *calibrations], threads)
    data, text = models[0].report(
        [model.result() for model in models],
        [model.profile() for model in models],
        [calibration.result() for calibration in calibrations],
    )
    return Report(json.loads(data), text)


def _run(trainers: Sequence[_engram.GeodesicTrainer], threads: int | None) -> None:
    """Trains all to their end."""
    if len(trainers) == 1:
        _train(trainers[0])
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_train, trainers))


def _train(trainer: _engram.GeodesicTrainer) -> None:
    while not trainer.advance(REPORTED_STEPS):
        pass


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
