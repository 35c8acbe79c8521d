//! How one authority follows another, without a call that fails: it is believed by all before it signs, and the one before it is believed until
//! nobody has a certificate of it any more.
//!
//! ```text
//! Secret                settled          announced               signing            settled
//! ca.pem                A         ──>    A, B             ──>    B, A        ──>    B
//! ca.key                of A             of A                    of B               of B
//! next.key                               of B
//!                           asked,                 all workers            all workers
//!                           or A ends in a year    believe B              have certificates of B
//! ```
//!
//! `ca.pem` is what everybody is told to believe, and its first certificate is who signs. What a step rests on is in the Secret and in what
//! workers say of themselves, so that any replica goes on where another ended.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use engram_coordinator::Certified;
use engram_identity::{Authority, Error, Realm, RootId, Roots, each};

/// How long before an authority ends another one follows it.
const AHEAD: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long each step lasts at least. Replicas read the Secret every few seconds, and each must know who is believed before anybody shows a
/// certificate that rests on it.
pub(crate) const SETTLE: Duration = Duration::from_secs(20);
/// How long a worker that is not heard is waited for. One that comes back after that reads whom to believe before it asks for a certificate.
const PATIENCE: Duration = Duration::from_secs(60 * 60);
/// Workers that are named of those that are waited for.
const NAMED: usize = 5;

/// What the Secret holds.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Held {
    /// Who is believed, as PEM.
    pub certificates: String,
    /// The key of who signs.
    pub key: String,
    /// The key of who will sign next.
    pub next_key: Option<String>,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("certificates", &self.certificates).finish_non_exhaustive()
    }
}

/// The same, to sign with.
pub(crate) struct Authorities {
    held: Held,
    /// Who signs.
    pub signing: Authority,
    /// Who is believed, in their order.
    pub believed: Vec<RootId>,
    next: Option<Authority>,
}

/// How far a succession is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// There is none.
    Settled,
    /// The next one is told of, and signs nothing yet.
    Announced,
    /// It signs, and the one before is still believed.
    Signing,
}

/// A cluster whose processes have certificates.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    /// Namespace and name.
    pub cluster: String,
    /// How many workers it shall have.
    pub workers: u32,
    /// Whether somebody else signs for them.
    pub is_given: bool,
    /// What those say that are heard; `None` while nobody coordinates it here.
    pub said: Option<BTreeMap<u32, Certified>>,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing.
    Rest,
    /// Nothing yet; why, for people.
    Wait(String),
    /// This takes the place of what the Secret holds.
    Become(Held),
}

impl Held {
    /// A first authority.
    ///
    /// # Errors
    /// The machine has no randomness to give.
    pub(crate) fn create(now: SystemTime) -> Result<Self, Error> {
        let made = Authority::create(Realm::Operator, now)?;
        Ok(Self { certificates: made.certificate().to_owned(), key: made.key(), next_key: None })
    }

    /// Reads it.
    ///
    /// # Errors
    /// Something in it is damaged, or not of one another.
    pub(crate) fn open(self) -> Result<Authorities, Error> {
        let open = |key: &String| Authority::open(Realm::Operator, key, &self.certificates);
        let (signing, next) = (open(&self.key)?, self.next_key.as_ref().map(open).transpose()?);
        let believed = Roots::parse(self.certificates.as_bytes())?.ids().collect();
        Ok(Authorities { held: self, signing, believed, next })
    }
}

impl Authorities {
    /// What it was read from.
    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    /// How far a succession is.
    pub(crate) fn stage(&self) -> Stage {
        match (&self.next, self.believed.len()) {
            (Some(_), _) => Stage::Announced,
            (None, 1) => Stage::Settled,
            (None, _) => Stage::Signing,
        }
    }

    /// Says what is to be done: somebody may have `asked` for another authority, and what is was so for `since`.
    ///
    /// # Errors
    /// The machine has no randomness to give.
    pub(crate) fn step(&self, asked: bool, since: Duration, clusters: &[Told], now: SystemTime) -> Result<Step, Error> {
        let stage = self.stage();
        if stage == Stage::Settled {
            let ends_soon = self.signing.until() < now + AHEAD;
            return if asked || ends_soon { self.announce(now).map(Step::Become) } else { Ok(Step::Rest) };
        }
        let waiting = self.waiting(since < PATIENCE, clusters);
        let what = match stage {
            Stage::Announced => "to believe the next authority",
            _ => "to have certificates of the new authority",
        };
        if let Some(first) = waiting.first() {
            let named = waiting.iter().skip(1).take(NAMED - 1).fold(first.clone(), |all, next| all + ", " + next);
            let more = waiting.len().saturating_sub(NAMED);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            return Ok(Step::Wait(format!("waiting for {named}{more} {what}")));
        }
        if since < SETTLE {
            return Ok(Step::Wait("waiting for all operators to read it".into()));
        }
        Ok(Step::Become(match &self.next {
            Some(next) => Held {
                certificates: self.only(next.root()) + &self.only(self.signing.root()),
                key: next.key(),
                next_key: None,
            },
            None => Held { certificates: self.only(self.signing.root()), ..self.held.clone() },
        }))
    }

    fn announce(&self, now: SystemTime) -> Result<Held, Error> {
        let Held { certificates, key, .. } = self.held.clone();
        let next = Authority::create(Realm::Operator, now)?;
        Ok(Held { certificates: certificates + next.certificate(), key, next_key: Some(next.key()) })
    }

