//! Random walks over the model: deeper than a search, without its guarantee. A walk is a function of its seed alone.

use crate::bounds::Bounds;
use crate::heal::Healing;
use crate::step::Step;
use stateright::{Expectation, Model};
use std::collections::BTreeSet;
use std::mem::discriminant;

/// One step in this many disturbs, where both kinds are possible.
const DISTURBING_ONE_IN: u64 = 5;

/// A property that a walk violated.
pub(crate) struct Violation {
    pub(crate) property: &'static str,
    pub(crate) seed: u64,
    pub(crate) trace: Vec<Step>,
}

/// What walks have seen.
#[derive(Default)]
pub(crate) struct Walked {
    pub(crate) steps: u64,
    pub(crate) healed: u64,
    /// Properties of the kind `sometimes` that were reached.
    pub(crate) reached: BTreeSet<&'static str>,
    pub(crate) violation: Option<Violation>,
}

/// Splitmix64.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

impl Draw {
    /// One of the steps; neighbours of one kind together are as likely as one of another kind, so that what comes in many
    /// variants, like promotions, crowds out nothing.
    fn step(&mut self, among: &[Step]) -> Option<Step> {
        let mut kinds: Vec<_> = among.iter().map(discriminant).collect();
        kinds.dedup();
        let kind = *kinds.get(self.below(kinds.len().max(1)))?;
        let of_kind: Vec<_> = among.iter().filter(|step| discriminant(*step) == kind).collect();
        Some(of_kind[self.below(of_kind.len())].clone())
    }
}

/// What is drawn less often, so that walks get somewhere. Who is `deaf` hears little, and stays behind.
fn disturbs(step: &Step, deaf: u32) -> bool {
    match step {
        Step::Deliver(envelope) => envelope.to.0 == deaf,
        Step::Learn(me, _) | Step::Flush(me, _) => me.0 == deaf,
        Step::Write(..) | Step::Keep(_) | Step::Wrote(_) | Step::Apply(..) | Step::Hear(_) => false,
        Step::Trust(..) | Step::Grant(..) | Step::Read(_) | Step::Restart(_) | Step::Release(_) => false,
        Step::Leaving(_, leavers) => !leavers.is_empty(),
        _ => true,
    }
}

/// Walks of at most `depth` steps with every seed, until one violates a property.
pub(crate) fn walk(bounds: &Bounds, seeds: impl IntoIterator<Item = u64>, depth: usize) -> Walked {
    let properties = bounds.properties();
    let start = bounds.init_states().remove(0);
    let mut walked = Walked::default();
    let mut options = Vec::new();
    for seed in seeds {
        let mut draw = Draw(seed);
        let mut world = start.clone();
        let mut trace = Vec::new();
        let deaf = draw.below(bounds.nodes as usize + 1) as u32;
        for _ in 0..depth {
            options.clear();
            bounds.actions(&world, &mut options);
            options.sort_by_key(|step| disturbs(step, deaf));
            let quiet = options.partition_point(|step| !disturbs(step, deaf));
            let calm = quiet == options.len() || quiet > 0 && draw.below(DISTURBING_ONE_IN as usize) > 0;
            let Some(step) = draw.step(if calm { &options[..quiet] } else { &options[quiet..] }) else { break };
            let Some(next) = bounds.next_state(&world, step.clone()) else { continue };
            world = next;
            trace.push(step);
            walked.steps += 1;
            for property in &properties {
                let holds = (property.condition)(bounds, &world);
                if property.expectation == Expectation::Always && !holds {
                    walked.violation = Some(Violation { property: property.name, seed, trace });
                    return walked;
                }
                if property.expectation == Expectation::Sometimes && holds {
                    walked.reached.insert(property.name);
                }
            }
        }
        let healing = bounds.heal(world);
        walked.healed += u64::from(healing == Healing::Healed);
        if healing == Healing::Stuck {
            walked.violation = Some(Violation { property: "it heals when faults cease", seed, trace });
            return walked;
        }
    }
    walked
}
