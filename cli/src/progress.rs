//! How far something long has come: a bar on a terminal, else a line per tenth or per ten seconds, always on stderr. What is
//! done within a moment is not told.

use crate::output::{Output, count};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Without a terminal: at least a line this often, so that a log shows life.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Lines are no closer than this: ten lines about half a second are noise.
const LINE_APART: Duration = Duration::from_millis(500);
/// How often a bar moves although nothing was done, for the eye.
const TICK: Duration = Duration::from_millis(120);

/// How far something long has come.
pub(crate) struct Progress {
    shown: Shown,
    title: String,
    total: Option<u64>,
    done: u64,
}

enum Shown {
    Bar(ProgressBar),
    Lines { output: Output, tenth: u64, at: Instant },
    Nothing,
}

impl Progress {
    /// Begins; `total` is how much there is to do, where that is known.
    pub(crate) fn new(output: &Output, title: impl Into<String>, total: Option<u64>) -> Self {
        let title = title.into();
        let shown = if output.live {
            let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
            bar.set_style(style(total.is_some()));
            bar.set_prefix(title.clone());
            bar.enable_steady_tick(TICK);
            Shown::Bar(bar)
        } else if output.quiet {
            Shown::Nothing
        } else {
            Shown::Lines { output: *output, tenth: 0, at: Instant::now() }
        };
        Self { shown, title, total, done: 0 }
    }

    /// Says how much there is to do, once that is known.
    pub(crate) fn set_total(&mut self, total: u64) {
        if self.total == Some(total) {
            return;
        }
        self.total = Some(total);
        if let Shown::Bar(bar) = &self.shown {
            bar.set_length(total);
            bar.set_style(style(true));
        }
    }

    /// So much is done by now; `message` says more, and may be empty.
    pub(crate) fn set(&mut self, done: u64, message: &str) {
        self.done = done;
        match &mut self.shown {
            Shown::Bar(bar) => {
                bar.set_position(done);
                bar.set_message(message.to_owned());
            }
            Shown::Lines { output, tenth, at } => {
                let percent = self.total.filter(|total| *total > 0).map_or(0, |total| done.min(total) * 100 / total);
                let now = percent / 10;
                let waited = at.elapsed();
                if (now > *tenth && waited >= LINE_APART) || waited >= LINE_EVERY {
                    (*tenth, *at) = (now.max(*tenth), Instant::now());
                    let of = self.total.map_or(" so far,".into(), |total| format!(" of {} ({percent}%)", count(total)));
                    output.note(format!("{}: {}{of} {message}", self.title, count(done)).trim_end());
                }
            }
            Shown::Nothing => {}
        }
    }

    /// What is done by now.
    pub(crate) const fn done(&self) -> u64 {
        self.done
    }

    /// Prints a line above what moves.
    pub(crate) fn note(&self, output: &Output, text: &str) {
        match &self.shown {
            Shown::Bar(bar) => bar.suspend(|| output.note(text)),
            Shown::Lines { .. } | Shown::Nothing => output.note(text),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn style(known: bool) -> ProgressStyle {
    let template = if known {
        "{prefix} {bar:30} {percent:>3}% {human_pos}/{human_len} {elapsed} {wide_msg}"
    } else {
        "{prefix} {spinner} {human_pos} {elapsed} {wide_msg}"
    };
    ProgressStyle::with_template(template).expect("the template is one of the two above")
}
