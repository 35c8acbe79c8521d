use super::*;
use crate::source::{Signal, SourceOptions};
use ::parquet::basic::Compression as ParquetCompression;
use ::parquet::data_type::{ByteArrayType, DoubleType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use engram_memory::{MemoryId, key_id};
use std::sync::Arc;
use tempfile::TempDir;

const KEY_EPOCH_QUALITY: (&str, &str) = ("key=word,epoch=address", "quality=q");

/// Options in short: `key=word,epoch=address` and `quality=q`, `delta=d`, `quality:0.9` or `delta:-0.1`.
fn options(path: PathBuf, columns: &str, signal: &str) -> EventsOptions {
    let named = |option: &str| {
        columns.split(',').find_map(|part| part.strip_prefix(option)?.strip_prefix('=').map(str::to_owned))
    };
    let memory = named("id").map(MemoryColumn::Id).or(named("key").map(MemoryColumn::Key)).unwrap();
    let span_ms = named("span").map_or(86_400_000, |span| span.parse().unwrap());
    let time = named("epoch")
        .map(TimeColumn::Epoch)
        .or(named("time").map(|column| TimeColumn::Time { column, span_ms }))
        .unwrap();
    let signal = match signal.split_once(['=', ':']).unwrap() {
        ("quality", column) if signal.contains('=') => SignalSource::QualityColumn(column.to_owned()),
        ("delta", column) if signal.contains('=') => SignalSource::DeltaColumn(column.to_owned()),
        ("quality", value) => SignalSource::Quality(value.parse().unwrap()),
        (_, value) => SignalSource::Delta(value.parse().unwrap()),
    };
    EventsOptions {
        path,
        origin: Origin::Disk,
        format: Format::Auto,
        separator: None,
        columns: Columns { memory, time },
        signal,
    }
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn read(options: &EventsOptions, limits: Limits) -> (Vec<Epoch>, Option<SourceError>) {
    let mut epochs = Vec::new();
    let mut source = match crate::source::open(&SourceOptions::Events(options.clone()), limits, 0) {
        Ok(source) => source,
        Err(error) => return (epochs, Some(error)),
    };
    loop {
        match source.next_epoch() {
            Ok(Some(epoch)) => epochs.push(epoch),
            Ok(None) => return (epochs, None),
            Err(error) => {
                assert!(source.next_epoch().unwrap().is_none(), "after an error a source yields nothing more");
                return (epochs, Some(error));
            }
        }
    }
}

fn epoch(number: u64, label: &str, words: &[(&str, Signal)]) -> Epoch {
    let event =
        |&(word, signal): &(&str, Signal)| Event { id: key_id(word.as_bytes()), key: Some(Arc::from(word)), signal };
    let events = in_order(words.iter().map(event).collect());
    Epoch { number, label: Some(label.to_owned()), content: Content::Events(events) }
}

const CSV: &str = "address,word,q,note\n1,peace,0.9,x\n1,\"trade, foreign\",0.25,\"a\nb\"\n1,peace,1,\n7,debt,0,y\n";
const JSONL: &str = r#"{"address":1,"word":"peace","q":0.9,"more":{"deep":[1]}}
{"q":0.25,"word":"trade,\u0020foreign","address":"1"}

{"address":1,"word":"peace","q":1}
{"address":7,"word":"debt","q":0.0,"q2":null}
"#;

fn expected() -> Vec<Epoch> {
    use Signal::Quality;
    let first = [("peace", Quality(0.9)), ("trade, foreign", Quality(0.25)), ("peace", Quality(1.0))];
    vec![epoch(0, "1", &first), epoch(1, "7", &[("debt", Quality(0.0))])]
}

#[test]
fn csv_files_may_have_other_separators() {
    let folder = Folder::new();
    let content = "address;word;q;note\n1;peace;0.9;x,y\n1;\"trade, foreign\";0.25;\n1;peace;1;\n7;debt;0;y\n";
    let semicolon = |name: &str, separator: u8| {
        let content = content.replace(';', char::from(separator).encode_utf8(&mut [0; 4]));
        let options = options(folder.write(name, &content), "key=word,epoch=address", "quality=q");
        read(&EventsOptions { separator: Some(separator), ..options }, Limits::default())
    };
    for separator in [b';', b'\t', b'|'] {
        let (epochs, error) = semicolon("a.csv", separator);
        assert!(error.is_none(), "{error:?}");
        assert_eq!(epochs, expected());
    }
    let refused = semicolon("a.jsonl", b';').1.expect("a separator of another format");
    assert_eq!(refused.code(), "ENG-0106");
}

fn parquet_file(schema: &str, write: impl Fn(&mut SerializedFileWriter<&mut Vec<u8>>)) -> Vec<u8> {
    compressed_parquet_file(schema, ParquetCompression::UNCOMPRESSED, write)
}

fn compressed_parquet_file(
    schema: &str,
    compression: ParquetCompression,
    write: impl Fn(&mut SerializedFileWriter<&mut Vec<u8>>),
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer =
        SerializedFileWriter::new(&mut bytes, Arc::new(parse_message_type(schema).unwrap()), properties).unwrap();
    write(&mut writer);
    writer.close().unwrap();
    bytes
}

/// Row groups of (address, word, q); the words are nullable and every batch boundary is crossed by `repeat`.
fn address_file(groups: &[&[(i64, Option<&str>, f64)]]) -> Vec<u8> {
    compressed_address_file(groups, ParquetCompression::UNCOMPRESSED)
}

fn compressed_address_file(groups: &[&[(i64, Option<&str>, f64)]], compression: ParquetCompression) -> Vec<u8> {
    let schema = "message m { required int64 address; optional binary word (UTF8); required double q; }";
    compressed_parquet_file(schema, compression, |writer| {
        for rows in groups {
            let mut group = writer.next_row_group().unwrap();
            let addresses: Vec<i64> = rows.iter().map(|row| row.0).collect();
            let words: Vec<_> =
                rows.iter().filter_map(|row| row.1.map(|word| word.as_bytes().to_vec().into())).collect();
            let levels: Vec<i16> = rows.iter().map(|row| row.1.is_some().into()).collect();
            let qualities: Vec<f64> = rows.iter().map(|row| row.2).collect();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<Int64Type>().write_batch(&addresses, None, None).unwrap();
            column.close().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&words, Some(&levels), None).unwrap();
            column.close().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<DoubleType>().write_batch(&qualities, None, None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
        }
    })
}

#[test]
fn events_read_the_same_in_every_format_and_compression() {
    let folder = Folder::new();
    let gzip = |text: &str| {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(text.as_bytes()).unwrap();
        packer.finish().unwrap()
    };
    let marked = |text: &str| format!("\u{feff}{text}");
    // Two concatenated members, like those of `cat a.gz b.gz`.
    let (head, tail) = CSV.split_at(40);
    let rows: &[&[_]] = &[
        &[(1, Some("peace"), f64::from(0.9_f32))],
        &[(1, Some("trade, foreign"), 0.25), (1, Some("peace"), 1.0), (7, Some("debt"), 0.0)],
    ];
    for path in [
        folder.write("a.csv", CSV),
        folder.write("b.csv.gz", [gzip(head), gzip(tail)].concat()),
        folder.write("c.CSV.ZST", zstd::bulk::compress(CSV.as_bytes(), 1).unwrap()),
        folder.write("d.jsonl", JSONL),
        folder.write("e.ndjson.gz", gzip(JSONL)),
        folder.write("f.parquet", address_file(rows)),
        folder.write("g.csv", marked(CSV)),
        folder.write("h.jsonl", marked(JSONL)),
        folder.write("i.parquet", compressed_address_file(rows, ParquetCompression::LZ4_RAW)),
        folder.write("j.parquet", compressed_address_file(rows, ParquetCompression::BROTLI(Default::default()))),
    ] {
        let options = options(path.clone(), KEY_EPOCH_QUALITY.0, KEY_EPOCH_QUALITY.1);
        let (epochs, error) = read(&options, Limits::default());
        assert!(error.is_none(), "{}: {}", path.display(), error.unwrap());
        assert_eq!(epochs, expected(), "{}", path.display());
        let mut resumed = crate::source::open(&SourceOptions::Events(options), Limits::default(), 1).unwrap();
        assert_eq!(resumed.next_epoch().unwrap().as_ref(), Some(&expected()[1]));
    }
}

/// Text is converted to single precision directly; a double is narrowed. 0.9 and its neighbours match the vectors of the law.
#[test]
fn numbers_ids_and_deltas_arrive_as_written() {
    let folder = Folder::new();
    let text = "i,e,d\n18446744073709551615,-3,-1\n0, 4 ,0.050000000745058059692\n0,4,-0\n";
    let options = options(folder.write("a.csv", text), "id=i,epoch=e", "delta=d");
    let (epochs, error) = read(&options, Limits::default());
    assert!(error.is_none());
    let event = |id, delta| Event { id: MemoryId(id), key: None, signal: Signal::Delta(delta) };
    assert_eq!(epochs[0].content, Content::Events(vec![event(u64::MAX, -1.0)]));
    assert_eq!(epochs[1].content, Content::Events(vec![event(0, 0.05), event(0, -0.0)]));
    assert_eq!((epochs[0].label.as_deref(), epochs[1].label.as_deref()), (Some("-3"), Some("4")));
}

#[test]
fn time_without_events_is_an_epoch_and_a_gap_in_numbers_is_not() {
    let folder = Folder::new();
    let rows = "t,k\n2026-01-30T23:59:59Z,a\n2026-01-30T01:00:00Z,b\n1769990400000,c\n2026-02-02,d\n";
    let path = folder.write("a.csv", rows);
    let (epochs, error) = read(&options(path.clone(), "key=k,time=t", "quality:0.9"), Limits::default());
    assert!(error.is_none(), "{}", error.unwrap());
    let shape: Vec<_> = epochs.iter().map(|e| (e.number, e.label.as_deref().unwrap(), e.content.len())).collect();
    assert_eq!(shape, [(0, "2026-01-30", 2), (1, "2026-01-31", 0), (2, "2026-02-01", 0), (3, "2026-02-02", 2)]);
    // Seconds would all fall into one day of 1970, and a time without a zone has no meaning.
    for (time, allowed) in [
        ("1767225600", "looks like seconds"),
        ("2026-01-30T23:59:59", "has no zone: append Z for UTC"),
        ("2026-01-30 23:59", "a time as in RFC 3339"),
    ] {
        let path = folder.write("b.csv", format!("t,k\n{time},a\n"));
        let error = read(&options(path, "key=k,time=t", "quality:0.9"), Limits::default()).1.unwrap().to_string();
        assert!(error.contains(time) && error.contains(allowed), "{error}");
    }
    // A unit that is wrong by a factor of a thousand would cause years of empty epochs.
    let limits = Limits { empty_epochs: 1, ..Limits::default() };
    let (epochs, error) = read(&options(path, "key=k,time=t", "quality:0.9"), limits);
    assert_eq!((epochs.len(), error.unwrap().code()), (1, "ENG-0304"));
}

#[test]
fn a_bad_row_is_reported_and_nothing_of_its_epoch_yielded() {
    let folder = Folder::new();
    let long = "x".repeat(1_025);
    let csv = "address,word,q";
    let cases: &[(&str, String, usize, &str)] = &[
        (
            "a.csv",
            format!("{csv}\n1,a,1\n2,b,1\n2,c,1.5\n"),
            1,
            "line 4, q: found \"1.5\"; allowed: a number from 0 to 1",
        ),
        ("b.csv", format!("{csv}\n1,a,1\n2,b,nan\n"), 1, "line 3, q: found \"nan\""),
        ("c.csv", format!("{csv}\n1,a,inf\n"), 0, "line 2, q: found \"inf\""),
        ("d.csv", format!("{csv}\n1,a,1.00000001\n"), 0, "line 2, q: found \"1.00000001\""),
        ("e.csv", format!("{csv}\n1,a,-1e-30\n"), 0, "line 2, q"),
        ("f.csv", format!("{csv}\n1,a,1\n3,b,1\n2,c,1\n"), 1, "line 4, address: found 2; allowed: 3 or later"),
        (
            "g.csv",
            format!("{csv}\n1,a,1\n2,,1\n"),
            1,
            "line 3, word: found nothing; allowed: a string of 1 to 1,024 bytes",
        ),
        ("h.csv", format!("{csv}\n1,{long},1\n"), 0, "(1025 bytes)"),
        ("i.csv", format!("{csv}\n1,a,1\n2,b\n"), 0, "line 3, row: found 2 fields; allowed: 3 fields"),
        ("j.csv", format!("{csv}\n1.5,a,1\n"), 0, "line 2, address: found \"1.5\""),
        (
            "k.jsonl",
            r#"{"address":1,"word":"a","q":1}"#.to_owned() + "\n{\"address\":2,\"word\":\"a\"\n",
            0,
            "line 2, row",
        ),
        (
            "l.jsonl",
            r#"{"address":1,"word":"a","q":1}"#.to_owned() + "\n{\"address\":2,\"word\":7,\"q\":1}",
            1,
            "line 2, word: found 7",
        ),
        (
            "m.jsonl",
            r#"{"address":1,"word":"a","q":1}"#.to_owned() + "\n{\"address\":2,\"word\":\"b\"}",
            1,
            "line 2, q: found nothing",
        ),
        ("n.jsonl", r#"{"address":1,"word":"a","q":"1"}"#.to_owned(), 0, "line 1, q: found \"1\""),
        ("o.jsonl", "[1]".to_owned(), 0, "line 1, row"),
        (
            "r.jsonl",
            r#"{"address":1,"word":"a","word":"b","q":1}"#.to_owned(),
            0,
            "line 1, row: found the field \"word\" more than once",
        ),
        ("s.jsonl", r#"{"address":1,"word":"\ud83d","q":1}"#.to_owned(), 0, r#"line 1, word: found "\ud83d"; allowed"#),
        ("p.jsonl", r#"{"address":1,"word":"a","q":true}"#.to_owned(), 0, "line 1, q: found true"),
    ];
    for (name, text, good, message) in cases {
        let options = options(folder.write(name, text), KEY_EPOCH_QUALITY.0, KEY_EPOCH_QUALITY.1);
        let (epochs, error) = read(&options, Limits::default());
        let error = error.unwrap_or_else(|| panic!("{name} is refused"));
        assert_eq!((epochs.len(), error.code()), (*good, "ENG-0304"), "{name}: {error}");
        assert!(error.to_string().contains(message), "{name}: {error}");
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    let rows: &[&[_]] = &[&[(1, Some("a"), 1.0)], &[(1, Some("a"), 1.0), (2, Some("b"), 0.5), (2, None, 0.5)]];
    let options = options(folder.write("q.parquet", address_file(rows)), KEY_EPOCH_QUALITY.0, KEY_EPOCH_QUALITY.1);
    let (epochs, error) = read(&options, Limits::default());
    assert_eq!(epochs.len(), 1);
    assert!(error.unwrap().to_string().contains("row group 1, row 2, word: found nothing"));
}

#[test]
fn a_file_that_contradicts_its_options_fails_to_open() {
    let folder = Folder::new();
    let refused = |path: PathBuf, columns: &str, code: &str, message: &str| {
        let (epochs, error) = read(&options(path, columns, "quality:0.9"), Limits::default());
        let error = error.expect("it is refused");
        assert_eq!((epochs.len(), error.code()), (0, code), "{error}");
        assert!(error.to_string().contains(message), "{error}");
    };
    let csv = folder.write("a.csv", CSV);
    refused(csv.clone(), "key=words,epoch=address", "ENG-0303", "columns.key is \"words\"");
    refused(csv, "key=word,time=when", "ENG-0303", "its columns: address, word, q, note");
    refused(folder.write("a.jsonl", JSONL), "key=word,epoch=year", "ENG-0303", "its columns: address, more, q, word");
    let parquet = folder.write("a.parquet", address_file(&[&[(1, Some("a"), 1.0)]]));
    refused(parquet, "key=word,epoch=year", "ENG-0303", "its columns: address, word, q");
    let twice = "columns.key is \"word\", which occurs 2 times";
    refused(folder.write("d.csv", "word,word,address\na,b,1\n"), "key=word,epoch=address", "ENG-0303", twice);
    let schema = "message m { required int64 address; required boolean word; }";
    let boolean = folder.write("c.parquet", parquet_file(schema, |_| {}));
    refused(boolean, "key=word,epoch=address", "ENG-0303", "columns.key is \"word\", which is of type BOOLEAN");
    refused(folder.write("a.txt", CSV), "key=word,epoch=address", "ENG-0106", "names no known format");
    refused(folder.write("a.parquet.gz", CSV), "key=word,epoch=address", "ENG-0106", "names no known format");
    refused(folder.write("b.parquet", CSV), "key=word,epoch=address", "ENG-0302", "failed to read");
    refused(folder.0.path().join("absent.csv"), "key=word,epoch=address", "ENG-0302", "No such file");
    refused(folder.write("c.csv.zst", CSV), "key=word,epoch=address", "ENG-0302", "failed to read");
}

#[test]
fn supplied_content_reads_like_a_file_and_folders_confine_paths() {
    let folder = Folder::new();
    let there = options(folder.write("a.csv", CSV), "key=word,epoch=address", "quality:0.9");
    let handed = |name: &str, content: &[u8]| EventsOptions {
        path: name.into(),
        origin: Origin::Content(content.into()),
        ..there.clone()
    };
    let expected = read(&there, Limits::default());
    assert!(expected.1.is_none());
    assert_eq!(read(&handed("ConfigMap words, key a.csv", CSV.as_bytes()), Limits::default()).0, expected.0);
    let parquet = address_file(&[&[(1, Some("a"), 1.0)]]);
    assert!(read(&handed("words.parquet", &parquet), Limits::default()).1.is_none());
    for (name, content) in [("s3://words/a.csv", CSV.as_bytes()), ("s3://words/a.parquet", &parquet)] {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        let options = EventsOptions { origin: Origin::Fetched(FetchedFile::new(file)), ..handed(name, b"") };
        let first = read(&options, Limits::default());
        assert!(first.1.is_none() && first.0.len() == read(&handed(name, content), Limits::default()).0.len());
        assert_eq!(read(&options, Limits::default()).0, first.0, "it is opened at its beginning, however often");
    }
    let damaged = read(&handed("ConfigMap words, key a.csv", b"address,word\nfirst,tax\n"), Limits::default()).1;
    let damaged = damaged.expect("it is refused").to_string();
    assert!(damaged.starts_with("ConfigMap words, key a.csv, line 2, address: "), "{damaged}");

    let volume = Folder::new();
    let in_volume =
        |path: PathBuf| EventsOptions { path, origin: Origin::Folder(volume.0.path().to_owned()), ..there.clone() };
    assert_eq!(read(&in_volume(volume.write("b.csv", CSV)), Limits::default()).0, expected.0);
    std::os::unix::fs::symlink(&there.path, volume.0.path().join("c.csv")).unwrap();
    for out in [volume.0.path().join("c.csv"), there.path.clone()] {
        let error = read(&in_volume(out), Limits::default()).1.expect("it is refused");
        assert!(error.to_string().contains("it leads out of"), "{error}");
    }
}

#[test]
fn input_above_memory_limits_is_rejected() {
    let folder = Folder::new();
    let limits = Limits { epoch_events: 3, record_bytes: 100, ..Limits::default() };
    let many = "address,word,q\n".to_owned() + &"1,a,1\n".repeat(3) + &"2,a,1\n".repeat(4);
    let open_quote = "address,word,q\n1,\"".to_owned() + &"a\n".repeat(100_000);
    let long_line = format!(r#"{{"address":1,"word":"{}","q":1}}"#, "a".repeat(200));
    for (name, text, good, message) in [
        ("a.csv", many, 1, "line 8, address: found event 4 of its epoch; allowed: at most 3 events"),
        ("b.csv", open_quote, 0, "is a quote left open?"),
        ("c.jsonl", long_line, 0, "line 1, row: found a longer line; allowed: at most 100 bytes"),
    ] {
        let options = options(folder.write(name, text), KEY_EPOCH_QUALITY.0, KEY_EPOCH_QUALITY.1);
        let (epochs, error) = read(&options, limits);
        let error = error.expect("it is refused");
        assert_eq!((epochs.len(), error.code()), (good, "ENG-0304"), "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn long_parquet_columns_cross_batches_and_keep_their_nulls() {
    let folder = Folder::new();
    let schema = "message m { optional int32 i (UINT_32); required int64 t (TIMESTAMP(MICROS,true)); }";
    let rows = 20_000_i64;
    let bytes = parquet_file(schema, |writer| {
        use ::parquet::data_type::Int32Type;
        let mut group = writer.next_row_group().unwrap();
        let ids: Vec<i32> = (0..rows as i32).map(|row| -1 - row).collect();
        let times: Vec<i64> = (0..rows).map(|row| row * 1_000_000).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&ids, Some(&vec![1; ids.len()]), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&times, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    });
    let options = options(folder.write("a.parquet", bytes), "id=i,time=t,span=1000000", "delta:0.1");
    let (epochs, error) = read(&options, Limits::default());
    assert!(error.is_none(), "{}", error.unwrap());
    assert_eq!(epochs.len(), 20);
    let Content::Events(last) = &epochs[19].content else { panic!("events") };
    assert_eq!((last.len(), last[0].id), (1_000, MemoryId(u64::from(u32::MAX) - 19_999)));
    assert_eq!(epochs[19].label.as_deref(), Some("1970-01-01T05:16:40Z"));
}

#[test]
fn devices_and_pipes_are_refused_before_they_are_read() {
    let (columns, signal) = KEY_EPOCH_QUALITY;
    let options = EventsOptions { format: Format::Csv, ..options("/dev/zero".into(), columns, signal) };
    let error = crate::source::open(&SourceOptions::Events(options), Limits::default(), 0).err().unwrap();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}
