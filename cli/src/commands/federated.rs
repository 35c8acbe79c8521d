//! `engram federated`: federated learning without a cluster.

use crate::context::Context;
use crate::error::failure;
use crate::output::{Table, count};
use crate::progress::Progress;
use crate::target;
use engram_api::ExitCode;
use engram_federated::round::Mode;
use engram_federated::simulate::{Simulation, SimulationReport, SimulationSettings, StragglerLaw};
use engram_federated::strategy::{AdaptiveSettings, Strategy};
use engram_proto::v1::RevokeClientRequest;
use serde::Serialize;

/// Federated learning
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Federated {
    Simulate(Simulate),
    Revoke(Revoke),
}

/// Refuse a client of a run from now on, and end its task
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram federated revoke fleet car-17

The next call of the client is refused. Its updates that were accepted stay counted. A client cannot be admitted again under this name.")]
pub(crate) struct Revoke {
    /// Name of the run
    #[arg(value_name = "RUN")]
    run: String,
    /// Name of the client
    #[arg(value_name = "CLIENT")]
    client: String,
}

/// Simulate federated learning over synthetic clients in virtual time
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram federated simulate                                  compare FedAvg with FedBuff over 10,000 clients
  engram federated simulate --clients 100000 --straggler log-normal
  engram federated simulate --strategy fed-prox --strategy fed-adam --heterogeneity 1 --drop-out 0.2
  engram federated simulate -o json | jq '.items[0].history'

Strategies and rounds are those of real runs. A client's loss is a quadratic function, so the global loss is exact.")]
pub(crate) struct Simulate {
    /// Number of clients
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    clients: u64,
    /// Strategy; may be repeated to compare
    #[arg(long = "strategy", value_name = "STRATEGY", value_enum, default_values_t = [StrategyName::FedAvg, StrategyName::FedBuff])]
    strategies: Vec<StrategyName>,
    /// Updates per synchronous round; FedBuff trains as many clients at the same time and aggregates each tenth of that number
    #[arg(long, value_name = "N", default_value_t = 100)]
    round_size: u32,
    /// Clients assigned beyond the round size, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 30)]
    over_selection: u32,
    /// Law of the training times, whose mean or median is a minute
    #[arg(long, value_name = "LAW", value_enum, default_value_t = LawName::HalfNormal)]
    straggler: LawName,
    /// Probability that a client disappears during a task
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.05)]
    drop_out: f64,
    /// Standard deviation of the clients' optima; the initial model is 1 away from the common optimum
    #[arg(long, value_name = "DEVIATION", default_value_t = 0.5)]
    heterogeneity: f64,
    /// Share of the initial loss above the minimum at which the run ends
    #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
    target: f64,
    /// Aggregations after which a run ends without its target
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    versions: u64,
    /// Seed of all random numbers
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

/// Names of the simulated strategies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
enum StrategyName {
    /// Mean of the updates, weighted by samples.
    FedAvg,
    /// FedAvg with a proximal term of weight 0.1.
    FedProx,
    /// Adam on the server.
    FedAdam,
    /// Yogi on the server.
    FedYogi,
    /// Adagrad on the server.
    FedAdagrad,
    /// Median per parameter.
    Median,
    /// Asynchronous, with a buffer.
    FedBuff,
}

/// Names of the laws of training times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LawName {
    /// Absolute value of a normal number.
    HalfNormal,
    /// Heavy tail.
    LogNormal,
}

/// One simulated run.
#[derive(Debug, Serialize)]
struct StrategyReport {
    strategy: StrategyName,
    #[serde(flatten)]
    report: SimulationReport,
}

impl StrategyName {
    fn strategy(self) -> Strategy {
        let adaptive = AdaptiveSettings { eta: 0.05, ..AdaptiveSettings::default() };
        match self {
            Self::FedAvg => Strategy::FedAvg,
            Self::FedProx => Strategy::FedProx { mu: 0.1 },
            Self::FedAdam => Strategy::FedAdam(adaptive),
            Self::FedYogi => Strategy::FedYogi(adaptive),
            Self::FedAdagrad => Strategy::FedAdagrad(AdaptiveSettings { eta: 0.2, ..adaptive }),
            Self::Median => Strategy::Median,
            Self::FedBuff => Strategy::FedBuff { server_rate: 1.0 },
        }
    }
}

