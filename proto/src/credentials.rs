//! Debug output of credentials: never shows a secret.

use crate::v1::ObjectCredentials;
use std::fmt;

impl fmt::Debug for ObjectCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ObjectCredentials(redacted)")
    }
}
