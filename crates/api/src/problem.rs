//! Error reports with code, message, location in the file and advice.
//!
//! Problems of a manifest have a location in it, all others do not.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use miette::{
    Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, ThemeCharacters, ThemeStyles,
};

use crate::code::Code;
use crate::exit::ExitCode;
use crate::printable::{printable, printable_in_place, printable_line};

/// Width that wraps no message, so that a message stays on one line for `grep`.
const UNBROKEN_WIDTH: usize = 4096;

/// Location in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// First byte, from 0.
    pub start: usize,
    /// Number of bytes.
    pub length: usize,
}

/// One error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    code: Code,
    message: String,
    path: Option<String>,
    place: Option<Location>,
    help: Vec<String>,
}

impl Problem {
    /// Creates a problem. The message is one sentence in lower case without a full stop; it names the actual and the allowed
    /// value.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), path: None, place: None, help: Vec::new() }
    }

    /// Sets the path of the field: `spec.capacity.memories`.
    #[must_use]
    pub fn of(mut self, path: impl Into<String>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// Sets the location in the file.
    #[must_use]
    pub fn at(mut self, place: impl Into<Option<Location>>) -> Self {
        self.place = place.into();
        self
    }

    /// Adds a line of advice.
    #[must_use]
    pub fn help(mut self, line: impl Into<String>) -> Self {
        self.help.push(line.into());
        self
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the message, without code and location.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the path of the field, if any.
    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// Returns the location in the file, if any.
    pub fn location(&self) -> Option<Location> {
        self.place
    }

    /// Returns the lines of advice.
    pub fn advice(&self) -> &[String] {
        &self.help
    }

    /// Renders the problem for a terminal, optionally in colour. Ends with a line break.
    pub fn render(&self, color: bool) -> String {
        render(self, None, color)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl Error for Problem {}

/// All problems of a file, in its order; never empty.
#[derive(Clone, Debug)]
pub struct Problems {
    source: NamedSource<Arc<str>>,
    problems: Vec<Problem>,
}

impl Problems {
    /// Creates the problems of the file `origin` with the content `text`.
    pub(crate) fn new(origin: &str, text: &str, mut problems: Vec<Problem>) -> Self {
        problems.sort_by_key(Problem::location);
        let source = NamedSource::new(printable_line(origin), printable_in_place(text).into());
        Self { source, problems }
    }

    /// Returns the exit code that all problems have in common, else `Usage`.
    pub fn exit_code(&self) -> ExitCode {
        let mut codes = self.problems.iter().map(|problem| problem.code.exit_code());
        let first = codes.next().unwrap_or(ExitCode::Usage);
        if codes.all(|code| code == first) { first } else { ExitCode::Usage }
    }

    /// Renders all problems for a terminal, optionally in colour. Ends with a line break.
    pub fn render(&self, color: bool) -> String {
        let reports: Vec<String> =
            self.problems.iter().map(|problem| render(problem, Some(&self.source), color)).collect();
        reports.join("\n")
    }
}

impl std::ops::Deref for Problems {
    type Target = [Problem];

    fn deref(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_char('\n')?;
            }
            f.write_str(self.source.name())?;
            if let Some(place) = problem.place {
                write!(f, ":{}:{}", place.line, place.column)?;
            }
            write!(f, ": {problem}")?;
        }
        Ok(())
    }
}

impl Error for Problems {}

/// A problem as a miette diagnostic. The theme's header prints the code.
#[derive(Debug)]
struct DiagnosticView<'a> {
    problem: &'a Problem,
    source: Option<&'a NamedSource<Arc<str>>>,
}

impl fmt::Display for DiagnosticView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.problem.message))
    }
}

impl Error for DiagnosticView<'_> {}

impl Diagnostic for DiagnosticView<'_> {
    fn source_code(&self) -> Option<&dyn miette::SourceCode> {
        self.source.map(|source| source as &dyn miette::SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let place = self.problem.place?;
        Some(Box::new(std::iter::once(LabeledSpan::new(None, place.start, place.length))))
    }
}

fn render(problem: &Problem, source: Option<&NamedSource<Arc<str>>>, color: bool) -> String {
    let theme = GraphicalTheme {
        characters: ThemeCharacters { error: format!("error[{}]:", problem.code), ..ThemeCharacters::unicode() },
        styles: if color { ThemeStyles::ansi() } else { ThemeStyles::none() },
    };
    let help_style = theme.styles.help;
    let handler =
        GraphicalReportHandler::new_themed(theme).with_width(UNBROKEN_WIDTH).with_wrap_lines(false).with_links(false);
    let mut text = String::new();
    handler
        .render_report(&mut text, &DiagnosticView { problem, source })
        .expect("writing to a string does not fail, and locations are inside the text");
    let mut text = text.trim().to_owned();
    for (index, line) in problem.help.iter().enumerate() {
        let title = if index == 0 { "help:" } else { "     " };
        write!(text, "\n  {} {}", help_style.style(title), printable(line)).expect("writing to a string does not fail");
    }
    writeln!(text, "\n  {} engram explain {}", help_style.style("more:"), problem.code)
        .expect("writing to a string does not fail");
    text
}
