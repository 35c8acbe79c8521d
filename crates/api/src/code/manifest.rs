//! Explanations of the codes of manifests: cause and remedies.

pub(super) const UNKNOWN_FIELD: &str = "\
A manifest has a field that its kind does not have at that place. Unknown fields are rejected because a misspelt field \
would otherwise silently keep its default.

Correct the name (the message shows the nearest one and all that are allowed there), or remove the line. \
`engram config schema` prints a JSON Schema with which editors complete and check manifests.";

pub(super) const WRONG_TYPE: &str = "\
A field has a value of the wrong type: text for a number, a number for a list, or no value.

Numbers are YAML 1.2 numbers, without quotes, underscores or units: `1000000`, not `\"1000000\"`, `1_000_000` or `1M`. \
Integers have neither point nor exponent. Booleans are `true` and `false`. Durations and sizes are text with a \
unit: `500ms`, `3s`, `10m`; `64Mi`, `50Gi`. A field without a value does not mean the default: remove the line, or write \
`{}` for an object of defaults.";

pub(super) const OUT_OF_RANGE: &str = "\
A value has the right type but is outside the allowed range. NaN and infinite numbers are outside every range. Values \
are never clamped.

Weights, rates and decays are stored in units of 2^-30. A positive value of 2^-31 or less would round to 0, so it is \
rejected.";

pub(super) const NOT_ONE_OF: &str = "\
A field accepts a fixed set of values and has another one. Manifests write them in PascalCase: `Evict`, `SoloDurable`. \
The command line writes them in lower case: `--gpu required`.";

pub(super) const MISSING: &str = "\
A required field, which has no default, is absent. The message names the field and shows a line to add, with an example value.";

pub(super) const CONFLICTING: &str = "\
Each value is valid alone, but not in combination: more replicas than workers, two sources for one run, a \
report that the source does not support. The message names both fields, both values and the rule.";

pub(super) const NOT_SUPPORTED: &str = "\
The manifest requests a feature that this version does not implement yet. It is rejected rather than \
silently ignored. The message says what to set instead.";

pub(super) const IMMUTABLE: &str = "\
`partitions`, `learning.law` and `features` are immutable, because they determine how and where data is stored.

Restore the old value. To change it, export the memories, start a cluster with another name or `--state-dir`, and \
import them there.";

pub(super) const NOT_A_MANIFEST: &str = "\
The file is not YAML, or a document in it is not one of the two kinds (`LearnerCluster`, `LearnerRun`) of \
`apiVersion: engram.dev/v1alpha1`, or documents are missing or duplicated: `up` requires exactly one `LearnerCluster`, \
`run` at least one `LearnerRun`, and names must be unique per kind.

The operator's configuration file (`--config`) is one document of `apiVersion: operator.engram.dev/v1alpha1` and `kind: OperatorConfiguration`.";