    /// The certificate of one of those that are believed.
    fn only(&self, root: RootId) -> String {
        let is_it = |pem: &&str| Roots::parse(pem.as_bytes()).is_ok_and(|roots| roots.ids().eq([root]));
        each(&self.held.certificates).find(is_it).map(|pem| format!("{pem}\n")).unwrap_or_default()
    }

    /// Who is not as far as the next step takes, in words.
    fn waiting(&self, is_patient: bool, clusters: &[Told]) -> Vec<String> {
        let is_ready = |cluster: &Told, said: &Certified| match &self.next {
            Some(next) => said.believed.contains(&next.root()),
            None => cluster.is_given || said.root == self.signing.root(),
        };
        let mut waiting = Vec::new();
        for cluster in clusters {
            let Some(said) = &cluster.said else {
                waiting.push(cluster.cluster.clone());
                continue;
            };
            let unheard = (0..cluster.workers).filter(|ordinal| is_patient && !said.contains_key(ordinal));
            let unready = said.iter().filter(|(_, said)| !is_ready(cluster, said)).map(|(ordinal, _)| *ordinal);
            waiting.extend(unheard.chain(unready).map(|ordinal| format!("{} worker {ordinal}", cluster.cluster)));
        }
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(said: impl IntoIterator<Item = (u32, Certified)>) -> Told {
        Told { cluster: "research/words".into(), workers: 2, is_given: false, said: Some(said.into_iter().collect()) }
    }

    fn says(authorities: &Authorities) -> Certified {
        Certified { believed: authorities.believed.clone(), root: authorities.signing.root() }
    }

    fn becomes(step: Step) -> Authorities {
        match step {
            Step::Become(held) => held.open().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn waits(step: Step) -> String {
        match step {
            Step::Wait(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_authority_signs_when_all_believe_it_and_the_one_before_goes_when_nobody_needs_it() {
        let now = SystemTime::now();
        let first = Held::create(now).unwrap().open().unwrap();
        assert_eq!(first.stage(), Stage::Settled);
        assert_eq!(first.step(false, PATIENCE, &[], now).unwrap(), Step::Rest);
        let old = says(&first);

        let announced =
            becomes(first.step(true, Duration::ZERO, &[told([(0, old.clone()), (1, old.clone())])], now).unwrap());
        assert_eq!((announced.stage(), announced.believed.len()), (Stage::Announced, 2));
        assert_eq!(announced.signing.root(), first.signing.root(), "the next one signs nothing yet");
        assert_eq!(announced.signing.certificate(), announced.held().certificates, "all of them are told of");
        let believes = says(&announced);
        let step = |clusters: &[Told], since| announced.step(false, since, clusters, now).unwrap();
        let late = PATIENCE + SETTLE;
        for (clusters, since, missing) in [
            (told([(0, believes.clone()), (1, old.clone())]), SETTLE, "research/words worker 1 to believe"),
            // One that was not heard may believe anybody; for ever nobody waits for it.
            (told([(0, believes.clone())]), SETTLE, "research/words worker 1 to believe"),
            (Told { said: None, ..told([]) }, late, "research/words to believe"),
            (told([(1, old)]), late, "research/words worker 1 to believe"),
            (told([(0, believes.clone()), (1, believes.clone())]), SETTLE / 2, "all operators"),
        ] {
            let why = waits(step(&[clusters], since));
            assert!(why.contains(missing), "{why}");
        }
        assert!(matches!(step(&[told([(0, believes.clone())])], late), Step::Become(_)));

        let signing = becomes(step(&[told([(0, believes.clone()), (1, believes.clone())])], SETTLE));
        assert_eq!(signing.stage(), Stage::Signing);
        assert_eq!(signing.believed, [announced.believed[1], announced.believed[0]], "who signs is the first");
        assert_eq!(signing.signing.root(), announced.believed[1]);
        assert_eq!(signing.held().next_key, None);
        let new = says(&signing);
        let step = |clusters: &[Told]| signing.step(true, SETTLE, clusters, now).unwrap();
        let both = told([(0, new.clone()), (1, believes)]);
        assert!(
            waits(step(std::slice::from_ref(&both))).contains("worker 1 to have certificates of the new authority")
        );
        let given = Told { is_given: true, ..both };
        assert!(matches!(step(&[given]), Step::Become(_)), "somebody else signs for them");

        let settled = becomes(step(&[told([(0, new.clone()), (1, new)])]));
        assert_eq!((settled.stage(), settled.signing.root()), (Stage::Settled, signing.signing.root()));
        assert_eq!(settled.believed, [signing.signing.root()]);
    }

    #[test]
    fn an_authority_that_is_about_to_end_is_followed_by_itself() {
        let now = SystemTime::now();
        let held = Held::create(now).unwrap().open().unwrap();
        let end = held.signing.until();
        assert_eq!(held.step(false, PATIENCE, &[], end - AHEAD - SETTLE).unwrap(), Step::Rest);
        let announced = becomes(held.step(false, PATIENCE, &[], end - AHEAD + SETTLE).unwrap());
        assert_eq!(announced.stage(), Stage::Announced);
    }

    #[test]
    fn no_more_than_a_few_are_named() {
        let now = SystemTime::now();
        let first = Held::create(now).unwrap().open().unwrap();
        let announced = becomes(first.step(true, SETTLE, &[], now).unwrap());
        let many = Told { workers: 9, ..told([]) };
        let why = waits(announced.step(false, SETTLE, &[many], now).unwrap());
        assert!(why.ends_with("research/words worker 4 and 4 more to believe the next authority"), "{why}");
    }
}
