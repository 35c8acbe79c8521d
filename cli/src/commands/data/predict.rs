//! `engram predict`: predictions of a model that a Replay run trains or has trained.

use crate::context::Context;
use crate::error::problem;
use crate::output::Table;
use crate::target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_proto::v1::{MemberPredictions, PredictRequest, PredictResponse, PredictSample};
use serde_json::{Value, json};
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
  engram predict prices --input houses.csv       of a model of a table: a header line with its columns, and a line per sample

  engram predict metamodel --input sets.csv --members     of an ensemble: also the predictions of each model

Of an ensemble the prediction is the mean over its models, with the standard deviation. While the run trains, its weights are those of a few updates ago (serveEvery); afterwards those of its end.")]
pub(crate) struct Predict {
    /// Name of the run
    #[arg(value_name = "RUN")]
    run: String,
    /// File with one sample per line: the numbers of its features, separated by commas, or a table with a header line; `-` is stdin
    #[arg(long, value_name = "FILE.csv")]
    input: PathBuf,
    /// Also print the predictions of each model of an ensemble
    #[arg(long)]
    members: bool,
}

/// Samples of a file.
#[derive(Debug)]
struct Samples {
    /// Names of the values; empty where samples are features.
    columns: Vec<String>,
    samples: Vec<PredictSample>,
}

pub(crate) async fn run(arguments: &Predict, context: &Context) -> anyhow::Result<ExitCode> {
    let Samples { columns, samples } = samples(&read(&arguments.input)?)?;
    let client = target::connect(context).await?;
    let mut all = PredictResponse::default();
    for chunk in samples.chunks(CALL_SAMPLES) {
        let (name, columns, members) = (arguments.run.clone(), columns.clone(), arguments.members);
        append(&mut all, client.predict(PredictRequest { name, samples: chunk.to_vec(), columns, members }).await?);
    }
    let (items, table) = rows(&all);
    context.output.list(&items, &table)?;
    Ok(ExitCode::Ok)
}

/// Appends the predictions of further samples.
fn append(all: &mut PredictResponse, next: PredictResponse) {
    all.members.resize_with(next.members.len(), MemberPredictions::default);
    all.members.iter_mut().zip(next.members).for_each(|(all, next)| all.predictions.extend(next.predictions));
    all.predictions.extend(next.predictions);
    all.deviations.extend(next.deviations);
    all.target = next.target;
}

/// Returns the predictions as objects and as a table.
fn rows(all: &PredictResponse) -> (Vec<Value>, Table) {
    let name = if all.target.is_empty() { "prediction" } else { &*all.target };
    let mut headers = vec![">sample".to_owned(), format!(">{name}")];
    headers.extend((!all.deviations.is_empty()).then(|| ">deviation".to_owned()));
    headers.extend((0..all.members.len()).map(|member| format!(">member {member}")));
    let mut table = Table::new(&headers.iter().map(String::as_str).collect::<Vec<_>>());
    let mut items = Vec::with_capacity(all.predictions.len());
    for (sample, prediction) in all.predictions.iter().enumerate() {
        let deviation = all.deviations.get(sample);
        let members: Vec<f32> = all.members.iter().filter_map(|it| it.predictions.get(sample)).copied().collect();
        let cells = [sample.to_string(), prediction.to_string()].into_iter();
        table.row(cells.chain(deviation.into_iter().chain(&members).map(ToString::to_string)));
        let mut item = json!({ "sample": sample, name: prediction });
        if let Some(deviation) = deviation {
            item["deviation"] = json!(deviation);
        }
        if !members.is_empty() {
            item["members"] = json!(members);
        }
        items.push(item);
    }
    (items, table)
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

/// Parses the samples: a table if its first line has a name, else features.
fn samples(text: &str) -> anyhow::Result<Samples> {
    let has_names = text.lines().next().is_some_and(|line| {
        let cells = || line.split(',').map(str::trim).filter(|cell| !cell.is_empty());
        cells().next().is_some() && cells().all(|cell| cell.parse::<f64>().is_err())
    });
    if has_names {
        return table_samples(text);
    }
    Ok(Samples { columns: Vec::new(), samples: feature_samples(text)? })
}

/// Parses a table with a header line and a number in every cell.
fn table_samples(text: &str) -> anyhow::Result<Samples> {
    let refuse = |message: String| problem(Code::OutOfRange, format!("--input: {message}"));
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).flexible(true).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| refuse(error.to_string()))?;
    let columns: Vec<String> = header.iter().map(str::to_owned).collect();
    let mut samples = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| refuse(error.to_string()))?;
        let line = record.position().map_or(0, csv::Position::line);
        if record.len() != columns.len() {
            let (cells, columns) = (record.len(), columns.len());
            return Err(refuse(format!(
                "line {line} has {cells} cells; allowed: {columns}, the columns of the header"
            )));
        }
        let number = |(name, cell): (&String, &str)| {
            let parsed = cell.parse::<f32>().ok().filter(|number| number.is_finite());
            let cell = if cell.is_empty() { "missing" } else { cell };
            parsed.ok_or_else(|| refuse(format!("line {line}, column {name}: {cell}; allowed: a number")))
        };
        let values = columns.iter().zip(&record).map(number).collect::<anyhow::Result<_>>()?;
        samples.push(PredictSample { values, ..PredictSample::default() });
    }
    if samples.is_empty() {
        let columns = columns.join(", ");
        return Err(refuse(format!("there is no line after the header ({columns}); allowed: at least one sample")));
    }
    Ok(Samples { columns, samples })
}

/// Parses samples given by their features. A line that is empty is a sample without features.
fn feature_samples(text: &str) -> anyhow::Result<Vec<PredictSample>> {
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
        Ok(PredictSample { features: fields.map(feature).collect::<anyhow::Result<_>>()?, ..PredictSample::default() })
    };
    text.lines().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_samples_and_other_text_is_refused_with_its_line() {
        let read = samples("3, 17,42\n\n5\n").unwrap().samples;
        assert_eq!(read.iter().map(|it| it.features.clone()).collect::<Vec<_>>(), [vec![3, 17, 42], vec![], vec![5]]);
        let refused = samples("1,2\n3,x\n").unwrap_err().to_string();
        assert!(refused.contains("line 2 has x"), "{refused}");
    }

    #[test]
    fn a_header_line_names_the_values_of_a_table() {
        let read = samples("size,\"rooms, all\"\n80.5,3\n100,4\n").unwrap();
        assert_eq!(read.columns, ["size", "rooms, all"]);
        assert_eq!(read.samples.iter().map(|it| it.values.clone()).collect::<Vec<_>>(), [[80.5, 3.0], [100.0, 4.0]]);
        let fails = |text: &str| samples(text).unwrap_err().to_string();
        assert!(fails("a,b\n1,2\n3,\n").contains("line 3, column b: missing"), "{}", fails("a,b\n1,2\n3,\n"));
        assert!(fails("a,b\n1\n").contains("line 2 has 1 cells"));
        assert!(fails("a,b\n").contains("no line after the header (a, b)"));
    }
}