impl Simulate {
    fn settings(&self, name: StrategyName) -> SimulationSettings {
        let target = self.round_size;
        let mode = if name == StrategyName::FedBuff {
            let concurrency = target + target * self.over_selection.min(1_000) / 100;
            Mode::Buffered { concurrency, buffer: (concurrency / 10).max(1) }
        } else {
            let minimum = (target / 2).max(1);
            Mode::Synchronous { target, minimum, over_selection_percent: self.over_selection }
        };
        let straggler = match self.straggler {
            LawName::HalfNormal => StragglerLaw::HalfNormal { mean_seconds: 60.0 },
            LawName::LogNormal => StragglerLaw::LogNormal { median_seconds: 60.0, sigma: 1.0 },
        };
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.seed.to_le_bytes());
        SimulationSettings {
            clients: self.clients,
            parameters: 8,
            strategy: name.strategy(),
            mode,
            straggler,
            drop_out: self.drop_out,
            heterogeneity: self.heterogeneity,
            local_steps: 5,
            local_rate: 0.01,
            gradient_noise: 0.05,
            pause_seconds: 600.0,
            deadline_seconds: 900.0,
            target: self.target,
            versions: self.versions,
            seed,
        }
    }
}

pub(crate) async fn run(command: &Federated, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Federated::Simulate(arguments) => simulate(arguments, context),
        Federated::Revoke(arguments) => revoke(arguments, context).await,
    }
}

async fn revoke(Revoke { run, client }: &Revoke, context: &Context) -> anyhow::Result<ExitCode> {
    let connection = target::connect(context).await?;
    let request = RevokeClientRequest { run: run.clone(), client: client.clone() };
    let answer = connection.federated_revoke(request).await?;
    let how = if answer.repeated { "was revoked before" } else { "is revoked" };
    println!("client {client} of run {run} {how}");
    Ok(ExitCode::Ok)
}

fn simulate(arguments: &Simulate, context: &Context) -> anyhow::Result<ExitCode> {
    let output = &context.output;
    if !(1..=100_000).contains(&arguments.round_size) {
        let message = format!("--round-size is {}; allowed: 1 to 100000", arguments.round_size);
        return Err(failure(ExitCode::Usage, message));
    }
    let mut reports = Vec::new();
    for name in &arguments.strategies {
        let simulation = Simulation::new(arguments.settings(*name));
        let simulation = simulation.map_err(|error| failure(ExitCode::Usage, error.to_string()))?;
        let mut progress = Progress::new(output, format!("{name:?}"), Some(arguments.versions));
        let report = simulation.run(|point| {
            progress
                .set(point.version, &format!("loss {:.4} after {:.0} simulated seconds", point.loss, point.seconds));
        })?;
        reports.push(StrategyReport { strategy: *name, report });
    }
    output.list(&reports, &table(&reports))?;
    Ok(ExitCode::Ok)
}

fn table(reports: &[StrategyReport]) -> Table {
    let columns =
        ["strategy", ">target after", ">loss", ">versions", ">updates", ">clients", "+>tasks", "+>wasted", "+>aborted"];
    let mut table = Table::new(&columns);
    for StrategyReport { strategy, report } in reports {
        let last = report.history.last();
        table.row([
            format!("{strategy:?}"),
            report.seconds_to_target.map_or("-".into(), |seconds| format!("{seconds:.0} s")),
            last.map_or("-".into(), |point| format!("{:.4}", point.loss)),
            last.map_or("0".into(), |point| count(point.version)),
            count(report.updates),
            count(report.participants),
            count(report.tasks),
            count(report.wasted),
            count(report.aborted),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_settings_of_every_strategy_are_valid() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            simulate: Simulate,
        }
        let line = <Line as clap::Parser>::parse_from(["simulate"]);
        for name in <StrategyName as clap::ValueEnum>::value_variants() {
            line.simulate.settings(*name).validate().unwrap();
        }
    }
}
