//! `engram completions`: completion scripts for shells.

use crate::context::Context;
use clap_complete::Shell;
use engram_api::ExitCode;

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram completions bash > ~/.local/share/bash-completion/completions/engram
  engram completions zsh > ~/.zfunc/_engram
  engram completions fish > ~/.config/fish/completions/engram.fish")]
pub(crate) struct Completions {
    /// Name of the shell
    shell: Shell,
}

pub(crate) fn run(arguments: &Completions, mut grammar: clap::Command, context: &Context) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut grammar, "engram", &mut text);
    context.output.text(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::Ok)
}
