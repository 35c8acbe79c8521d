//! Timelines in Chrome's trace event format.

use super::{Kind, Track};
use std::fmt::Write;

/// Returns one JSON object: a thread per device, a complete event (`ph` X, `ts` and `dur` in microseconds) per span, its kind as category.
pub fn chrome_trace(tracks: &[Track]) -> String {
    let mut text = String::from("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
    text.push_str("{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"engram devices\"}}");
    let mut event = |event: std::fmt::Arguments<'_>| {
        text.push_str(",\n");
        text.write_fmt(event).expect("writing to a string cannot fail");
    };
    for (index, track) in tracks.iter().enumerate() {
        let thread = index + 1;
        let name = if track.dropped > 0 {
            format!("{} ({} spans dropped)", track.device, track.dropped)
        } else {
            track.device.clone()
        };
        let name = escaped(&name);
        event(format_args!(
            "{{\"ph\":\"M\",\"pid\":1,\"tid\":{thread},\"name\":\"thread_name\",\"args\":{{\"name\":\"{name}\"}}}}"
        ));
        for span in &track.spans {
            let kind = match span.kind {
                Kind::Kernel => "kernel",
                Kind::Copy => "copy",
                Kind::Wait => "wait",
            };
            let (name, begin) = (escaped(span.name), microseconds(span.begin_ns));
            let duration = microseconds(span.end_ns - span.begin_ns);
            event(format_args!(
                "{{\"ph\":\"X\",\"pid\":1,\"tid\":{thread},\"cat\":\"{kind}\",\"name\":\"{name}\",\"ts\":{begin},\"dur\":{duration}}}"
            ));
        }
    }
    text.push_str("\n]}\n");
    text
}

/// Formats with three decimals, which is exact.
fn microseconds(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000, ns % 1_000)
}

/// Escapes the content of a JSON string.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            control if control < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(control))),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profiler::Span;

    #[test]
    fn each_device_is_a_thread_and_each_span_an_event() {
        let span = |kind, name, begin_ns, end_ns| Span { kind, name, begin_ns, end_ns };
        let tracks = [
            Track {
                device: "cpu \"a\\b\"\n".to_owned(),
                spans: vec![
                    span(Kind::Kernel, "epoch", 1_500, 1_002_003),
                    span(Kind::Wait, "barrier", 1_002_003, 1_002_004),
                ],
                dropped: 0,
            },
            Track { device: "cuda".to_owned(), spans: vec![span(Kind::Copy, "upload", 0, 7)], dropped: 3 },
        ];
        let expected = r#"{"displayTimeUnit":"ns","traceEvents":[
{"ph":"M","pid":1,"name":"process_name","args":{"name":"engram devices"}},
{"ph":"M","pid":1,"tid":1,"name":"thread_name","args":{"name":"cpu \"a\\b\"\u000a"}},
{"ph":"X","pid":1,"tid":1,"cat":"kernel","name":"epoch","ts":1.500,"dur":1000.503},
{"ph":"X","pid":1,"tid":1,"cat":"wait","name":"barrier","ts":1002.003,"dur":0.001},
{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"cuda (3 spans dropped)"}},
{"ph":"X","pid":1,"tid":2,"cat":"copy","name":"upload","ts":0.000,"dur":0.007}
]}
"#;
        assert_eq!(chrome_trace(&tracks), expected);
    }
}
