//! Data that is built into the program: the State of the Union addresses, 1790 to 2021.
//!
//! Each address is an epoch; each word of four letters or more that it uses is reinforced once. `data/PROVENANCE.md` describes how
//! the file was made.

use super::{Content, Epoch, Event, Signal, Source, SourceError, in_order};
use engram_memory::key_id;
use std::io::{BufRead, BufReader};
use std::sync::Arc;

/// Name of an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExampleName {
    /// The addresses of the presidents of the United States to Congress: 233 epochs, 368,457 events, 23,147 keys.
    StateOfTheUnion,
}

/// One line per address, in order: year and president, a tab, then its words, each once, ascending.
const STATE_OF_THE_UNION: &[u8] = include_bytes!("../../data/state-of-the-union.txt.zst");
/// Number of lines of the file.
const ADDRESSES: u64 = 233;
/// Quality of a word that an address uses.
const QUALITY: f32 = 0.9;

impl ExampleName {
    /// The name in manifests.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StateOfTheUnion => "StateOfTheUnion",
        }
    }
}

pub(super) struct Example {
    name: ExampleName,
    lines: BufReader<zstd::Decoder<'static, &'static [u8]>>,
    next: u64,
}

impl Example {
    pub(super) fn open(name: ExampleName, from: u64) -> Result<Self, SourceError> {
        let ExampleName::StateOfTheUnion = name;
        let unpacked = zstd::Decoder::with_buffer(STATE_OF_THE_UNION).map_err(|e| damaged(name, &e))?;
        let mut example = Self { name, lines: BufReader::new(unpacked), next: 0 };
        while example.next < from && example.line()?.is_some() {
            example.next += 1;
        }
        Ok(example)
    }

    fn line(&mut self) -> Result<Option<String>, SourceError> {
        let mut line = String::new();
        let bytes = self.lines.read_line(&mut line).map_err(|e| damaged(self.name, &e))?;
        Ok((bytes > 0).then_some(line))
    }
}

impl Source for Example {
    fn next_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        let Some(line) = self.line()? else { return Ok(None) };
        let (label, words) = line.trim_end().split_once('\t').unwrap_or((line.trim_end(), ""));
        let event = |word: &str| Event {
            id: key_id(word.as_bytes()),
            key: Some(Arc::from(word)),
            signal: Signal::Quality(QUALITY),
        };
        let number = self.next;
        self.next += 1;
        let events = words.split_ascii_whitespace().map(event).collect();
        Ok(Some(Epoch { number, label: Some(label.to_owned()), content: Content::Events(in_order(events)) }))
    }

    fn epochs(&self) -> Option<u64> {
        Some(ADDRESSES)
    }
}

fn damaged(name: ExampleName, cause: &std::io::Error) -> SourceError {
    SourceError::unreadable(format!("(built in) {}", name.as_str()), cause)
}
