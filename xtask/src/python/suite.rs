//! What a run of the tests of the Python package installs and runs.

use super::Options;

/// What the tests need besides the wheel.
const TEST_PACKAGES: [&str; 4] = ["pytest>=8", "pytest-timeout", "mypy>=1.15", "langgraph-checkpoint>=4"];
/// What the examples need that train with PyTorch, and its tests; large.
const TORCH_PACKAGES: [&str; 2] = ["torch", "gymnasium"];
const OPTUNA: &str = "optuna";
/// Brings a table of an example.
const SCIKIT_LEARN: &str = "scikit-learn";
/// What the PyTorch module in a checkpoint needs.
const SAFETENSORS: &str = "safetensors";
/// What the tests of all integrations need in addition. The version of TransferQueue is the one that was read: the backend uses some of its private
/// names. That of Flower is the one that its adapter names.
const INTEGRATION_PACKAGES: [&str; 6] =
    ["TransferQueue==0.1.11", "torchrl", "tensordict", "opentelemetry-sdk", "grafana-foundation-sdk", "flwr==1.42.0"];
/// Tests that need the packages above.
const TORCH_MARKERS: [&str; 1] = ["torch"];
const INTEGRATION_MARKERS: [&str; 5] = ["transferqueue", "torchrl", "opentelemetry", "grafana", "flower"];
/// Examples that need no other packages, and those that need more or take longer.
const EXAMPLES: [&str; 3] = ["quickstart.py", "actor_learner.py", "reverb_migration.py"];
const TORCH_EXAMPLES: [&str; 1] = ["dqn_cartpole.py"];
const LONGER_EXAMPLES: [&str; 4] = ["search_loop.py", "tune_optuna.py", "tables.py", "federated.py"];

/// An environment, and what runs in it: first the examples, with nothing but the packages that they name, then the tests.
pub(super) struct Suite {
    pub(super) environment: &'static str,
    /// Packages that the examples name, besides the wheel.
    pub(super) packages: Vec<&'static str>,
    pub(super) examples: Vec<&'static str>,
    /// What the tests need; without packages there are none.
    pub(super) test_packages: Vec<&'static str>,
    /// Tests that are left out: their packages are not installed.
    pub(super) without: Vec<&'static str>,
    /// Whether TransferQueue's own tests run.
    pub(super) upstream: bool,
    /// Whether the environment is removed at the end.
    pub(super) temporary: bool,
}

impl Suite {
    /// Returns the suites of a run, in their order.
    pub(super) fn of(options: &Options) -> Vec<Self> {
        let mut suites = vec![match (options.torch, options.integrations) {
            (_, true) => Self::integrations(),
            (true, false) => Self::torch(),
            (false, false) => Self::base(),
        }];
        if options.torch_examples {
            suites.push(Self::torch_examples());
        }
        suites
    }

    fn base() -> Self {
        Self {
            environment: "base",
            packages: Vec::new(),
            examples: EXAMPLES.to_vec(),
            test_packages: TEST_PACKAGES.to_vec(),
            without: [&TORCH_MARKERS[..], &INTEGRATION_MARKERS].concat(),
            upstream: false,
            temporary: false,
        }
    }

    fn torch() -> Self {
        Self {
            environment: "torch",
            packages: [&TORCH_PACKAGES[..], &[OPTUNA, SCIKIT_LEARN, SAFETENSORS]].concat(),
            examples: [&EXAMPLES[..], &TORCH_EXAMPLES, &LONGER_EXAMPLES].concat(),
            without: INTEGRATION_MARKERS.to_vec(),
            ..Self::base()
        }
    }

    fn integrations() -> Self {
        Self {
            environment: "integrations",
            test_packages: [&TEST_PACKAGES[..], &INTEGRATION_PACKAGES].concat(),
            without: Vec::new(),
            upstream: true,
            ..Self::torch()
        }
    }

    /// The examples alone, with what they name.
    pub(super) fn torch_examples() -> Self {
        Self {
            environment: "torch-examples",
            packages: TORCH_PACKAGES.to_vec(),
            examples: TORCH_EXAMPLES.to_vec(),
            test_packages: Vec::new(),
            temporary: true,
            ..Self::base()
        }
    }
}
