//! Why somebody was not let in, and how often.

use rustls::{CertificateError, Error};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a connection or a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// No TLS was spoken.
    PlainText,
    /// No certificate was shown.
    NoCertificate,
    /// It ended before now.
    Expired,
    /// It begins later than now.
    NotYetValid,
    /// Another authority signed it.
    UnknownAuthority,
    /// It is of another cluster, or of no process of a cluster.
    OtherCluster,
    /// Its role may not use this listener, or not for this.
    Role,
    /// A message names another sender than the certificate does.
    Sender,
    /// The handshake took too long.
    Timeout,
    /// The handshake failed otherwise: another version of TLS, or the caller went away.
    Handshake,
    /// A call carried neither certificate nor token.
    NoToken,
    /// A token is none, or lacks something.
    TokenMalformed,
    /// Its algorithm is not allowed, or not that of its key.
    TokenAlgorithm,
    /// Its key is not one of the issuer's.
    TokenKey,
    /// Its signature is wrong.
    TokenSignature,
    /// It is of another issuer.
    TokenIssuer,
    /// It is for somebody else than this cluster.
    TokenAudience,
    /// It ended before now.
    TokenExpired,
    /// It begins later than now.
    TokenNotYetValid,
    /// Its account has no rights here.
    TokenAccount,
    /// Its account lacks the right to this call.
    TokenRight,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::PlainText,
        Self::NoCertificate,
        Self::Expired,
        Self::NotYetValid,
        Self::UnknownAuthority,
        Self::OtherCluster,
        Self::Role,
        Self::Sender,
        Self::Timeout,
        Self::Handshake,
        Self::NoToken,
        Self::TokenMalformed,
        Self::TokenAlgorithm,
        Self::TokenKey,
        Self::TokenSignature,
        Self::TokenIssuer,
        Self::TokenAudience,
        Self::TokenExpired,
        Self::TokenNotYetValid,
        Self::TokenAccount,
        Self::TokenRight,
    ];

    /// The word for it in metrics.
    pub const fn word(self) -> &'static str {
        match self {
            Self::PlainText => "plain_text",
            Self::NoCertificate => "no_certificate",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::UnknownAuthority => "unknown_authority",
            Self::OtherCluster => "other_cluster",
            Self::Role => "role",
            Self::Sender => "sender",
            Self::Timeout => "timeout",
            Self::Handshake => "handshake",
            Self::NoToken => "no_token",
            Self::TokenMalformed => "token_malformed",
            Self::TokenAlgorithm => "token_algorithm",
            Self::TokenKey => "token_key",
            Self::TokenSignature => "token_signature",
            Self::TokenIssuer => "token_issuer",
            Self::TokenAudience => "token_audience",
            Self::TokenExpired => "token_expired",
            Self::TokenNotYetValid => "token_not_yet_valid",
            Self::TokenAccount => "token_account",
            Self::TokenRight => "token_right",
        }
    }

    /// Of a handshake that failed on the listening side.
    pub(crate) fn of(error: &io::Error) -> Self {
        let Some(error) = error.get_ref().and_then(|source| source.downcast_ref::<Error>()) else {
            return Self::Handshake;
        };
        match error {
            Error::InvalidMessage(_) => Self::PlainText,
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::InvalidCertificate(error) => match error {
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
                CertificateError::ApplicationVerificationFailure => Self::OtherCluster,
                _ => Self::UnknownAuthority,
            },
            _ => Self::Handshake,
        }
    }
}

/// How often each was a reason.
#[derive(Debug, Default)]
pub struct Refusals([AtomicU64; Reason::ALL.len()]);

impl Refusals {
    /// Counts one.
    pub fn count(&self, reason: Reason) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often so far.
    pub fn of(&self, reason: Reason) -> u64 {
        self.0[reason as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_counted_by_itself() {
        let refusals = Refusals::default();
        for (count, reason) in (1..).zip(Reason::ALL) {
            (0..count).for_each(|_| refusals.count(reason));
        }
        let counted: Vec<u64> = Reason::ALL.into_iter().map(|reason| refusals.of(reason)).collect();
        assert_eq!(counted, (1..=21).collect::<Vec<u64>>());
    }
}
