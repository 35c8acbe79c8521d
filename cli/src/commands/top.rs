//! `engram top`: live view of a cluster.

use super::overview::{self, Overview, Run};
use crate::context::{ClusterArgument, Context};
use crate::error::failure;
use crate::output::{Table, bytes, count, seconds, short_seconds};
use crate::target::Target;
use anyhow::Context as _;
use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};
use engram_api::ExitCode;
use engram_client::Client;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table as Grid};
use std::collections::{BTreeMap, VecDeque};
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

/// Samples kept for the sparkline: more than the width of a terminal.
const HISTORY: usize = 400;
/// Events kept.
const EVENTS: usize = 100;
/// The figure that only trainings have.
const MEMBERS: &str = "members";
/// Poll interval of the keyboard.
const KEY: Duration = Duration::from_millis(100);

/// Show a live view of workers, runs, weights and events
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram top
  engram top --interval 5
  engram top --once -o json      one sample, for scripts
  engram -n research top words   LearnerCluster words in Kubernetes

Keys: q, Esc or Ctrl-C quits.")]
pub(crate) struct Top {
    #[command(flatten)]
    cluster: ClusterArgument,
    /// Seconds between updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// Print one sample and exit
    #[arg(long)]
    once: bool,
}

pub(crate) async fn run(arguments: &Top, context: &Context) -> anyhow::Result<ExitCode> {
    if !(0.1..=3_600.0).contains(&arguments.interval) {
        let message = format!("--interval is {}; allowed: 0.1 to 3600 seconds", arguments.interval);
        return Err(failure(ExitCode::Usage, message));
    }
    let target = Target::find(&context.for_cluster(&arguments.cluster)).await?;
    let client = target.connect().await?;
    if arguments.once {
        return once(&client, &target, context).await;
    }
    if !std::io::stdout().is_terminal() {
        return Err(failure(ExitCode::Usage, "top requires a terminal; in scripts use: engram top --once -o json"));
    }
    let mut terminal = ratatui::try_init().context("failed to initialize the terminal")?;
    let result = live(&client, &target, Duration::from_secs_f64(arguments.interval), context, &mut terminal).await;
    ratatui::restore();
    result.map(|()| ExitCode::Ok)
}

async fn once(client: &Client, target: &Target, context: &Context) -> anyhow::Result<ExitCode> {
    let overview = overview::read(client, target).await?;
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(&overview)?)?;
        return Ok(ExitCode::Ok);
    }
    let mut table = Table::new(&[
        "worker",
        "state",
        ">memories",
        ">partitions",
        ">updates",
        ">memory",
        ">pending",
        "device",
        "assignments",
    ]);
    for worker in &overview.workers {
        table.row([
            worker.ordinal.to_string(),
            state(worker).into(),
            count(worker.memories),
            worker.partitions.to_string(),
            count(worker.updates),
            bytes(worker.resident_bytes),
            worker.pending_records.to_string(),
            worker.device.clone(),
            overview.assignments(worker.ordinal),
        ]);
    }
    context.output.list(&overview.workers, &table)?;
    Ok(ExitCode::Ok)
}

async fn live(
    client: &Client,
    target: &Target,
    interval: Duration,
    context: &Context,
    terminal: &mut ratatui::DefaultTerminal,
) -> anyhow::Result<()> {
    let mut view = View::new(context.output.color);
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut keys = tokio::time::interval(KEY);
    keys.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => match overview::read(client, target).await {
                Ok(overview) => view.update(overview, Instant::now()),
                Err(error) => view.event(format!("failed to read the cluster state: {error:#}")),
            },
            _ = keys.tick() => {
                while crossterm::event::poll(Duration::ZERO).context("failed to read the terminal")? {
                    if quits(&crossterm::event::read().context("failed to read the terminal")?) {
                        return Ok(());
                    }
                }
            }
        }
        if let Target::Local(local) = target
            && !local.endpoints.is_running()
        {
            view.event("the cluster was stopped".into());
        }
        terminal.draw(|frame| view.draw(frame)).context("failed to draw")?;
    }
}

fn quits(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

const fn state(worker: &overview::Worker) -> &'static str {
    match (worker.alive, worker.ready) {
        (false, _) => "unreachable",
        (true, false) => "starting",
        (true, true) => "ready",
    }
}

/// Names of the levels of automatic compression.
const LEVELS: [&str; 3] = ["None", "Bf16", "PowerSgd"];

