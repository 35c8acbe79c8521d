//! `engram autoscale`: what autoscaling did with a cluster, and what it would do with a load.

mod explain;
mod explain_page;
mod explain_plot;
mod load;
mod plot;

use crate::context::Context;
use crate::error::failure;
use crate::output::{Format, Output, Table, count};
use engram_api::ExitCode;
use engram_forecast::Settings;
use engram_forecast::settings::Prices;
use engram_forecast::simulate::{ClusterModel, Rule, RuleReport, replay};
use jiff::Timestamp;
use load::LoadSeries;
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;

/// Autoscaling
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Autoscale {
    Explain(explain::Explain),
    Simulate(Simulate),
}

/// Replay a recorded load with predictive and with reactive autoscaling
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram autoscale simulate --load load.csv                       compare both rules
  engram autoscale simulate --load load.csv --capacity 500 --startup 600 --max-workers 40
  engram autoscale simulate --load load.csv --decisions           list the decisions of the predictive rule
  engram autoscale simulate --load load.csv -o json | jq '.items[].violations'

The file has the columns time (seconds or RFC 3339, increasing) and load (empty where the metric is missing). The first lines teach the
forecast: it needs two days to predict a daily load.")]
pub(crate) struct Simulate {
    /// CSV file with the columns `time` and `load`
    #[arg(long, value_name = "FILE")]
    load: PathBuf,
    /// Load that one worker serves; a tenth of the highest load by default
    #[arg(long, value_name = "LOAD")]
    capacity: Option<f64>,
    /// Share of the capacity that autoscaling aims for
    #[arg(long, value_name = "SHARE", default_value_t = 0.7)]
    target: f64,
    /// Relative deviation from the target that causes no change
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    tolerance: f64,
    /// Minimum number of workers
    #[arg(long, value_name = "N", default_value_t = 1)]
    min_workers: u32,
    /// Maximum number of workers
    #[arg(long, value_name = "N", default_value_t = 100)]
    max_workers: u32,
    /// Time until a new worker serves
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0)]
    startup: f64,
    /// Time until a removed worker is gone
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    drain: f64,
    /// Time for which fewer workers must suffice before workers are removed
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    stabilization: u32,
    /// Time between two decisions; the usual distance of the lines by default
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3_600))]
    interval: Option<u32>,
    /// Price of a worker per hour
    #[arg(long, value_name = "PRICE")]
    price: Option<f64>,
    /// Price of a spot worker per hour, for workers beyond the minimum
    #[arg(long, value_name = "PRICE", requires = "price")]
    spot_price: Option<f64>,
    /// List the decisions of the predictive rule that change the number of workers
    #[arg(long)]
    decisions: bool,
}

/// A decision of the predictive rule.
#[derive(Debug, Serialize)]
struct DecisionRow<'a> {
    time: String,
    #[serde(flatten)]
    decision: &'a engram_forecast::Decision,
}

impl Simulate {
    fn settings(&self, series: &LoadSeries, capacity: f64) -> Settings {
        let mut settings = Settings::new(capacity);
        settings.set_interval(series.interval_seconds);
        Settings {
            min_workers: self.min_workers,
            max_workers: self.max_workers,
            target_utilization: self.target,
            tolerance: self.tolerance,
            stabilization_seconds: self.stabilization,
            initial_startup_seconds: self.startup,
            prices: self.price.map(|on_demand| Prices { on_demand, spot: self.spot_price }),
            ..settings
        }
    }

    fn model(&self) -> anyhow::Result<ClusterModel> {
        for (name, value) in [("--startup", self.startup), ("--drain", self.drain)] {
            if !(0.0..=86_400.0).contains(&value) {
                return Err(failure(ExitCode::Usage, format!("{name} is {value}; allowed: 0 to 86400")));
            }
        }
        Ok(ClusterModel { startup_seconds: self.startup, drain_seconds: self.drain })
    }

