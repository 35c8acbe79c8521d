//! Progress of long operations on stderr: a bar on a terminal, else a line per 10 % or per ten seconds. Operations that finish
//! at once print nothing.

use crate::output::{Output, count};
use engram_api::printable_line;
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Without a terminal: longest time between two lines.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Without a terminal: shortest time between two lines.
const LINE_APART: Duration = Duration::from_millis(500);
/// Redraw interval of a bar.
const TICK: Duration = Duration::from_millis(120);

/// Progress display of one operation.
pub(crate) struct Progress {
    display: Display,
    title: String,
    total: Option<u64>,
    done: u64,
}

enum Display {
    Bar(ProgressBar),
    Lines { output: Output, tenth: u64, at: Instant },
    Hidden,
}

impl Progress {
    /// Starts the display; `total` is the amount of work, if known.
    pub(crate) fn new(output: &Output, title: impl Into<String>, total: Option<u64>) -> Self {
        let title = title.into();
        let display = if output.live {
            let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
            bar.set_style(style(total.is_some()));
            bar.set_prefix(title.clone());
            bar.enable_steady_tick(TICK);
            Display::Bar(bar)
        } else if output.quiet {
            Display::Hidden
        } else {
            Display::Lines { output: *output, tenth: 0, at: Instant::now() }
        };
        Self { display, title, total, done: 0 }
    }

    /// Sets the amount of work.
    pub(crate) fn set_total(&mut self, total: u64) {
        if self.total == Some(total) {
            return;
        }
        self.total = Some(total);
        if let Display::Bar(bar) = &self.display {
            bar.set_length(total);
            bar.set_style(style(true));
        }
    }

    /// Sets the amount of finished work; `message` may be empty.
    pub(crate) fn set(&mut self, done: u64, message: &str) {
        self.done = done;
        let message = &*printable_line(message);
        match &mut self.display {
            Display::Bar(bar) => {
                bar.set_position(done);
                bar.set_message(message.to_owned());
            }
            Display::Lines { output, tenth, at } => {
                let percent = self.total.filter(|total| *total > 0).map_or(0, |total| done.min(total) * 100 / total);
                let now = percent / 10;
                let waited = at.elapsed();
                if (now > *tenth && waited >= LINE_APART) || waited >= LINE_EVERY {
                    (*tenth, *at) = (now.max(*tenth), Instant::now());
                    let of = self.total.map_or(" so far,".into(), |total| format!(" of {} ({percent}%)", count(total)));
                    output.note(format!("{}: {}{of} {message}", self.title, count(done)).trim_end());
                }
            }
            Display::Hidden => {}
        }
    }

    /// Returns the amount of finished work.
    pub(crate) const fn done(&self) -> u64 {
        self.done
    }

    /// Prints a line above the bar.
    pub(crate) fn note(&self, output: &Output, text: &str) {
        match &self.display {
            Display::Bar(bar) => bar.suspend(|| output.note(text)),
            Display::Lines { .. } | Display::Hidden => output.note(text),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

fn style(has_total: bool) -> ProgressStyle {
    let template = if has_total {
        "{prefix} {bar:30} {percent:>3}% {human_pos}/{human_len} {elapsed} {wide_msg}"
    } else {
        "{prefix} {spinner} {human_pos} {elapsed} {wide_msg}"
    };
    ProgressStyle::with_template(template).expect("both templates above are valid")
}
