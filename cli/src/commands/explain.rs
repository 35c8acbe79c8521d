//! `engram explain`: the long text of an error code.

use crate::args::Context;
use crate::error::said;
use crate::output::{Format, Table};
use engram_api::{Code, ExitCode};
use serde_json::json;

/// Explain an error code
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram explain ENG-0402
  engram explain              all codes")]
pub(crate) struct Arguments {
    /// The code, as `ENG-0402` or `0402`; without it all are listed
    code: Option<String>,
}

pub(crate) fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let object = |code: &Code| {
        let exit = code.exit_code();
        json!({
            "code": code.id(), "title": code.title(), "explanation": code.explanation(),
            "exitCode": exit.number(), "exitMeaning": exit.meaning(),
        })
    };
    let Some(text) = &arguments.code else {
        let mut table = Table::new(&["code", ">exit", "title"]);
        for code in Code::ALL {
            table.row([code.id(), &code.exit_code().number().to_string(), code.title()]);
        }
        context.output.list(&Code::ALL.iter().map(object).collect::<Vec<_>>(), &table)?;
        return Ok(ExitCode::Ok);
    };
    let Some((code, text)) = Code::find(text).zip(engram_api::explain(text)) else {
        return Err(said(ExitCode::NotFound, format!("{text} is no error code; `engram explain` lists them")));
    };
    match context.output.format {
        Format::Json | Format::Yaml => context.output.value(&object(&code))?,
        _ => context.output.text(&text)?,
    }
    Ok(ExitCode::Ok)
}
