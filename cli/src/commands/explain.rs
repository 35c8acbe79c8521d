//! `engram explain`: explanations of error codes.

use crate::context::Context;
use crate::error::failure;
use crate::output::{Format, Table};
use engram_api::{Code, ExitCode};
use serde_json::json;

/// Explain an error code
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram explain ENG-0402
  engram explain              list all codes")]
pub(crate) struct Explain {
    /// Error code, such as `ENG-0402` or `0402` [default: list all codes]
    code: Option<String>,
}

pub(crate) fn run(arguments: &Explain, context: &Context) -> anyhow::Result<ExitCode> {
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
        return Err(failure(
            ExitCode::NotFound,
            format!("unknown error code {text}; `engram explain` lists all codes"),
        ));
    };
    match context.output.format {
        Format::Json | Format::Yaml => context.output.value(&object(&code))?,
        _ => context.output.text(&text)?,
    }
    Ok(ExitCode::Ok)
}
