//! What a client shows where it has no certificate: a token, as it is now.

use engram_identity::{Error, Followed};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use tonic::metadata::AsciiMetadataValue;

/// A token, from a file or from whoever renews it.
#[derive(Clone)]
pub struct Token(Source);

#[derive(Clone)]
enum Source {
    File(Arc<Followed<AsciiMetadataValue>>),
    Given(Arc<dyn Fn() -> String + Send + Sync>),
}

impl Token {
    /// That in a file, which is read again when it changes.
    ///
    /// # Errors
    /// It cannot be read, or holds no token.
    pub fn file(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let parse = |contents: &[Vec<u8>]| {
            let token = String::from_utf8_lossy(&contents[0]);
            header(&token)
                .ok_or_else(|| Error::Unusable { what: "the file holds no token, or more than one".to_owned() })
        };
        Ok(Self(Source::File(Followed::open("a token", vec![path.into()], parse)?)))
    }

    /// What `now` says at each call. It must not wait.
    pub fn given(now: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Source::Given(Arc::new(now)))
    }

    /// The token as it is now.
    pub fn text(&self) -> String {
        match &self.0 {
            Source::Given(now) => now(),
            Source::File(_) => {
                let header = self.header();
                let text = header.as_ref().and_then(|header| header.to_str().ok()).unwrap_or_default();
                text.strip_prefix(BEARER).unwrap_or_default().to_owned()
            }
        }
    }

    /// The same as calls carry it; `None` where it is none.
    pub(crate) fn header(&self) -> Option<AsciiMetadataValue> {
        match &self.0 {
            Source::File(file) => {
                file.look_if_due();
                Some((*file.current()).clone())
            }
            Source::Given(now) => header(&now()),
        }
    }
}

const BEARER: &str = "Bearer ";

fn header(token: &str) -> Option<AsciiMetadataValue> {
    let token = token.trim();
    let is_token = !token.is_empty() && !token.contains(char::is_whitespace);
    let mut value = AsciiMetadataValue::try_from(format!("{BEARER}{token}")).ok().filter(|_| is_token)?;
    // Kept out of what is printed of requests.
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
    fn a_token_is_one_word_and_is_not_printed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        assert!(Token::file(&path).is_err(), "there is none");
        for none in ["", " \n", "two words", "a\nb"] {
            std::fs::write(&path, none).unwrap();
            assert!(Token::file(&path).is_err(), "{none:?}");
        }
        std::fs::write(&path, "a.b.c\n").unwrap();
        let token = Token::file(&path).unwrap();
        assert_eq!(token.text(), "a.b.c");
        assert_eq!(token.header().unwrap().to_str().unwrap(), "Bearer a.b.c");
        assert!(!format!("{token:?} {:?}", token.header()).contains("a.b.c"));
        assert_eq!(Token::given(String::new).header(), None);
    }
}
