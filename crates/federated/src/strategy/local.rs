//! What strategies ask of local training: the gradient of the proximal term, SCAFFOLD steps.

/// Adds the gradient of FedProx's local term `mu/2 * norm(y - x)^2` to the gradient at `y`.
///
/// All slices have one value per parameter; `x` is the model that was downloaded.
pub fn proximal_gradient(gradient: &mut [f64], y: &[f64], x: &[f64], mu: f64) {
    for ((gradient, y), x) in gradient.iter_mut().zip(y).zip(x) {
        *gradient += mu * (y - x);
    }
}

/// A client's part of SCAFFOLD.
#[derive(Debug, Clone, PartialEq)]
pub struct Scaffold {
    /// The client's control variate c_k, kept between rounds.
    control: Vec<f64>,
}

impl Scaffold {
    /// Creates a control variate of zeros.
    #[must_use]
    pub fn new(parameters: usize) -> Self {
        Self { control: vec![0.0; parameters] }
    }

    /// One local step `y -= rate * (gradient - c_k + c)` with the server's control variate `c`.
    pub fn step(&self, y: &mut [f64], gradient: &[f64], server: &[f64], rate: f64) {
        let controls = self.control.iter().zip(server);
        for ((y, gradient), (own, server)) in y.iter_mut().zip(gradient).zip(controls) {
            *y -= rate * (gradient - own + server);
        }
    }

    /// Ends local training from `x` to `y` in `steps` steps: `c_k += (x - y)/(steps * rate) - c`. Returns the change, for the upload.
    pub fn finish(&mut self, x: &[f64], y: &[f64], server: &[f64], steps: u32, rate: f64) -> Vec<f32> {
        let moved = x.iter().zip(y).zip(server);
        let changes: Vec<f32> =
            moved.map(|((x, y), server)| ((x - y) / (f64::from(steps) * rate) - server) as f32).collect();
        for (control, change) in self.control.iter_mut().zip(&changes) {
            *control += f64::from(*change);
        }
        changes
    }
}
