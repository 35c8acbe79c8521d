//! Rules of `spec.buffers`.

use super::check::entry_place;
use super::rules::find;
use super::tree::{Entry, Node, Yaml, place};
use crate::code::Code;
use crate::problem::{Location, Problem};

const PATH: &str = "spec.buffers";

/// Checks the declared buffers of a `LearnerCluster`.
pub(super) fn check(source: &str, document: &Node) -> Vec<Problem> {
    let Some(Entry { value, .. }) = find(document, PATH) else { return Vec::new() };
    let Yaml::List(buffers) = &value.value else { return Vec::new() };
    let mut problems = Vec::new();
    unique(buffers, PATH, source, &mut problems);
    for (index, buffer) in buffers.iter().enumerate() {
        let mut one = Buffer { source, node: buffer, path: format!("{PATH}[{index}]"), problems: &mut problems };
        one.priorities();
        one.limiter();
        one.sampler();
        if let Some(Yaml::List(fields)) = buffer.value.get("fields").map(|entry| &entry.value.value) {
            let path = format!("{PATH}[{index}].fields");
            unique(fields, &path, source, &mut problems);
        }
    }
    problems
}

/// Requires each name of a list once.
fn unique(items: &[Node], path: &str, source: &str, problems: &mut Vec<Problem>) {
    let name = |item: &Node| item.value.get("name").and_then(|entry| entry.value.value.text().map(str::to_owned));
    for (index, item) in items.iter().enumerate() {
        let Some(text) = name(item) else { continue };
        let Some(first) = items[..index].iter().position(|other| name(other).as_ref() == Some(&text)) else { continue };
        let field = format!("{path}[{index}].name");
        let message = format!("{field} is {text}, as {path}[{first}].name; allowed: each name once");
        let at = item.value.get("name").map_or_else(|| place(item.referenced), |entry| entry_place(entry, source));
        problems.push(Problem::new(Code::Conflicting, message).of(field).at(at).help("give it another name"));
    }
}

/// One declared buffer.
struct Buffer<'a> {
    source: &'a str,
    node: &'a Node,
    path: String,
    problems: &'a mut Vec<Problem>,
}

impl Buffer<'_> {
    fn entry(&self, field: &str) -> Option<&Entry> {
        find(self.node, field)
    }

    fn numeric(&self, field: &str) -> Option<f64> {
        match self.entry(field)?.value.value {
            Yaml::Integer(value) => Some(value as f64),
            Yaml::Number(value) => Some(value),
            _ => None,
        }
    }

    fn place(&self, field: &str) -> Location {
        self.entry(field).map_or_else(|| place(self.node.referenced), |entry| entry_place(entry, self.source))
    }

    fn problem(&mut self, field: &str, message: String, help: &str) {
        let (path, at) = (format!("{}.{field}", self.path), self.place(field));
        self.problems.push(Problem::new(Code::Conflicting, message).of(path).at(at).help(help));
    }

    fn priorities(&mut self) {
        let initial = self.numeric("initialPriority").unwrap_or(1.0);
        let most = self.numeric("maxPriority").unwrap_or(1_024.0);
        if initial > most {
            let (at, initial, most) = (&self.path, shown(initial), shown(most));
            let message = format!(
                "{at}.initialPriority is {initial}, but {at}.maxPriority is {most}; allowed: initialPriority <= maxPriority"
            );
            self.problem("initialPriority", message, "lower initialPriority, or raise maxPriority");
        }
    }

    fn limiter(&mut self) {
        if self.entry("limiter").is_none() {
            return;
        }
        let at = self.path.clone();
        if let Some((capacity, least)) = self.numeric("capacity").zip(self.numeric("limiter.minSize"))
            && least > capacity
        {
            let (least, capacity) = (shown(least), shown(capacity));
            let message = format!(
                "{at}.limiter.minSize is {least}, but {at}.capacity is {capacity}; allowed: minSize <= capacity"
            );
            self.problem("limiter.minSize", message, "the first sample would wait forever; lower minSize");
        }
        if let Some((samples, tolerance)) =
            self.numeric("limiter.samplesPerInsert").zip(self.numeric("limiter.tolerance"))
            && tolerance < samples
        {
            let (tolerance, samples) = (shown(tolerance), shown(samples));
            let message = format!(
                "{at}.limiter.tolerance is {tolerance}, but {at}.limiter.samplesPerInsert is {samples}; allowed: tolerance >= \
                 samplesPerInsert"
            );
            self.problem("limiter.tolerance", message, "appends and samples could block each other; raise tolerance");
        }
    }

    fn sampler(&mut self) {
        let kind = self.entry("sampler.kind").and_then(|entry| entry.value.value.text()).map(str::to_owned);
        let Some(kind) = kind else { return };
        let at = self.path.clone();
        for (field, kinds) in
            [("alpha", &["Prioritized"][..]), ("beta", &["Prioritized"]), ("length", &["Slices", "Groups"])]
        {
            let (name, allowed) = (format!("sampler.{field}"), kinds.contains(&kind.as_str()));
            let present = self.entry(&name).is_some();
            if present && !allowed {
                let message = format!(
                    "{at}.{name} is present, but {at}.sampler.kind is {kind}; allowed: {field} with {}",
                    kinds.join(" and ")
                );
                self.problem(&name, message, "remove it");
            } else if !present && allowed && field == "length" {
                let message =
                    format!("{at}.sampler.kind is {kind}, but {at}.{name} is absent; allowed: {kind} with length");
                self.problem("sampler.kind", message, "add length: the number of items");
            }
        }
    }
}

/// Returns a number as text: large and small ones with an exponent.
fn shown(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 { value.to_string() } else { format!("{value:?}") }
}
