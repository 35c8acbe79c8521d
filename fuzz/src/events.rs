//! Event files.

use crate::input::{Input, folder};
use engram_learn::source::{
    self, Columns, Content, EventsOptions, Format, Limits, MemoryColumn, Origin, Signal, SignalSource, SourceOptions,
    TimeColumn,
};
use std::fs;

/// Small, so that inputs can exceed it.
const LIMITS: Limits = Limits { epoch_events: 100, record_bytes: 4 << 10, empty_epochs: 50 };

/// The first byte selects the options: packing (bits 0, 1), CSV (2), ids (3), times (4) and strength (5, 6).
pub(crate) fn file(bytes: &[u8]) {
    let mut input = Input(bytes);
    let how = input.u8();
    let packing = ["", ".gz", ".zst", ""][usize::from(how & 3)];
    let (format, extension) = if how & 4 == 0 { (Format::Jsonl, "jsonl") } else { (Format::Csv, "csv") };
    let folder = folder();
    let path = folder.path().join(format!("events.{extension}{packing}"));
    fs::write(&path, input.0).expect("the folder is writable");
    let memory =
        if how & 8 == 0 { MemoryColumn::Key("memory".to_owned()) } else { MemoryColumn::Id("memory".to_owned()) };
    let time = if how & 16 == 0 {
        TimeColumn::Epoch("when".to_owned())
    } else {
        TimeColumn::Time { column: "when".to_owned(), span_ms: 86_400_000 }
    };
    let signal = match how >> 5 & 3 {
        0 => SignalSource::Quality(0.75),
        1 => SignalSource::Delta(-0.5),
        2 => SignalSource::QualityColumn("signal".to_owned()),
        _ => SignalSource::DeltaColumn("signal".to_owned()),
    };
    let options = EventsOptions {
        path,
        origin: Origin::Disk,
        format,
        separator: None,
        columns: Columns { memory, time },
        signal,
    };
    let options = SourceOptions::Events(options);
    let first = read(&options, 0);
    // A run that resumes on another worker reads the same events.
    if let Some(from) = first.checked_sub(1) {
        assert_eq!(read(&options, from), 1, "reading from the last epoch yields one epoch");
    }
}

/// Reads to the end or to the first error; returns the number of epochs.
fn read(options: &SourceOptions, from: u64) -> u64 {
    let mut source = match source::open(options, LIMITS, from) {
        Ok(source) => source,
        Err(error) => return check_error(&error),
    };
    let mut epochs = 0;
    loop {
        match source.next_epoch() {
            Ok(None) => return epochs,
            Err(error) => return epochs + check_error(&error),
            Ok(Some(epoch)) => {
                assert_eq!(epoch.number, from + epochs, "epochs are numbered consecutively");
                check(&epoch.content);
                epochs += 1;
            }
        }
    }
}

fn check_error(error: &source::SourceError) -> u64 {
    assert!(!error.to_string().is_empty());
    0
}

fn check(content: &Content) {
    let Content::Events(events) = content else { panic!("the content of a file is events") };
    assert!(events.len() <= LIMITS.epoch_events && events.is_sorted_by_key(|event| event.id));
    for event in events {
        match event.signal {
            Signal::Quality(quality) => assert!((0.0..=1.0).contains(&quality)),
            Signal::Delta(delta) => assert!((-1.0..=1.0).contains(&delta)),
        }
        assert!(event.key.as_ref().is_none_or(|key| (1..=1_024).contains(&key.len())));
    }
}
