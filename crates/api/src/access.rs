//! Who may do what with a cluster: the rights of ServiceAccounts, as `spec.access` gives them.

use crate::kubernetes::{Access, Right};
use std::collections::BTreeMap;
use std::fmt;

/// The rights of each account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessList(BTreeMap<(String, String), Vec<Right>>);

/// What a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Some right, whichever.
    Any,
    /// This one, or [`Right::Admin`].
    One(Right),
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any right"),
            Self::One(right) => write!(f, "the right {right}"),
        }
    }
}

/// Why an account may not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It has no rights at all.
    Account {
        /// What would do.
        needed: Need,
    },
    /// It has others.
    Right {
        /// What would do.
        needed: Need,
        /// What it has.
        has: Vec<Right>,
    },
}

impl fmt::Display for Missing {
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

impl std::error::Error for Missing {}

impl AccessList {
    /// The rights that `entries` give together; an entry without a namespace means an account of `namespace`.
    pub fn new(entries: impl IntoIterator<Item = Access>, namespace: &str) -> Self {
        let mut list = Self::default();
        for Access { service_account, namespace: of, rights } in entries {
            let account = (of.unwrap_or_else(|| namespace.to_owned()), service_account);
            let known = list.0.entry(account).or_default();
            let new: Vec<Right> = rights.into_iter().filter(|right| !known.contains(right)).collect();
            known.extend(new);
        }
        list.0.retain(|_, rights| !rights.is_empty());
        list
    }

    /// The list, as [`Self::parse`] reads it.
    pub fn entries(&self) -> Vec<Access> {
        let entry = |((namespace, name), rights): (&(String, String), &Vec<Right>)| Access {
            service_account: name.clone(),
            namespace: Some(namespace.clone()),
            rights: rights.clone(),
        };
        self.0.iter().map(entry).collect()
    }

    /// Reads a list of entries as JSON, each with its namespace.
    ///
    /// # Errors
    /// It is something else, with the place.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let entries: Vec<Access> = serde_json::from_slice(json).map_err(|error| format!("access: {error}"))?;
        match entries.iter().find(|entry| entry.namespace.is_none()) {
            Some(entry) => Err(format!("access: {}: namespace is missing", entry.service_account)),
            None => Ok(Self::new(entries, "")),
        }
    }

    /// Checks that an account may do what takes `needed`.
    ///
    /// # Errors
    /// What it lacks.
    pub fn check(&self, namespace: &str, name: &str, needed: Need) -> Result<(), Missing> {
        let Some(has) = self.0.get(&(namespace.to_owned(), name.to_owned())) else {
            return Err(Missing::Account { needed });
        };
        let may = match needed {
            Need::Any => true,
            Need::One(right) => has.contains(&right) || has.contains(&Right::Admin),
        };
        if may { Ok(()) } else { Err(Missing::Right { needed, has: has.clone() }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Word as _;

    fn entry(name: &str, namespace: Option<&str>, rights: &[Right]) -> Access {
        Access { service_account: name.into(), namespace: namespace.map(Into::into), rights: rights.to_vec() }
    }

    #[test]
    fn a_right_is_for_what_it_says_and_admin_for_everything() {
        for has in Right::ALL {
            let list = AccessList::new([entry("trainer", None, &[*has])], "research");
            for needed in Right::ALL {
                let may = list.check("research", "trainer", Need::One(*needed)).is_ok();
                assert_eq!(may, has == needed || *has == Right::Admin, "{has} for {needed}");
            }
            assert_eq!(list.check("research", "trainer", Need::Any), Ok(()));
        }
    }

    #[test]
    fn accounts_of_other_names_and_namespaces_have_nothing() {
        let list = AccessList::new(
            [
                entry("trainer", None, &[Right::Read]),
                entry("trainer", Some("elsewhere"), &[Right::Decay]),
                entry("trainer", None, &[Right::Read, Right::Reinforce]),
                entry("idle", None, &[]),
            ],
            "research",
        );
        let why = |namespace, name, right| list.check(namespace, name, Need::One(right)).unwrap_err().to_string();
        assert_eq!(why("research", "trainer", Right::Decay), "lacks the right Decay; it has: Read, Reinforce");
        assert!(why("research", "idle", Right::Read).contains("needed: the right Read, by spec.access"));
        assert!(list.check("elsewhere", "trainer", Need::One(Right::Decay)).is_ok());
        assert!(why("elsewhere", "trainer", Right::Read).contains("it has: Decay"));
        assert!(list.check("", "trainer", Need::Any).is_err());
    }

    #[test]
    fn a_list_survives_its_file_and_a_wrong_one_is_refused_by_name() {
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
