//! Why connections and calls are rejected, and how often.

use rustls::{CertificateError, Error};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a connection or a call was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The caller did not use TLS.
    PlainText,
    /// No certificate was presented.
    NoCertificate,
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet.
    NotYetValid,
    /// The certificate is signed by another CA.
    UnknownCa,
    /// The certificate belongs to another cluster, or to no process of a cluster.
    OtherCluster,
    /// The caller's role may not use this listener, or not for this call.
    Role,
    /// A message names another sender than the certificate.
    Sender,
    /// The handshake took too long.
    Timeout,
    /// The handshake failed otherwise: another version of TLS, or the caller disconnected.
    Handshake,
    /// A call had neither certificate nor token.
    NoToken,
    /// The token is malformed or incomplete.
    TokenMalformed,
    /// The algorithm of the token is not allowed, or not that of its key.
    TokenAlgorithm,
    /// The token is signed with an unknown key.
    TokenKey,
    /// The signature of the token is wrong.
    TokenSignature,
    /// The token is from another issuer.
    TokenIssuer,
    /// The token is for another audience.
    TokenAudience,
    /// The token has expired.
    TokenExpired,
    /// The token is not valid yet.
    TokenNotYetValid,
    /// The account of the token has no permissions here.
    TokenAccount,
    /// The account of the token lacks the permission for this call.
    TokenRight,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 21] = [
        Self::PlainText,
        Self::NoCertificate,
        Self::Expired,
        Self::NotYetValid,
        Self::UnknownCa,
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

    /// Label value in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PlainText => "plaintext",
            Self::NoCertificate => "no_certificate",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::UnknownCa => "unknown_ca",
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
            Self::TokenRight => "token_permission",
        }
    }

    /// Classifies a failed handshake on the listening side.
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
                _ => Self::UnknownCa,
            },
            _ => Self::Handshake,
        }
    }
}

/// Number of rejections per reason.
#[derive(Debug, Default)]
pub struct Refusals([AtomicU64; Reason::ALL.len()]);

impl Refusals {
    /// Counts one rejection.
    pub fn count(&self, reason: Reason) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of rejections so far.
    pub fn of(&self, reason: Reason) -> u64 {
        self.0[reason as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_counted_separately() {
        let refusals = Refusals::default();
        for (count, reason) in (1..).zip(Reason::ALL) {
            (0..count).for_each(|_| refusals.count(reason));
        }
        let counted: Vec<u64> = Reason::ALL.into_iter().map(|reason| refusals.of(reason)).collect();
        assert_eq!(counted, (1..=21).collect::<Vec<u64>>());
    }
}
