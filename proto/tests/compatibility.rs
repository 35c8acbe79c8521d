//! Wire compatibility: fields, enum values and calls of a released protocol version never change. New ones may be added; older builds
//! ignore them.

use prost::Message as _;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Returns one line per fact that two builds must agree on.
fn wire() -> BTreeSet<String> {
    let files = FileDescriptorSet::decode(engram_proto::DESCRIPTORS).expect("the build wrote it");
    let mut lines = BTreeSet::new();
    for file in files.file.iter().filter(|file| file.package() == "engram.v1") {
        file.message_type.iter().for_each(|message| fields("", message, &mut lines));
        file.enum_type.iter().for_each(|of| values("", of, &mut lines));
        for service in &file.service {
            for call in &service.method {
                let stream = |streams| if streams { "stream " } else { "" };
                lines.insert(format!(
                    "call {}.{}: {}{} -> {}{}",
                    service.name(),
                    call.name(),
                    stream(call.client_streaming()),
                    call.input_type(),
                    stream(call.server_streaming()),
                    call.output_type(),
                ));
            }
        }
    }
    lines
}

fn fields(outer: &str, message: &DescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{outer}{}", message.name());
    for field in &message.field {
        let kind =
            if field.type_name().is_empty() { format!("{:?}", field.r#type()) } else { field.type_name().into() };
        // The oneof of a field is part of the message's meaning.
        let one_of = field.oneof_index.filter(|_| !field.proto3_optional());
        let one_of = one_of.map_or_else(String::new, |at| format!(" in {}", message.oneof_decl[at as usize].name()));
        let packed = field.options.as_ref().and_then(|options| options.packed).map_or("", |_| " packed");
        lines.insert(format!("field {name} {} = {:?} {kind}{one_of}{packed}", field.number(), field.label()));
    }
    let inner = format!("{name}.");
    message.nested_type.iter().for_each(|nested| fields(&inner, nested, lines));
    message.enum_type.iter().for_each(|of| values(&inner, of, lines));
}

fn values(outer: &str, of: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    for value in &of.value {
        lines.insert(format!("value {outer}{} {} = {}", of.name(), value.number(), value.name()));
    }
}

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/wire-v1.txt")
}

#[test]
fn released_wire_format_is_unchanged() {
    let now = wire();
    let released = std::fs::read_to_string(golden()).expect("it is committed");
    let removed: Vec<&str> = released.lines().filter(|line| !now.contains(*line)).collect();
    assert!(
        removed.is_empty(),
        "changed facts of a released version; add a new field, or raise the protocol version:\n{}",
        removed.join("\n")
    );
}

#[test]
fn golden_file_contains_fields_calls_and_values() {
    let now = wire();
    let line = now.iter().find(|line| line.starts_with("field Hello 3 = ")).expect("its oldest protocol");
    assert!(line.ends_with("Uint32"), "{line}");
    assert!(now.iter().any(|line| line.starts_with("call PeerService.")), "services are missing");
    assert!(now.len() > 400, "{} lines", now.len());
}

#[test]
#[ignore = "rewrites the golden file; after a release it may only add lines"]
fn write_golden() {
    std::fs::write(golden(), wire().into_iter().map(|line| line + "\n").collect::<String>()).unwrap();
}
