//! Forecasts, decisions and simulations through the public interface.

mod decisions;
mod holt_winters;
mod simulation;