/// Returns two lines on how the workers train a run; `None` for a run of another kind.
fn training(run: &Run) -> Option<[String; 2]> {
    let figure = |name: &str| run.metrics.get(name).copied();
    let time = |name: &str| figure(name).map_or_else(|| "-".to_owned(), short_seconds);
    let number = |name: &str| figure(name).map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let fallback = if figure("fallback") == Some(1.0) { ", fallback to one worker" } else { "" };
    let group = format!(
        "{} member(s), {} failed{fallback}, {} samples, {} samples/s",
        figure(MEMBERS)?,
        figure("failed_members").unwrap_or(0.0),
        count(run.updates),
        figure("samples_per_second").map_or_else(|| "-".to_owned(), |value| count(value as u64)),
    );
    let share = figure("reduce_seconds").zip(figure("step_seconds")).filter(|(_, step)| *step > 0.0);
    let share = share.map_or_else(String::new, |(reduce, step)| format!(" ({:.0} %)", 100.0 * reduce / step));
    let level = figure("compression_level").and_then(|level| LEVELS.get(level as usize));
    let level = level.map_or_else(String::new, |level| format!(", compression {level}"));
    let step = format!(
        "step {}, reduction {}{share}{level}, efficiency {}, loss {}",
        time("step_seconds"),
        time("reduce_seconds"),
        number("efficiency"),
        number("loss"),
    );
    Some([group, step])
}

/// Contents of the screen, independent of a terminal.
struct View {
    color: bool,
    overview: Overview,
    updated_at: Option<Instant>,
    /// Updates per second of each worker since the previous sample.
    rates: BTreeMap<u32, f64>,
    /// Updates per second of all workers, newest last.
    history: VecDeque<u64>,
    /// Newest last.
    events: VecDeque<String>,
}

