import numpy as np
import pytest

import engram
from engram import fisher, geodesic, tropical


def test_products_equal_numpy_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    left, right = (random.standard_normal(shape).astype(np.float32) for shape in ((37, 53), (53, 41)))
    left[3, 5] = -np.inf
    expected = (left[:, :, None] + right[None]).max(1)
    assert np.array_equal(tropical.matmul(left, right), expected)
    assert np.array_equal(tropical.matmul(left.T.copy().T, right.astype(np.float64)), expected), "any layout and type"
    shortest = tropical.matmul(-left, -right, semiring="min-plus")
    assert np.array_equal(shortest, -expected)
    assert tropical.matmul(np.empty((0, 3)), np.zeros((3, 2))).shape == (0, 2)


def test_tropical_layer_gives_winners_and_their_gradients() -> None:
    random = np.random.default_rng(2)
    batch, weights = (random.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (5, 3)))
    biases = np.array([-9.0, 0.5, 9.0], np.float32)
    weights[1, 0] = weights[4, 0] = 50.0
    batch[2, 1] = batch[2, 4]
    values, winners = tropical.forward(batch, weights, biases)
    edges = np.concatenate([batch[:, :, None] + weights[None], np.broadcast_to(biases, (7, 1, 3))], 1)
    assert np.array_equal(values, edges.max(1)) and np.array_equal(winners, edges.argmax(1))
    assert winners[2, 0] == 1 and (winners[:, 2] == 5).all(), "the lowest index on ties; the bias"
    upstream = random.standard_normal((7, 3)).astype(np.float32)
    to_batch, to_weights, to_biases = tropical.backward(upstream, winners, 5)
    won = upstream[:, None] * (winners[:, None] == np.arange(6)[None, :, None])
    assert to_batch == pytest.approx(won[:, :5].sum(2)) and to_weights == pytest.approx(won[:, :5].sum(0))
    assert to_biases == pytest.approx(won[:, 5].sum(0))


def test_fisher_matrix_does_not_depend_on_the_order_of_addition() -> None:
    scores = np.random.default_rng(1).standard_normal((1_000, 17)).astype(np.float32)
    exact = fisher.matrix(scores)
    reference = scores.astype(np.float64).T @ scores.astype(np.float64) / len(scores)
    assert exact == pytest.approx(reference, rel=1e-12, abs=1e-12)
    assert fisher.matrix(scores, fast=True) == pytest.approx(reference, rel=1e-12, abs=1e-12)
    assert np.array_equal(exact, exact.T)
    gradient = np.arange(17.0)
    solution = fisher.natural_gradient(scores, gradient, damping=0.1)
    assert (reference + 0.1 * np.eye(17)) @ solution == pytest.approx(gradient, rel=1e-6, abs=1e-6)


def test_geodesic_model_predicts_an_unseen_spectrum() -> None:
    ppb, nm, absorbance = geodesic.example(step=12)
    held_out = 2
    rest = np.arange(len(ppb)) != held_out
    model = geodesic.fit(ppb[rest], nm, absorbance[rest], steps=150, stride=2)
    assert model.steps <= 150 and np.isfinite(model.validation_loss)
    error = np.sqrt(np.mean((model.predict(ppb[held_out]) - absorbance[held_out]) ** 2))
    spread = np.sqrt(np.mean((absorbance[rest].mean(0) - absorbance[held_out]) ** 2))
    assert error < spread, "better than the mean of the others"
    assert np.array_equal(model.predict(33.0), geodesic.fit(ppb[rest], nm, absorbance[rest], steps=150, stride=2).predict(33.0))


def test_flow_decoder_predicts_an_unseen_spectrum_from_its_sources() -> None:
    ppb, nm, absorbance = geodesic.example(step=20)
    held_out = 2
    rest = np.arange(len(ppb)) != held_out
    known, spectra = ppb[rest], absorbance[rest]
    model = geodesic.fit(known, nm, spectra, steps=150, stride=2, decoder="Flow")
    predicted = model.predict(ppb[held_out])
    error, spread = (np.sqrt(np.mean((it - absorbance[held_out]) ** 2)) for it in (predicted, spectra.mean(0)))
    assert error < 0.9 * spread, "better than the mean of the others"
    slope = geodesic.fit(known, nm, spectra, steps=150, stride=2)
    assert np.abs(slope.predict(ppb[held_out]) - predicted).max() > 1e-4, "another decoder"
    # A shifted source shifts what is predicted from it: the path begins at its source, not at 0.
    first, shifted = (geodesic.fit(known, nm, it, steps=20, decoder="Flow").predict(25.0) for it in (spectra, spectra + 0.25))
    assert shifted == pytest.approx(first + 0.25, abs=1e-6)
    with pytest.raises(engram.InvalidValueError, match="Flux.*Slope.*Flow"):
        geodesic.fit(known, nm, spectra, decoder="Flux")


