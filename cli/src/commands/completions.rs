//! `engram completions`: what a shell needs to complete commands and options.

use crate::args::{self, Context};
use clap::CommandFactory as _;
use clap_complete::Shell;
use engram_api::ExitCode;

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram completions bash > ~/.local/share/bash-completion/completions/engram
  engram completions zsh > ~/.zfunc/_engram
  engram completions fish > ~/.config/fish/completions/engram.fish")]
pub(crate) struct Arguments {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut args::Arguments::command(), "engram", &mut text);
    context.output.text(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::Ok)
}
