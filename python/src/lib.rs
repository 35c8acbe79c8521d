//! Native module `engram._engram` of the Python package: the client of a cluster, and the numerics that need none.
//!
//! Decides how Python values become columns of the client library and back, when the interpreter lock is released, and how a call is
//! interrupted. Arguments have the right dtype and are contiguous: the Python layer converts them and reports what it cannot convert.
//!
//! Invariants:
//! - The interpreter lock is not held while a call waits; a waiting call checks for signals ten times a second.
//! - After a fork nothing of the parent's runtime is used or dropped in the child: its threads do not exist there.
#![allow(
    clippy::needless_pass_by_value,
    clippy::too_many_arguments,
    reason = "functions have the keyword arguments of Python, as owned values"
)]

mod buffer;
mod call;
mod client;
mod convert;
mod error;
mod federated;
mod group;
mod manifest;
mod numerics;
mod proxy;
mod runtime;

use pyo3::prelude::*;

/// Native part of the package.
#[pymodule]
mod _engram {
    #[pymodule_export]
    use crate::buffer::{Buffer, create_buffer, drop_buffer, list_buffers, open_buffer};
    #[pymodule_export]
    use crate::call::Call;
    #[pymodule_export]
    use crate::client::{Client, key_ids};
    #[pymodule_export]
    use crate::federated::{FederatedTask, Participant, run_status, submit_run};
    #[pymodule_export]
    use crate::group::Group;
    #[pymodule_export]
    use crate::manifest::parse_manifest;
    #[pymodule_export]
    use crate::numerics::{
        GeodesicTrainer, fisher_matrix, geodesic_calibration_pairs, geodesic_example, geodesic_invert,
        natural_gradient, tropical_backward, tropical_forward, tropical_matmul,
    };
    #[pymodule_export]
    use crate::runtime::Runtime;
}
