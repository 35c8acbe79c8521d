"""Damped additive Holt-Winters by statsmodels 0.15.0: `pip install statsmodels && python make_golden.py` writes holt_winters.json.

ETSModel has the weights of the error of the forecast, Engram those of Holt and Winters: the same states for
`smoothing_trend = level * trend` and `smoothing_seasonal = seasonal * (1 - level)`.
"""

import json

import numpy as np
from statsmodels.tsa.exponential_smoothing.ets import ETSModel

generator = np.random.default_rng(38)
cases = []
for period, smoothing in [
    (12, {"level": 0.3, "trend": 0.05, "seasonal": 0.2, "damping": 0.98}),
    (7, {"level": 0.1, "trend": 0.1, "seasonal": 0.05, "damping": 0.9}),
    (0, {"level": 0.5, "trend": 0.1, "seasonal": 0.0, "damping": 0.95}),
]:
    count = 60
    time = np.arange(count)
    wave = 20 * np.sin(2 * np.pi * time / period) if period else np.zeros(count)
    samples = np.round(100 + 0.4 * time + wave + generator.normal(0, 5, count), 3)
    seasonal = np.round(generator.normal(0, 10, period), 3)
    model = ETSModel(
        samples,
        trend="add",
        damped_trend=True,
        seasonal="add" if period else None,
        seasonal_periods=period or None,
        initialization_method="known",
        initial_level=95.0,
        initial_trend=0.5,
        initial_seasonal=seasonal if period else None,
    )
    weights = [smoothing["level"], smoothing["level"] * smoothing["trend"]]
    if period:
        weights.append(smoothing["seasonal"] * (1 - smoothing["level"]))
    # The initial states are parameters too; the seasonal ones from the newest to the oldest.
    result = model.smooth([*weights, smoothing["damping"], 95.0, 0.5, *seasonal[::-1]])
    cases.append(
        {
            "smoothing": smoothing,
            "level": 95.0,
            "trend": 0.5,
            "seasonal": seasonal.tolist(),
            "samples": samples.tolist(),
            "fitted": result.fittedvalues.tolist(),
            "forecast": result.forecast(24).tolist(),
        }
    )
with open("holt_winters.json", "w") as file:
    json.dump(cases, file)
    file.write("\n")
