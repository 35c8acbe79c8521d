//! Debug output of credentials: never shows a secret.

use crate::v1::{FederatedCaller, ObjectCredentials};
use std::fmt;

impl fmt::Debug for ObjectCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ObjectCredentials(redacted)")
    }
}

impl fmt::Debug for FederatedCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FederatedCaller({} of {})", self.client, self.run)
    }
}
