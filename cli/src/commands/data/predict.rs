//! `engram predict`: predictions of a model that a Replay run trains or has trained.

use crate::context::Context;
use crate::error::problem;
use crate::output::Table;
use crate::target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_proto::v1::{PredictRequest, PredictSample};
use serde::Serialize;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Samples per call.
const CALL_SAMPLES: usize = 16_384;
/// Longest input: the calls are made one after another.
const MAX_BYTES: u64 = 256 << 20;

/// Predict samples with the model of a Replay run
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram predict metamodel --input sets.csv      one line per sample, the features that are present: 3,17,42
  echo 3,17,42 | engram predict metamodel --input - -o json

While the run trains, its weights are those of a few updates ago (serveEvery); afterwards those of its end.")]
pub(crate) struct Predict {
    /// Name of the run
    #[arg(value_name = "RUN")]
    run: String,
    /// File with one sample per line: the numbers of its features, separated by commas; `-` is stdin
    #[arg(long, value_name = "FILE.csv")]
    input: PathBuf,
}

/// A prediction, for JSON and YAML output.
#[derive(Serialize)]
struct Prediction {
    sample: usize,
    prediction: f32,
}

pub(crate) async fn run(arguments: &Predict, context: &Context) -> anyhow::Result<ExitCode> {
    let samples = samples(&read(&arguments.input)?)?;
    let client = target::connect(context).await?;
    let mut predictions = Vec::with_capacity(samples.len());
    for chunk in samples.chunks(CALL_SAMPLES) {
        let message = PredictRequest { name: arguments.run.clone(), samples: chunk.to_vec() };
        predictions.extend(client.predict(message).await?.predictions);
    }
    let mut table = Table::new(&[">sample", ">prediction"]);
    let predictions: Vec<Prediction> =
        predictions.into_iter().enumerate().map(|(sample, prediction)| Prediction { sample, prediction }).collect();
    for Prediction { sample, prediction } in &predictions {
        table.row([sample.to_string(), prediction.to_string()]);
    }
    context.output.list(&predictions, &table)?;
    Ok(ExitCode::Ok)
}

fn read(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_BYTES + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
    };
    let bytes = read.with_context(|| format!("failed to read {}", path.display()))?;
    if bytes as u64 > MAX_BYTES {
        let message = format!("--input: {} has more than {MAX_BYTES} bytes; split it", path.display());
        return Err(problem(Code::OutOfRange, message));
    }
    Ok(text)
}

/// Parses the samples. A line that is empty is a sample without features.
fn samples(text: &str) -> anyhow::Result<Vec<PredictSample>> {
    let line = |(number, line): (usize, &str)| {
        let fields = line.split(',').map(str::trim).filter(|field| !field.is_empty());
        let feature = |field: &str| {
            field.parse::<u32>().map_err(|_| {
                let number = number + 1;
                let message =
                    format!("--input: line {number} has {field}; allowed: numbers of features, such as 3,17,42");
                problem(Code::OutOfRange, message)
            })
        };
        Ok(PredictSample { features: fields.map(feature).collect::<anyhow::Result<_>>()? })
    };
    text.lines().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_samples_and_other_text_is_refused_with_its_line() {
        let read = samples("3, 17,42\n\n5\n").unwrap();
        assert_eq!(read.iter().map(|it| it.features.clone()).collect::<Vec<_>>(), [vec![3, 17, 42], vec![], vec![5]]);
        let refused = samples("1,2\n3,x\n").unwrap_err().to_string();
        assert!(refused.contains("line 2 has x"), "{refused}");
    }
}
