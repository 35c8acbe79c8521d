//! Bearer tokens of clients without a certificate.

use engram_identity::{Error, WatchedFiles};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use tonic::metadata::AsciiMetadataValue;

/// A token from a file or a function.
#[derive(Clone)]
pub struct Token(Source);

#[derive(Clone)]
enum Source {
    File(Arc<WatchedFiles<AsciiMetadataValue>>),
    Function(Arc<dyn Fn() -> String + Send + Sync>),
}

impl Token {
    /// Reads the token from a file, and reloads it when it changes.
    ///
    /// # Errors
    /// The file cannot be read, or holds no token.
    pub fn file(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let parse = |contents: &[Vec<u8>]| {
            let token = String::from_utf8_lossy(&contents[0]);
            header(&token).ok_or_else(|| Error::Unusable { what: "the file must contain exactly one token".to_owned() })
        };
        Ok(Self(Source::File(WatchedFiles::open("a token", vec![path.into()], parse)?)))
    }

    /// Calls `now` for every call. It must not block.
    pub fn from_fn(now: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Source::Function(Arc::new(now)))
    }

    /// Returns the current token.
    pub fn text(&self) -> String {
        match &self.0 {
            Source::Function(now) => now(),
            Source::File(_) => {
                let header = self.header();
                let text = header.as_ref().and_then(|header| header.to_str().ok()).unwrap_or_default();
                text.strip_prefix(BEARER).unwrap_or_default().to_owned()
            }
        }
    }

    /// Returns the metadata value of the current token; `None` if it is malformed.
    pub(crate) fn header(&self) -> Option<AsciiMetadataValue> {
        match &self.0 {
            Source::File(file) => {
                file.reload_if_due();
                Some((*file.current()).clone())
            }
            Source::Function(now) => header(&now()),
        }
    }
}

const BEARER: &str = "Bearer ";

fn header(token: &str) -> Option<AsciiMetadataValue> {
    let token = token.trim();
    let is_token = !token.is_empty() && !token.contains(char::is_whitespace);
    let mut value = AsciiMetadataValue::try_from(format!("{BEARER}{token}")).ok().filter(|_| is_token)?;
    // Excluded from debug output of requests.
    value.set_sensitive(true);
    Some(value)
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_a_single_word_and_never_printed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        assert!(Token::file(&path).is_err(), "no file");
        for none in ["", " \n", "two words", "a\nb"] {
            std::fs::write(&path, none).unwrap();
            assert!(Token::file(&path).is_err(), "{none:?}");
        }
        std::fs::write(&path, "a.b.c\n").unwrap();
        let token = Token::file(&path).unwrap();
        assert_eq!(token.text(), "a.b.c");
        assert_eq!(token.header().unwrap().to_str().unwrap(), "Bearer a.b.c");
        assert!(!format!("{token:?} {:?}", token.header()).contains("a.b.c"));
        assert_eq!(Token::from_fn(String::new).header(), None);
    }
}