    /// Returns the capacity of a worker, and a note on where it comes from.
    fn capacity(&self, series: &LoadSeries, output: &Output) -> anyhow::Result<f64> {
        if let Some(capacity) = self.capacity {
            return Ok(capacity);
        }
        let highest = series.points.iter().map(|point| point.demand).fold(0.0, f64::max);
        if highest <= 0.0 {
            return Err(failure(ExitCode::Usage, "--capacity is required: the load is always 0"));
        }
        output.note(format!(
            "A worker serves a load of {:.4}, a tenth of the highest; --capacity sets it.",
            highest / 10.0
        ));
        Ok(highest / 10.0)
    }
}

pub(crate) async fn run(command: &Autoscale, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Autoscale::Explain(arguments) => explain::run(arguments, context).await,
        Autoscale::Simulate(arguments) => simulate(arguments, context),
    }
}

fn simulate(arguments: &Simulate, context: &Context) -> anyhow::Result<ExitCode> {
    let output = &context.output;
    let series = load::read(&arguments.load, arguments.interval)?;
    let settings = arguments.settings(&series, arguments.capacity(&series, output)?);
    let model = arguments.model()?;
    let mut reports = Vec::new();
    for rule in [Rule::Reactive, Rule::Predictive] {
        let report = replay(rule, &series.points, &settings, model);
        reports.push(report.map_err(|error| failure(ExitCode::Usage, error.to_string()))?);
    }
    if arguments.decisions {
        print_decisions(&reports[1], output)?;
        return Ok(ExitCode::Ok);
    }
    let items: Vec<Value> = reports.iter().map(|report| item(report, &settings)).collect::<Result<_, _>>()?;
    output.list(&items, &table(&reports))?;
    if matches!(output.format, Format::Table | Format::Wide) {
        for report in &reports {
            output.text(&plot::plot(report, &series, settings.worker_capacity))?;
        }
    }
    Ok(ExitCode::Ok)
}

/// Returns a report with the settings that it depends on.
fn item(report: &RuleReport, settings: &Settings) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(report)?;
    value["intervals"] = report.steps.len().into();
    value["intervalSeconds"] = settings.interval_seconds.into();
    value["workerCapacity"] = settings.worker_capacity.into();
    Ok(value)
}

fn rule_name(rule: Rule) -> &'static str {
    match rule {
        Rule::Reactive => "reactive",
        Rule::Predictive => "predictive",
    }
}

fn table(reports: &[RuleReport]) -> Table {
    let columns = [
        "rule",
        ">violations",
        ">share",
        ">unserved load hours",
        ">replica hours",
        ">cost",
        ">changes",
        ">reversals",
        "+>most workers",
    ];
    let mut table = Table::new(&columns);
    for report in reports {
        table.row([
            rule_name(report.rule).to_owned(),
            count(report.violations),
            format!("{:.2} %", 100.0 * report.violations as f64 / report.steps.len().max(1) as f64),
            format!("{:.2}", report.unserved_load_hours),
            format!("{:.1}", report.replica_hours),
            report.cost.map_or("-".into(), |cost| format!("{cost:.2}")),
            count(report.changes),
            count(report.reversals),
            report.most_workers.to_string(),
        ]);
    }
    table
}

fn print_decisions(report: &RuleReport, output: &Output) -> anyhow::Result<()> {
    let mut table = Table::new(&["time", ">from", ">to", "reason", "message"]);
    let mut rows = Vec::new();
    for (seconds, decision) in &report.decisions {
        let time = time_text(*seconds);
        let (from, to) = (decision.workers.to_string(), decision.desired.to_string());
        table.row([time.clone(), from, to, decision.reason.to_string(), decision.message.clone()]);
        rows.push(DecisionRow { time, decision });
    }
    output.list(&rows, &table)
}

/// Formats a time of the file: RFC 3339 for seconds since the epoch, seconds for small numbers.
fn time_text(seconds: f64) -> String {
    /// 1973: no load was recorded before, and a file that counts from 0 is shorter.
    const EARLIEST_EPOCH_SECONDS: f64 = 1e8;
    match Timestamp::from_second(seconds as i64) {
        Ok(timestamp) if seconds >= EARLIEST_EPOCH_SECONDS => timestamp.to_string(),
        _ => format!("{seconds:.0}"),
    }
}
