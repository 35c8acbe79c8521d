//! The AWS environment variables of this process.

use crate::Error;
use crate::endpoint::Endpoint;
use crate::options::{check_credential, check_region};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use std::str::FromStr as _;

/// Both are credentials.
const KEY_VARIABLES: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
/// Each is a role.
const ROLE_VARIABLES: [&str; 3] =
    ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];
/// What the client of the storage takes from the environment; others could replace an endpoint that was checked.
const CREDENTIAL_VARIABLES: [&str; 10] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
];
/// Endpoints of roles.
const URI_VARIABLES: [&str; 2] = ["AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS"];
/// The first that is set is used.
const ENDPOINT_VARIABLES: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
const REGION_VARIABLES: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// Non-empty `AWS_` variables.
pub(crate) struct Environment(Vec<(String, String)>);

impl Environment {
    pub(crate) fn of_process() -> Self {
        let variables = std::env::vars_os();
        Self::new(variables.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))))
    }

    pub(crate) fn new(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let is_set = |(name, value): &(String, String)| name.starts_with("AWS_") && !value.is_empty();
        Self(variables.into_iter().filter(is_set).collect())
    }

    fn get(&self, variable: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == variable).map(|(_, value)| value.as_str())
    }

    fn first(&self, variables: [&'static str; 2]) -> Option<(&'static str, &str)> {
        variables.into_iter().find_map(|variable| Some((variable, self.get(variable)?)))
    }

    pub(crate) fn has_credentials(&self) -> bool {
        let is_set = |variable: &str| self.get(variable).is_some();
        KEY_VARIABLES.into_iter().all(is_set) || ROLE_VARIABLES.into_iter().any(is_set)
    }

    pub(crate) fn endpoint(&self) -> Result<Option<Endpoint>, Error> {
        self.first(ENDPOINT_VARIABLES).map(|(variable, text)| Endpoint::parse(variable, text)).transpose()
    }

    pub(crate) fn region(&self) -> Result<Option<&str>, Error> {
        let Some((variable, region)) = self.first(REGION_VARIABLES) else { return Ok(None) };
        check_region(variable, region).map(|()| Some(region))
    }

    /// Returns a builder with the credentials or the role of the environment.
    pub(crate) fn builder(&self) -> Result<AmazonS3Builder, Error> {
        let mut builder = AmazonS3Builder::new();
        for (name, value) in self.0.iter().filter(|(name, _)| CREDENTIAL_VARIABLES.contains(&name.as_str())) {
            let Ok(key) = AmazonS3ConfigKey::from_str(&name.to_ascii_lowercase()) else { continue };
            check_credential(name, value)?;
            if URI_VARIABLES.contains(&name.as_str()) && value.parse::<hyper::Uri>().is_err() {
                return Err(Error::Settings { what: format!("{name} is {value:?}; allowed: a URI") });
            }
            builder = builder.with_config(key, value);
        }
        Ok(builder)
    }
}