impl View {
    fn new(color: bool) -> Self {
        Self {
            color,
            overview: Overview::default(),
            updated_at: None,
            rates: BTreeMap::new(),
            history: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    fn event(&mut self, text: String) {
        if self.events.back() == Some(&text) {
            return;
        }
        self.events.push_back(text);
        if self.events.len() > EVENTS {
            self.events.pop_front();
        }
    }

    /// Takes a sample and records events for changes since the previous one.
    fn update(&mut self, overview: Overview, now: Instant) {
        let before = std::mem::replace(&mut self.overview, overview);
        if let Some(at) = self.updated_at {
            let elapsed = now.saturating_duration_since(at).as_secs_f64().max(1e-3);
            let overview = self.overview.clone();
            let mut total = 0.0;
            for worker in &overview.workers {
                let old = before.workers.iter().find(|old| old.ordinal == worker.ordinal);
                // A restarted worker counts from zero.
                let counted = old.map_or(0, |old| worker.updates.checked_sub(old.updates).unwrap_or(worker.updates));
                let rate = if old.is_some_and(|old| old.alive) { counted as f64 / elapsed } else { 0.0 };
                total += rate;
                self.rates.insert(worker.ordinal, rate);
                if let Some(old) = old
                    && state(old) != state(worker)
                {
                    self.event(format!("worker {}: {} -> {}", worker.ordinal, state(old), state(worker)));
                }
                if old.is_some_and(|old| old.incarnation != worker.incarnation) {
                    self.event(format!("worker {} restarted", worker.ordinal));
                }
            }
            self.history.push_back(total as u64);
            if self.history.len() > HISTORY {
                self.history.pop_front();
            }
            for run in &overview.runs {
                let old = before.runs.iter().find(|old| old.name == run.name);
                if old.is_none_or(|old| old.phase != run.phase) {
                    self.event(format!("run {}: {} {}", run.name, run.phase, run.message));
                }
            }
            if before.map_version != overview.map_version {
                self.event(format!("partition map {} -> {}", before.map_version, overview.map_version));
            }
        }
        self.updated_at = Some(now);
    }

    fn style(&self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let overview = &self.overview;
        let run = overview.runs.iter().find(|run| run.is_active()).or_else(|| overview.runs.last());
        let training = run.and_then(training);
        let [header, workers, middle, groups, events, footer] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(overview.workers.len().min(20) as u16 + 3),
            Constraint::Length(4 + if run.is_some() { 3 } else { 0 } + if training.is_some() { 4 } else { 0 }),
            Constraint::Length(overview.quality.len().min(6) as u16 + 3),
            Constraint::Min(3),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let health = if overview.ready { ("ready", Color::Green) } else { ("not ready", Color::Red) };
        let title = format!(
            "engram  {}  {}  {} memories  {} partitions  map {}",
            overview.name,
            health.0,
            count(overview.memories),
            overview.partitions,
            overview.map_version
        );
        frame.render_widget(Line::styled(title, self.style(health.1).add_modifier(Modifier::BOLD)), header);
        frame.render_widget(self.workers(), workers);
        let [progress, steps, line] = Layout::vertical([
            Constraint::Length(if run.is_some() { 3 } else { 0 }),
            Constraint::Length(if training.is_some() { 4 } else { 0 }),
            Constraint::Min(3),
        ])
        .areas(middle);
        if let Some(run) = run {
            frame.render_widget(self.progress(run), progress);
        }
        if let Some(lines) = training {
            let lines = Paragraph::new(lines.map(Line::raw).to_vec());
            frame.render_widget(lines.block(Block::bordered().title(" training ")), steps);
        }
        let width = line.width.saturating_sub(2) as usize;
        let shown: Vec<u64> = self.history.iter().skip(self.history.len().saturating_sub(width)).copied().collect();
        let now = self.history.back().copied().unwrap_or(0);
        let block = Block::bordered().title(format!(" updates/s: {} ", count(now)));
        frame.render_widget(Sparkline::default().data(shown).style(self.style(Color::Cyan)).block(block), line);
        frame.render_widget(self.groups(), groups);
        let replication = overview.replication.iter().map(|state| {
            let color = if state.under_replicated + state.activating == 0 { Color::Green } else { Color::Yellow };
            Line::styled(format!("replication: {}", state.describe()), self.style(color))
        });
        let conditions =
            overview.conditions.iter().map(|text| Line::styled(format!("! {text}"), self.style(Color::Yellow)));
        let lines: Vec<Line<'_>> = replication
            .chain(conditions)
            .chain(self.events.iter().rev().map(|text| Line::raw(text.as_str())))
            .collect();
        frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" events ")), events);
        frame.render_widget(Line::styled("q: quit", Style::new().add_modifier(Modifier::DIM)), footer);
    }

    fn workers(&self) -> Grid<'_> {
        let rows = self.overview.workers.iter().map(|worker| {
            let color = if worker.ready { Color::Green } else { Color::Red };
            let rate = self.rates.get(&worker.ordinal).copied().unwrap_or(0.0);
            Row::new([
                Cell::from(worker.ordinal.to_string()),
                Cell::from(state(worker)).style(self.style(color)),
                Cell::from(count(worker.memories)),
                Cell::from(worker.partitions.to_string()),
                Cell::from(count(rate as u64)),
                Cell::from(bytes(worker.resident_bytes)),
                Cell::from(seconds(worker.uptime_seconds)),
                Cell::from(worker.device.as_str()),
                Cell::from(self.overview.assignments(worker.ordinal)),
            ])
        });
        let header =
            ["worker", "state", "memories", "partitions", "updates/s", "memory", "uptime", "device", "assignments"];
        let fixed = [7, 12, 13, 11, 12, 11, 9].map(Constraint::Length).into_iter();
        let widths = fixed.chain([Constraint::Length(14), Constraint::Min(14)]);
        Grid::new(rows, widths)
            .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
            .block(Block::bordered().title(" workers "))
    }

    fn progress(&self, run: &Run) -> Gauge<'_> {
        let of = if run.epochs > 0 { format!(" of {}", count(run.epochs)) } else { String::new() };
        let is_training = run.metrics.contains_key(MEMBERS);
        let unit = if is_training { "step" } else { "epoch" };
        let mut label = format!("{} {unit} {}{of}", run.phase, count(run.epoch));
        if let Some(eta) = run.eta_seconds.filter(|_| run.is_active()) {
            label.push_str(&format!(", {} remaining", seconds(eta)));
        }
        for (name, value) in run.metrics.iter().take(if is_training { 0 } else { 4 }) {
            label.push_str(&format!(", {name} {value:.3}"));
        }
        let queued = self.overview.queued();
        let queue = if queued.is_empty() {
            String::new()
        } else {
            format!("({} queued: {}) ", queued.len(), queued.join(", "))
        };
        Gauge::default()
            .block(Block::bordered().title(format!(" run {} {queue}", run.name)))
            .gauge_style(self.style(Color::Blue))
            .ratio(run.ratio().unwrap_or(0.0))
            .label(label)
    }

    fn groups(&self) -> Grid<'_> {
        let rows = self.overview.quality.iter().map(|group| {
            Row::new([
                group.group.to_string(),
                count(group.count),
                format!("{:.6}", group.mean),
                format!("{:.6}", group.min),
                format!("{:.6}", group.max),
            ])
        });
        Grid::new(rows, [7, 15, 10, 10, 10].map(Constraint::Length))
            .header(
                Row::new(["group", "memories", "mean", "min", "max"]).style(Style::new().add_modifier(Modifier::BOLD)),
            )
            .block(Block::bordered().title(" weights "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn sample(updates: u64, incarnation: u64, phase: &str) -> Overview {
        let worker = overview::Worker {
            ordinal: 0,
            alive: true,
            ready: true,
            updates,
            incarnation,
            device: "CPU".into(),
            ..overview::Worker::default()
        };
        let run = Run {
            name: "history".into(),
            phase: phase.into(),
            epoch: 30,
            epochs: 60,
            updates,
            epochs_per_second: 10.0,
            updates_per_second: 10.0,
            elapsed_seconds: 3.0,
            eta_seconds: Some(3.0),
            driver: Some(0),
            label: String::new(),
            message: String::new(),
            metrics: BTreeMap::new(),
            tasks: vec![overview::Task {
                number: 3,
                name: "fold-3".into(),
                worker: 0,
                fraction: 0.5,
                lost_workers: 1,
                checkpoint: 0.0,
            }],
        };
        let waiting =
            Run { name: "next".into(), phase: "Queued".into(), driver: None, tasks: Vec::new(), ..run.clone() };
        let quality = vec![overview::Group { group: 7, count: 12, mean: 0.25, min: 0.0, max: 1.0 }];
        Overview {
            name: "demo".into(),
            ready: true,
            workers: vec![worker],
            runs: vec![run, waiting],
            quality,
            ..Overview::default()
        }
    }

    #[test]
    fn screen_of_a_training_shows_members_times_and_efficiency() {
        let figures = [
            ("members", 1.0),
            ("failed_members", 2.0),
            ("fallback", 1.0),
            ("samples_per_second", 12_500.0),
            ("step_seconds", 0.02),
            ("reduce_seconds", 0.005),
            ("compression_level", 1.0),
            ("efficiency", 0.5),
            ("loss", 0.25),
        ];
        let mut overview = sample(64_000, 1, "Running");
        overview.runs[0].metrics = figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let mut view = View::new(false);
        view.update(overview, Instant::now());
        let mut terminal = Terminal::new(TestBackend::new(120, 40)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let screen = terminal.backend().to_string();
        for shown in [
            "Running step 30 of 60",
            "1 member(s), 2 failed, fallback to one worker, 64,000 samples, 12,500 samples/s",
            "step 20.0 ms, reduction 5.0 ms (25 %), compression Bf16, efficiency 0.500, loss 0.250",
        ] {
            assert!(screen.contains(shown), "{shown} is missing on the screen:\n{screen}");
        }
        assert_eq!(training(&sample(0, 1, "Running").runs[0]), None);
    }

    #[test]
    fn screen_shows_workers_run_weights_and_events() {
        let mut view = View::new(false);
        let began = Instant::now();
        view.update(sample(0, 1, "Running"), began);
        view.update(sample(5_000, 1, "Running"), began + Duration::from_secs(1));
        let mut terminal = Terminal::new(TestBackend::new(120, 30)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let screen = terminal.backend().to_string();
        for shown in ["history/fold-3 50 %", "run history (1 queued: next)"] {
            assert!(screen.contains(shown), "{shown} is missing on the screen:\n{screen}");
        }
        let mut last = sample(100, 2, "Succeeded");
        last.runs.truncate(1);
        view.update(last, began + Duration::from_secs(2));
        assert_eq!(view.history, [5_000, 100], "a restarted worker counts from zero");
        let mut terminal = Terminal::new(TestBackend::new(100, 30)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let screen = terminal.backend().to_string();
        for shown in ["demo", "ready", "Succeeded epoch 30 of 60", "0.250000", "worker 0 restarted"] {
            assert!(screen.contains(shown), "{shown} is missing on the screen:\n{screen}");
        }
    }
}
