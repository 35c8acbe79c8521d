//! Random walks over the model: deeper than a search, but not exhaustive. A seed determines its walk.

use crate::bounds::Bounds;
use crate::recovery::Recovery;
use crate::step::Step;
use stateright::{Expectation, Model};
use std::collections::BTreeSet;
use std::mem::discriminant;

/// One in this many steps is a disturbance, where both kinds are possible.
const DISTURBING_ONE_IN: u64 = 5;

/// A property violated by a walk.
pub(crate) struct Violation {
    pub(crate) property: &'static str,
    pub(crate) seed: u64,
    pub(crate) trace: Vec<Step>,
}

/// Result of walks.
#[derive(Default)]
pub(crate) struct WalkResult {
    pub(crate) steps: u64,
    pub(crate) recovered: u64,
    /// `sometimes` properties that were reached.
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
    /// Draws a step: each kind is equally likely, so that kinds with many variants, like promotions, do not dominate.
    fn step(&mut self, among: &[Step]) -> Option<Step> {
        let mut kinds: Vec<_> = among.iter().map(discriminant).collect();
        kinds.dedup();
        let kind = *kinds.get(self.below(kinds.len().max(1)))?;
        let of_kind: Vec<_> = among.iter().filter(|step| discriminant(*step) == kind).collect();
        Some(of_kind[self.below(of_kind.len())].clone())
    }
}

/// Whether a step is drawn less often, so that walks make progress. The node `deaf` receives little and falls behind.
fn disturbs(step: &Step, deaf: u32) -> bool {
    match step {
        Step::Deliver(envelope) => envelope.to.0 == deaf,
        Step::Learn(me, _) | Step::Flush(me, _) => me.0 == deaf,
        Step::Write(..) | Step::Keep(_) | Step::Wrote(_) | Step::Apply(..) | Step::Observe(_) => false,
        Step::Trust(..) | Step::Grant(..) | Step::Read(_) | Step::Restart(_) | Step::Release(_) => false,
        Step::Leaving(_, leavers) => !leavers.is_empty(),
        _ => true,
    }
}

/// Walks at most `depth` steps with every seed, until one violates a property.
pub(crate) fn walk(bounds: &Bounds, seeds: impl IntoIterator<Item = u64>, depth: usize) -> WalkResult {
    let properties = bounds.properties();
    let start = bounds.init_states().remove(0);
    let mut result = WalkResult::default();
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
            result.steps += 1;
            for property in &properties {
                let holds = (property.condition)(bounds, &world);
                if property.expectation == Expectation::Always && !holds {
                    result.violation = Some(Violation { property: property.name, seed, trace });
                    return result;
                }
                if property.expectation == Expectation::Sometimes && holds {
                    result.reached.insert(property.name);
                }
            }
        }
        let recovery = bounds.recover(world);
        result.recovered += u64::from(recovery == Recovery::Recovered);
        if recovery == Recovery::Stuck {
            result.violation = Some(Violation { property: "the partition recovers when faults cease", seed, trace });
            return result;
        }
    }
    result
}
