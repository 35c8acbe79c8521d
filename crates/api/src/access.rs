//! Authorization: the rights of ServiceAccounts from `spec.access`.

use crate::kubernetes::{Access, Right};
use std::collections::BTreeMap;
use std::fmt;

/// The rights of each account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessList(BTreeMap<(String, String), Vec<Right>>);

/// Right that a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredRight {
    /// Any right.
    Any,
    /// This right, or [`Right::Admin`].
    One(Right),
    /// A right to change memories: [`Right::Reinforce`], [`Right::Decay`], or [`Right::Admin`].
    Write,
}

impl fmt::Display for RequiredRight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any right"),
            Self::One(right) => write!(f, "the right {right}"),
            Self::Write => write!(f, "the right {} or {}", Right::Reinforce, Right::Decay),
        }
    }
}

/// Why a call is not authorized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessDenied {
    /// The account has no rights.
    Account {
        /// Required right.
        needed: RequiredRight,
    },
    /// The account lacks the required right.
    Right {
        /// Required right.
        needed: RequiredRight,
        /// Rights of the account.
        has: Vec<Right>,
    },
}

impl fmt::Display for AccessDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Account { needed } => {
                write!(f, "has no rights here; needed: {needed}, by spec.access of the LearnerCluster")
            }
            Self::Right { needed, has } => {
                let has: Vec<String> = has.iter().map(ToString::to_string).collect();
                write!(f, "lacks {needed}; it has: {}", has.join(", "))
            }
        }
    }
}

impl std::error::Error for AccessDenied {}

impl AccessList {
    /// Merges the rights of `entries`; an entry without a namespace means an account in `namespace`.
    pub fn new(entries: impl IntoIterator<Item = Access>, namespace: &str) -> Self {
        let mut list = Self::default();
        for Access { service_account, namespace: of, rights } in entries {
            let account = (of.unwrap_or_else(|| namespace.to_owned()), service_account);
            let granted = list.0.entry(account).or_default();
            let new: Vec<Right> = rights.into_iter().filter(|right| !granted.contains(right)).collect();
            granted.extend(new);
        }
        list.0.retain(|_, rights| !rights.is_empty());
        list
    }

    /// Returns the list in the form that [`Self::parse`] reads.
    pub fn entries(&self) -> Vec<Access> {
        let entry = |((namespace, name), rights): (&(String, String), &Vec<Right>)| Access {
            service_account: name.clone(),
            namespace: Some(namespace.clone()),
            rights: rights.clone(),
        };
        self.0.iter().map(entry).collect()
    }

    /// Parses a JSON list of entries, each with a namespace.
    ///
    /// # Errors
    /// Fails on invalid entries, with their position.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let entries: Vec<Access> = serde_json::from_slice(json).map_err(|error| format!("access: {error}"))?;
        match entries.iter().find(|entry| entry.namespace.is_none()) {
            Some(entry) => Err(format!("access: {}: namespace is missing", entry.service_account)),
            None => Ok(Self::new(entries, "")),
        }
    }

    /// Checks that an account has the right `needed`.
    ///
    /// # Errors
    /// Returns the missing right.
    pub fn check(&self, namespace: &str, name: &str, needed: RequiredRight) -> Result<(), AccessDenied> {
        let Some(has) = self.0.get(&(namespace.to_owned(), name.to_owned())) else {
            return Err(AccessDenied::Account { needed });
        };
        let may = match needed {
            RequiredRight::Any => true,
            RequiredRight::One(right) => has.contains(&right) || has.contains(&Right::Admin),
            RequiredRight::Write => has.iter().any(|right| *right != Right::Read),
        };
        if may { Ok(()) } else { Err(AccessDenied::Right { needed, has: has.clone() }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ManifestEnum as _;

    fn entry(name: &str, namespace: Option<&str>, rights: &[Right]) -> Access {
        Access { service_account: name.into(), namespace: namespace.map(Into::into), rights: rights.to_vec() }
    }

    #[test]
    fn a_right_allows_its_calls_and_admin_allows_all() {
        for has in Right::ALL {
            let list = AccessList::new([entry("trainer", None, &[*has])], "research");
            for needed in Right::ALL {
                let may = list.check("research", "trainer", RequiredRight::One(*needed)).is_ok();
                assert_eq!(may, has == needed || *has == Right::Admin, "{has} for {needed}");
            }
            assert_eq!(list.check("research", "trainer", RequiredRight::Any), Ok(()));
            let may_write = list.check("research", "trainer", RequiredRight::Write).is_ok();
            assert_eq!(may_write, *has != Right::Read, "{has} to write");
        }
    }

    #[test]
    fn accounts_of_other_names_and_namespaces_have_no_rights() {
        let list = AccessList::new(
            [
                entry("trainer", None, &[Right::Read]),
                entry("trainer", Some("elsewhere"), &[Right::Decay]),
                entry("trainer", None, &[Right::Read, Right::Reinforce]),
                entry("idle", None, &[]),
            ],
            "research",
        );
        let why =
            |namespace, name, right| list.check(namespace, name, RequiredRight::One(right)).unwrap_err().to_string();
        assert_eq!(why("research", "trainer", Right::Decay), "lacks the right Decay; it has: Read, Reinforce");
        assert!(why("research", "idle", Right::Read).contains("needed: the right Read, by spec.access"));
        assert!(list.check("elsewhere", "trainer", RequiredRight::One(Right::Decay)).is_ok());
        assert!(why("elsewhere", "trainer", Right::Read).contains("it has: Decay"));
        assert!(list.check("", "trainer", RequiredRight::Any).is_err());
    }

    #[test]
    fn a_list_round_trips_and_an_invalid_one_is_rejected() {
        let list = AccessList::new([entry("trainer", None, &[Right::Read])], "research");
        let json = serde_json::to_vec(&list.entries()).unwrap();
        assert_eq!(AccessList::parse(&json), Ok(list));
        for (wrong, names) in [
            (r#"[{"serviceAccount":"a","namespace":"b","rights":["Rede"]}]"#, "Rede"),
            (r#"[{"serviceAccount":"a","rights":["Read"]}]"#, "namespace"),
            (r#"[{"account":"a","namespace":"b","rights":[]}]"#, "account"),
            ("{}", "access"),
        ] {
            assert!(AccessList::parse(wrong.as_bytes()).unwrap_err().contains(names), "{wrong}");
        }
    }
}
