//! Timeline of a suite's passes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use engram_kernels::profiler::{Recorder, analyse, chrome_trace};

/// Number of recorded passes.
pub(crate) const PASSES: usize = 50;

/// Writes the recording as Chrome trace JSON, and prints a summary to standard error.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write(recorder: &Recorder, path: &Path) -> Result<()> {
    let track = recorder.take();
    let tracks = [track];
    fs::write(path, chrome_trace(&tracks)).with_context(|| format!("failed to write {}", path.display()))?;
    if let Some(analysis) = analyse(&tracks) {
        let percent = |share: f64| share * 100.0;
        let parts = analysis.shares;
        eprintln!(
            "recorded {} spans of {} in {:.1} ms: {:.1} % kernels, {:.1} % copies, {:.1} % waits, {:.1} % idle; bottleneck: {:?}",
            tracks[0].spans.len(),
            tracks[0].device,
            analysis.window_ns as f64 / 1e6,
            percent(parts.kernels),
            percent(parts.copies),
            percent(parts.waits),
            percent(parts.idle),
            analysis.bottleneck,
        );
    }
    Ok(())
}
