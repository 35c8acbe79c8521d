//! Spans: named intervals of a trace.

use crate::context::{Context, current, within};
use crate::recorder;
use std::borrow::Cow;
use std::time::SystemTime;

/// Role of a span in a call between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Within one process.
    Internal,
    /// A call to another process.
    Client,
    /// A call from another process.
    Server,
}

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Text.
    Text(Cow<'static, str>),
    /// Integer.
    Integer(i64),
    /// Number.
    Number(f64),
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Integer(number.into())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Integer(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::from(number as u64)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

/// A span that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedSpan {
    /// Its identity.
    pub context: Context,
    /// Span id of its parent; `None` = it is the root of its trace.
    pub parent: Option<u64>,
    /// Whether the parent is a span of another process.
    pub parent_is_remote: bool,
    /// Its role.
    pub kind: Kind,
    /// What happened.
    pub name: Cow<'static, str>,
    /// When it started.
    pub started: SystemTime,
    /// When it ended.
    pub ended: SystemTime,
    /// Attributes.
    pub attributes: Vec<(&'static str, Value)>,
    /// Spans of other traces that it is related to.
    pub links: Vec<Context>,
    /// Why it failed.
    pub error: Option<String>,
}

/// A span in progress, recorded when dropped; or none, if its trace is not sampled.
#[derive(Debug, Default)]
#[must_use = "a span lasts until it is dropped"]
pub struct Span(Option<Box<FinishedSpan>>);

impl Span {
    /// Returns no span.
    pub const fn none() -> Self {
        Self(None)
    }

    fn start(context: Context, parent: Option<Context>, kind: Kind, name: Cow<'static, str>) -> Self {
        let now = SystemTime::now();
        Self(Some(Box::new(FinishedSpan {
            context,
            parent: parent.map(|parent| parent.span),
            parent_is_remote: kind == Kind::Server,
            kind,
            name,
            started: now,
            ended: now,
            attributes: Vec::new(),
            links: Vec::new(),
            error: None,
        })))
    }

    /// Starts a trace, if it is sampled.
    pub fn root(name: impl Into<Cow<'static, str>>) -> Self {
        let Some(recorder) = recorder() else { return Self(None) };
        let context = Context::new();
        if !recorder.samples(context.trace) {
            return Self(None);
        }
        Self::start(context.sampled(), None, Kind::Internal, name.into())
    }

    /// Starts a span of the current trace, if that is sampled.
    pub fn child(name: impl Into<Cow<'static, str>>) -> Self {
        current().map_or(Self(None), |parent| Self::of(parent, name))
    }

    /// Starts a span of the current trace, or a trace without one. Each is subject to sampling.
    pub fn child_or_root(name: impl Into<Cow<'static, str>>) -> Self {
        if current().is_some() { Self::child(name) } else { Self::root(name) }
    }

    /// Starts a child of `parent`, if its trace is sampled.
    pub fn of(parent: Context, name: impl Into<Cow<'static, str>>) -> Self {
        if !parent.is_sampled() || recorder().is_none() {
            return Self(None);
        }
        Self::start(parent.child(), Some(parent), Kind::Internal, name.into())
    }

    /// Starts the span of a received call: a child of the caller's span, or with `starts_trace` a trace, if it has none.
    pub fn server(parent: Option<Context>, name: impl Into<Cow<'static, str>>, starts_trace: bool) -> Self {
        let Some(recorder) = recorder() else { return Self(None) };
        let context = match parent {
            Some(parent) if parent.is_sampled() => parent.child(),
            Some(parent) if !recorder.follows_parent() && recorder.samples(parent.trace) => parent.child().sampled(),
            None if starts_trace => Context::new(),
            _ => return Self(None),
        };
        if parent.is_none() && !recorder.samples(context.trace) {
            return Self(None);
        }
        Self::start(context.sampled(), parent, Kind::Server, name.into())
    }

    /// Starts a span with an identity on which several processes agree, if its trace is sampled: the trace id decides, equally everywhere.
    pub fn agreed(context: Context, parent: Option<Context>, name: impl Into<Cow<'static, str>>) -> Self {
        if recorder().is_none_or(|recorder| !recorder.samples(context.trace)) {
            return Self(None);
        }
        Self::start(context.sampled(), parent, Kind::Internal, name.into())
    }

    /// Marks it as a call to another process.
    pub fn as_client(mut self) -> Self {
        if let Some(span) = &mut self.0 {
            span.kind = Kind::Client;
        }
        self
    }

    /// Returns its context; `None` if it is not sampled.
    pub fn context(&self) -> Option<Context> {
        self.0.as_ref().map(|span| span.context)
    }

    /// Sets an attribute.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.0 {
            span.attributes.push((key, value.into()));
        }
    }

    /// Relates it to the span of a subject ([`Context::of`]), if its trace is sampled.
    pub fn link_agreed(&mut self, other: Context) {
        if let Some(span) = &mut self.0
            && recorder().is_some_and(|recorder| recorder.samples(other.trace))
        {
            span.links.push(other.sampled());
        }
    }

    /// Marks it as failed.
    pub fn fail(&mut self, error: &str) {
        if let Some(span) = &mut self.0 {
            span.error = Some(error.to_owned());
        }
    }

    /// Marks it as failed if `result` is an error.
    pub fn note<T, E: ToString>(&mut self, result: &Result<T, E>) {
        if let (Some(span), Err(error)) = (&mut self.0, result) {
            span.error = Some(error.to_string());
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(mut span) = self.0.take() {
            span.ended = SystemTime::now();
            record(*span);
        }
    }
}

/// Runs `work` as part of a span: its calls and spans are children. Without a span it runs in the context of the caller.
pub async fn in_span<F: Future>(span: &Span, work: F) -> F::Output {
    let mut work = std::pin::pin!(work);
    match span.context() {
        Some(context) => within(context, work.as_mut()).await,
        None => work.await,
    }
}

/// Records a finished span. Never blocks.
pub fn record(span: FinishedSpan) {
    if let Some(recorder) = recorder() {
        recorder.record(span);
    }
}

/// Records a finished child of `parent` with measured times.
pub fn record_child(
    parent: Context,
    name: &'static str,
    (started, ended): (SystemTime, SystemTime),
    attributes: Vec<(&'static str, Value)>,
) {
    if parent.is_sampled() {
        record(FinishedSpan {
            context: parent.child(),
            parent: Some(parent.span),
            parent_is_remote: false,
            kind: Kind::Internal,
            name: name.into(),
            started,
            ended,
            attributes,
            links: Vec::new(),
            error: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Recorder, set_recorder};
    use std::sync::Mutex;

    static RECORDED: Mutex<Vec<FinishedSpan>> = Mutex::new(Vec::new());

    /// Samples even trace ids.
    #[derive(Debug)]
    struct Test;

    impl Recorder for Test {
        fn samples(&self, trace: u128) -> bool {
            trace >> 1 & 1 == 0
        }

        fn follows_parent(&self) -> bool {
            true
        }

        fn record(&self, span: FinishedSpan) {
            RECORDED.lock().unwrap().push(span);
        }
    }

    #[test]
    fn spans_of_one_trace_share_the_decision_at_its_head() {
        let not_recording = Span::root("before");
        assert!(not_recording.context().is_none());
        set_recorder(Box::new(Test)).unwrap();
        let root = loop {
            let span = Span::root("root");
            if span.context().is_some() {
                break span;
            }
        };
        let context = root.context().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(in_span(&root, async {
            let mut child = Span::child_or_root("child");
            child.set("rows", 3_u64);
            child.fail("no");
            assert_eq!(current(), Some(context));
        }));
        drop(root);
        let spans = std::mem::take(&mut *RECORDED.lock().unwrap());
        assert_eq!(spans.iter().map(|span| span.name.as_ref()).collect::<Vec<_>>(), ["child", "root"]);
        assert_eq!((spans[0].parent, spans[1].parent), (Some(context.span), None));
        assert!(spans.iter().all(|span| span.context.trace == context.trace && span.ended >= span.started));
        assert_eq!(
            (spans[0].error.as_deref(), spans[0].attributes.as_slice()),
            (Some("no"), &[("rows", Value::Integer(3))][..])
        );

        // The caller decides for received calls; without a caller the id does.
        let unsampled = Context { trace: 1, span: 2, flags: 0 };
        assert!(Span::server(Some(unsampled), "call", true).context().is_none());
        let served = Span::server(Some(unsampled.sampled()), "call", true).context().unwrap();
        assert_eq!(served.trace, 1);
        assert!(Span::server(None, "poll", false).context().is_none());
        let agreed = |trace| Span::agreed(Context { trace, span: 9, flags: 0 }, None, "step").context();
        assert_eq!((agreed(3), agreed(5)), (None, Some(Context { trace: 5, span: 9, flags: 1 })));
    }
}
