use super::*;
use engram_client::GetOptions;
use engram_memory::{Group, Weight, key_id};
use std::io::Cursor;
use std::sync::Arc;

fn read_for(purpose: Purpose, format: Format, text: &[u8]) -> Result<Vec<Row>, Problem> {
    let mut reader = Reader::new("rows".into(), format, purpose, Box::new(Cursor::new(text.to_vec())), Arc::default());
    let mut rows = Vec::new();
    while let Some(row) = reader.next_row()? {
        rows.push(row);
    }
    Ok(rows)
}

fn read(format: Format, text: &[u8]) -> Result<Vec<Row>, Problem> {
    read_for(Purpose::Insert { dimension: 2 }, format, text)
}

#[test]
fn exported_rows_can_be_inserted() {
    let memories = [
        Memory {
            id: key_id(b"go,\"vern\"\nment"),
            weight: Weight::from_units(536_870_912).unwrap(),
            group: Group(7),
            key: Some("go,\"vern\"\nment".into()),
            features: vec![1.5, -0.25],
            payload: vec![0, 255, 10].into(),
        },
        Memory { id: MemoryId(u64::MAX), payload: b"text".to_vec().into(), ..Memory::default() },
    ];
    let columns = GetOptions { features: true, payloads: true };
    for format in [Format::Jsonl, Format::Csv] {
        let mut writer = Writer::new(Vec::new(), format, columns).unwrap();
        memories.iter().for_each(|memory| writer.write(memory).unwrap());
        let rows = read(format, &writer.finish().unwrap()).unwrap();
        assert_eq!(rows.len(), 2);
        for (row, memory) in rows.iter().zip(&memories) {
            assert_eq!((row.id, &row.key, row.group), (memory.id, &memory.key, Some(memory.group.0)));
            assert_eq!((&row.features, &row.payload[..]), (&memory.features, &memory.payload[..]));
            assert_eq!(f64::from(row.weight.unwrap()), weight(memory), "half is exact in single precision");
        }
    }
}

#[test]
fn invalid_rows_are_reported_with_line_value_and_allowed_values() {
    let cases: [(Format, &str, &str); 11] = [
        (
            Format::Jsonl,
            "{\"key\":\"a\"}\n\n{\"key\":\"b\",\"weight\":1.5}",
            "rows, line 3: weight is 1.5; allowed: 0 to 1",
        ),
        (Format::Jsonl, "{\"key\":\"a\",\"wieght\":1}", "line 1: unknown field `wieght`, expected one of `id`"),
        (Format::Jsonl, "{\"weight\":1}", "line 1: neither id nor key is given"),
        (Format::Jsonl, "{\"id\":1,\"key\":\"a\"}", "line 1: id is 1, but key \"a\" has the id 14598278634844962250"),
        (Format::Jsonl, "{\"id\":1,\"group\":256}", "line 1: group is 256; allowed: 0 to 255"),
        (Format::Jsonl, "{\"id\":1,\"quality\":0.5}", "quality and delta are not allowed in `engram insert`"),
        (Format::Jsonl, "{\"id\":-1}", "line 1: invalid value: integer `-1`, expected u64"),
        (Format::Jsonl, "{\"id\":1,\"payloadBase64\":\"!\"}", "payloadBase64 is not valid Base64"),
        (Format::Csv, "key,weight\na,0.5\nb,NaN\n", "rows, line 3: weight is NaN; allowed: 0 to 1"),
        (Format::Csv, "key,wieght\na,0.5\n", "line 2: unknown field `wieght`"),
        (Format::Csv, "id,features\n1,0.5 x\n", "line 2: features contain \"x\""),
    ];
    for (format, text, expected) in cases {
        let error = read(format, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "{text:?} gives {error:?}, expected {expected:?}");
    }
    let dimension = read(Format::Jsonl, b"{\"id\":1,\"features\":[1,2,3]}").unwrap_err();
    assert_eq!(dimension.code(), Code::WrongDimension);
    assert!(dimension.message().contains("3 numbers; the dimension of the cluster is 2"), "{dimension}");
    for (row, expected) in [
        ("{\"id\":1,\"quality\":0.5,\"delta\":0.5}", "exactly one of quality and delta"),
        ("{\"id\":1}", "exactly one of quality and delta"),
        ("{\"id\":1,\"delta\":-2}", "delta is -2; allowed: -1 to 1"),
        ("{\"id\":1,\"delta\":1,\"weight\":1}", "are not allowed in `engram reinforce`"),
    ] {
        let error = read_for(Purpose::Reinforce, Format::Jsonl, row.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "{row} gives {error:?}");
    }
    let endless = read(Format::Jsonl, &vec![b'x'; 2 << 20]).unwrap_err().to_string();
    assert!(endless.contains("longer than 1048576 bytes"), "{endless}");
    let unclosed = [b"key\n\"".as_slice(), &vec![b'x'; 2 << 20]].concat();
    let unclosed = read(Format::Csv, &unclosed).unwrap_err().to_string();
    assert!(unclosed.contains("longer than 1048576 bytes"), "{unclosed}");
}

#[test]
fn formats_are_detected_by_extension() {
    assert_eq!(Format::of_path(Path::new("a/b.JSONL.zst")).unwrap(), Format::Jsonl);
    assert_eq!(Format::of_path(Path::new("b.csv.gz")).unwrap(), Format::Csv);
    assert!(
        Format::of_path(Path::new("b.parquet")).unwrap_err().to_string().contains("b.parquet has an unknown extension")
    );
}