def test_engines_predict_the_same_spectrum() -> None:
    ppb, nm, absorbance = geodesic.example(step=40)
    exact = geodesic.fit(ppb, nm, absorbance, steps=20, validation_stride=4, stride=4).predict(25.0)
    for engine in ("BatchedShooting", "ChristoffelGrid"):
        other = geodesic.fit(ppb, nm, absorbance, steps=20, validation_stride=4, stride=4, engine=engine).predict(25.0)
        assert other == pytest.approx(exact, abs=1e-4) and not np.array_equal(other, exact), engine
    with pytest.raises(engram.InvalidValueError, match="engine ChristoffelGrid does not support decoder Flow"):
        geodesic.fit(ppb, nm, absorbance, steps=20, decoder="Flow", engine="ChristoffelGrid")


def test_leave_one_out_reports_every_fold_and_a_verdict() -> None:
    report = geodesic.leave_one_out(*geodesic.example(step=20), steps=20)
    assert report.rmse.shape == (6,) and np.isfinite(report.rmse).all()
    assert report.verdict in str(report) or report.verdict
    assert "<pre>" in report._repr_html_()
    assert report.coverage is None and len(report.estimates) == 6


def test_concentration_of_a_spectrum_is_found_with_an_interval() -> None:
    ppb, nm, absorbance = geodesic.example(step=12)
    model = geodesic.fit(ppb, nm, absorbance, steps=120, stride=2, starts=2)
    found = model.invert(0.5 * (absorbance[2] + absorbance[3]))
    assert found.low <= found.ppb <= found.high and abs(found.ppb - 25.0) < 5.0 and not found.at_limit
    wider = model.invert(0.5 * (absorbance[2] + absorbance[3]), confidence=0.99)
    assert wider.low <= found.low and found.high <= wider.high
    metric = model.metric
    assert metric["g"].shape == (5, 33) and metric["paths"][0, -1] == pytest.approx(60.0)
    with pytest.raises(engram.InvalidValueError, match="spectrum has 3 values"):
        model.invert([1.0, 2.0, 3.0])


def test_bands_are_calibrated_by_models_without_two_concentrations() -> None:
    report = geodesic.leave_one_out(*geodesic.example(step=20), steps=20, bands=True)
    assert report.coverage is not None and report.coverage.shape == (6,) and (report.coverage >= 0).all()
    with pytest.raises(engram.InvalidValueError, match="bands is True with 4 concentrations"):
        ppb, nm, absorbance = geodesic.example(step=20)
        geodesic.leave_one_out(ppb[:4], nm, absorbance[:4], bands=True)


def test_plots_show_every_fold_and_the_metric(tmp_path) -> None:  # type: ignore[no-untyped-def]
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    report = geodesic.leave_one_out(*geodesic.example(step=20), steps=10, bands=True)
    figure = report.plot(str(tmp_path / "folds.png"))
    assert len(figure.axes) == 18 and (tmp_path / "folds.png").stat().st_size > 10_000
    model = geodesic.fit(*geodesic.example(step=20), steps=10)
    assert len(model.plot(25.0).axes) == 1 and len(model.plot_metric().axes) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tropical.matmul(np.eye(2), np.eye(3)), "rows of the right matrix"),
        (lambda: tropical.matmul([[np.nan]], [[1.0]]), "left"),
        (lambda: tropical.matmul([[np.inf]], [[1.0]]), "left"),
        (lambda: tropical.matmul([[1e300]], [[1.0]]), "left has values above 3.4"),
        (lambda: tropical.matmul([1.0], [[1.0]]), r"left has shape \(1,\)"),
        (lambda: tropical.forward([[1.0, np.nan]], np.zeros((2, 1)), [0.0]), "batch"),
        (lambda: tropical.forward([[1.0]], np.zeros((2, 1)), [0.0]), "inputs|columns"),
        (lambda: tropical.backward([[1.0]], [[3]], 2), "winners are not indexes from 0 to 2"),
        (lambda: tropical.backward([[1.0]], [1], 2), r"winners has shape \(1,\)"),
        (lambda: fisher.matrix([[1.0, np.nan]]), r"scores\[0, 1\] is nan"),
        (lambda: fisher.matrix(np.empty((0, 3))), "samples"),
        (lambda: geodesic.fit([0, 1], [1, 2, 3], np.zeros((3, 2))), r"absorbance has shape \(3, 2\); required: \(2, 3\)"),
        (lambda: geodesic.fit([1, 0], [1, 2], np.zeros((2, 2))), "increas|ascend|order"),
        (lambda: geodesic.fit(*geodesic.example(20), steps=0), "steps"),
        (lambda: geodesic.fit(*geodesic.example(20), stepz=1), "stepz"),
    ],
)
def test_bad_array_names_what_is_wrong(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(engram.InvalidValueError, match=message):
        call()


@pytest.mark.torch
def test_tropical_layer_has_the_gradients_of_its_definition() -> None:
    import torch

    torch.manual_seed(0)
    layer = tropical.Layer(5, 3)
    batch = torch.randn(7, 5, requires_grad=True)
    values = layer(batch)
    edges = batch[:, :, None] + layer.weights[None]
    expected = torch.maximum(edges.max(1).values, layer.biases)
    assert torch.equal(values, expected)
    assert torch.equal(tropical.LayerFunction.apply(batch, layer.weights, layer.biases), expected)
    upstream = torch.randn(7, 3)
    own = torch.autograd.grad(values, [batch, layer.weights, layer.biases], upstream)
    for mine, theirs in zip(own, torch.autograd.grad(expected, [batch, layer.weights, layer.biases], upstream), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
