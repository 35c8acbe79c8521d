//! Messages of the calls: rows and pages of an answer, and conversion to and from the wire.

pub(super) mod convert;
pub(super) mod pages;
pub(super) mod rows;
