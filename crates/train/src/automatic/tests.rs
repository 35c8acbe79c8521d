use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use crate::dataset::Dataset;
use crate::job::tests::job;
use crate::job::{Job, Rows};
use crate::reduce::sum_gradients;
use crate::{Alone, Checkpoint, LocalGradient, LocalStep, StepOutcome, SumError};

/// Traffic of two workers whose factors are a tenth of the gradient.
const TWO: Traffic = Traffic { members: 2, parameters: 1_000, factors: 100 };
const MILLISECOND: u64 = 1_000_000;

/// Times of a step of 10 ms of computation with whole sums that take so many milliseconds, at a level.
fn times_at(whole_milliseconds: f64, level: CompressionLevel, traffic: Traffic) -> StepTimes {
    let bytes = |level| traffic.bytes(level) as f64;
    let part = bytes(level) / bytes(CompressionLevel::None);
    let reduction = (whole_milliseconds * part * MILLISECOND as f64) as u64;
    StepTimes { step: 10 * MILLISECOND + reduction, reduction }
}

/// Observes windows of steps whose whole sums would take so long; returns the levels after each.
fn levels(state: &mut AutomaticCompression, traffic: Traffic, whole_milliseconds: &[f64]) -> Vec<CompressionLevel> {
    let window = |whole: &f64| {
        for _ in 0..WINDOW_STEPS {
            state.observe(times_at(*whole, state.level, traffic), traffic, LOW_RANK_AFTER);
        }
        state.level
    };
    whole_milliseconds.iter().map(window).collect()
}

#[test]
fn level_rises_one_by_one_while_reductions_are_slow_and_falls_once_lower_levels_are_fast_enough() {
    use CompressionLevel::{Bf16, None, PowerSgd};
    let mut state = AutomaticCompression::default();
    // 50 % of the step, then 33 %, then 9 %, which is no reason to go back.
    assert_eq!(levels(&mut state, TWO, &[10.0; 5]), [Bf16, PowerSgd, PowerSgd, PowerSgd, PowerSgd]);
    // With Bf16 it would be 9 %, whole 17 %: not below 10 %.
    assert_eq!(levels(&mut state, TWO, &[2.0; 4]), [Bf16; 4]);
    // 17 % with whole sums is between both limits.
    assert_eq!(levels(&mut state, TWO, &[1.0, 2.0, 2.0]), [None; 3]);
    assert_eq!(levels(&mut state, TWO, &[2.4, 2.6]), [None, Bf16], "19 %, then 21 %");
}

#[test]
fn no_constant_speed_switches_back_and_forth() {
    for members in [1, 2, 3, 4, 9] {
        for factors in [10, 300, 900, 1_000] {
            let traffic = Traffic { members, parameters: 1_000, factors };
            for whole in (0..60).map(|it| f64::from(it) * 0.25) {
                for level in [CompressionLevel::None, CompressionLevel::Bf16, CompressionLevel::PowerSgd] {
                    let mut state = AutomaticCompression { level, ..AutomaticCompression::default() };
                    let found = levels(&mut state, traffic, &[whole; 8]);
                    let is_settled = found[3..].iter().all(|level| *level == found[3]);
                    assert!(is_settled, "{members} members, {factors} factors, {whole} ms from {level:?}: {found:?}");
                }
            }
        }
    }
}

#[test]
fn single_slow_steps_do_not_decide() {
    let mut state = AutomaticCompression::default();
    let slow = StepTimes { step: 20 * MILLISECOND, reduction: 15 * MILLISECOND };
    let fast = StepTimes { step: 10 * MILLISECOND, reduction: 0 };
    for step in 1..=2 * WINDOW_STEPS {
        let times = if step % 10 == 0 { slow } else { fast };
        assert_eq!(state.observe(times, TWO, LOW_RANK_AFTER), None);
    }
    assert_eq!(state, AutomaticCompression::default(), "the window begins again");
    let switches: Vec<u32> =
        (1..=WINDOW_STEPS).filter(|_| state.observe(slow, TWO, LOW_RANK_AFTER).is_some()).collect();
    assert_eq!(switches, [WINDOW_STEPS], "at the end of the window");
}

#[test]
fn approximation_by_low_rank_waits_for_the_first_updates() {
    let mut state = AutomaticCompression { level: CompressionLevel::Bf16, ..AutomaticCompression::default() };
    let mut window = |updates| {
        for _ in 0..WINDOW_STEPS {
            state.observe(times_at(10.0, CompressionLevel::Bf16, TWO), TWO, updates);
        }
        state.level
    };
    assert_eq!(window(LOW_RANK_AFTER - 1), CompressionLevel::Bf16);
    assert_eq!(window(LOW_RANK_AFTER), CompressionLevel::PowerSgd);
}

#[test]
fn levels_that_send_no_less_are_left_out() {
    use CompressionLevel::{Bf16, None, PowerSgd};
    assert_eq!(TWO.levels(), [None, Bf16, PowerSgd]);
    assert_eq!(Traffic { members: 3, ..TWO }.levels(), [None, Bf16, PowerSgd]);
    assert_eq!(Traffic { members: 4, ..TWO }.levels(), [None, PowerSgd], "16-bit values go to each of three others");
    assert_eq!(Traffic { factors: 1_000, ..TWO }.levels(), [None, Bf16], "a model without large matrices");
    assert_eq!(Traffic { members: 4, factors: 1_000, ..TWO }.levels(), [None]);
}

#[test]
fn waits_for_slower_members_and_steps_without_times_do_not_count() {
    let member = |step, reduction| StepTimes { step, reduction };
    let (slow, fast) = (member(100, 5), member(100, 60));
    assert_eq!(StepTimes::of_group(&[fast, slow]), Some(slow));
    assert_eq!(StepTimes::of_group(&[fast, StepTimes::default()]), None);
    assert_eq!(StepTimes::of_group(&[]), None);
}

#[test]
fn switches_say_why() {
    let up =
        CompressionSwitch { from: CompressionLevel::None, to: CompressionLevel::Bf16, share: 0.314, expected: None };
    let text =
        "gradient compression switched from None to Bf16: reductions took 31.4 % of the last 100 steps, more than 20 %";
    assert_eq!(up.to_string(), text);
    let down = CompressionSwitch {
        from: CompressionLevel::Bf16,
        to: CompressionLevel::None,
        share: 0.03,
        expected: Some(0.06),
    };
    let text = "gradient compression switched from Bf16 to None: reductions took 3.0 % of the last 100 steps, \
        and are expected to take 6.0 % with None, less than 10 %";
    assert_eq!(down.to_string(), text);
}

/// Members of a group that train in one thread.
struct Group {
    job: Job,
    data: Arc<Dataset>,
    members: Vec<Trainer>,
}

impl Group {
    fn new(members: usize, kind: &str) -> Self {
        let compression = serde_json::json!({ "kind": kind });
        let job = job(&[("/steps", 2_000.into()), ("/compression", compression)]).unwrap();
        let members = (0..members).map(|_| job.trainer().unwrap()).collect();
        Self { data: job.dataset().unwrap(), job, members }
    }

    fn level(&self) -> CompressionLevel {
        self.members[0].automatic_compression().unwrap().level
    }

    /// Returns the times of a step whose whole sums would take so long. The first member is the slowest, for which the others wait.
    fn times(&self, whole_milliseconds: f64) -> Vec<StepTimes> {
        let times = times_at(whole_milliseconds, self.level(), self.traffic());
        let wait = |rank: u64| StepTimes { reduction: times.reduction + rank.min(1) * MILLISECOND, ..times };
        (0..self.members.len() as u64).map(wait).collect()
    }

    fn traffic(&self) -> Traffic {
        let (members, parameters) = (self.members.len() as u64, self.members[0].model().parameter_count() as u64);
        Traffic { members, parameters, factors: self.members[0].factors.as_ref().unwrap().plan.sent_elements() as u64 }
    }

    fn prepare(&mut self) -> Vec<LocalStep> {
        let count = self.members.len();
        let prepare = |(rank, trainer): (usize, &mut Trainer)| {
            let (rows, order) = self.job.part(rank, count);
            let samples = self.job.samples(0, &self.data, trainer.counters().step, &rows);
            let batch = Rows::of(trainer.model(), &self.data, &samples[0]);
            trainer.prepare(&[batch.labeled(rows.start).unwrap()], &order, &mut Alone).unwrap()
        };
        self.members.iter_mut().enumerate().map(prepare).collect()
    }

    /// Commits the sum of `locals` on all members, which must agree.
    fn commit(&mut self, locals: Vec<LocalStep>, times: &[StepTimes]) -> Option<CompressionSwitch> {
        let gradients: Vec<&LocalGradient> = locals.iter().map(|it| &it.gradient).collect();
        let sum = sum_gradients(&gradients).unwrap();
        let commit = |(trainer, local): (&mut Trainer, LocalStep)| {
            let report = trainer.commit::<SumError>(local, &sum).unwrap();
            assert_eq!(report.outcome, StepOutcome::Applied);
            (trainer.observe_times(times), trainer.digest())
        };
        let outcomes: Vec<_> = self.members.iter_mut().zip(locals).map(commit).collect();
        let step = self.members[0].counters().step;
        assert!(outcomes.iter().all(|it| *it == outcomes[0]), "step {step}: {outcomes:?}");
        outcomes[0].0
    }

    /// Trains so many steps; returns the switches with the number of the step.
    fn train(&mut self, steps: u32, whole_milliseconds: f64) -> Vec<(u64, CompressionLevel)> {
        let mut switches = Vec::new();
        for _ in 0..steps {
            let (level, times, locals) = (self.level(), self.times(whole_milliseconds), self.prepare());
            assert!(locals.iter().all(|it| level_of(&it.gradient) == level), "{level:?}");
            let switch = self.commit(locals, &times);
            switches.extend(switch.map(|it| (self.members[0].counters().step, it.to)));
        }
        switches
    }
}

fn level_of(gradient: &LocalGradient) -> CompressionLevel {
    match gradient {
        LocalGradient::Sum(_) => CompressionLevel::None,
        LocalGradient::Compressed(_) => CompressionLevel::Bf16,
        LocalGradient::LowRank(_) => CompressionLevel::PowerSgd,
        other => panic!("{other:?}"),
    }
}

fn has_lost(trainer: &Trainer) -> bool {
    trainer.feedback.iter().any(|lost| *lost != 0.0)
}

#[test]
fn members_switch_at_the_same_steps_and_keep_the_same_bits() {
    let mut group = Group::new(3, "Automatic");
    assert_eq!(group.train(1_200, 20.0), [(100, CompressionLevel::Bf16), (1_000, CompressionLevel::PowerSgd)]);
    assert!(group.members.iter().all(has_lost));
    assert_eq!(group.train(200, 0.1), [(1_300, CompressionLevel::Bf16), (1_400, CompressionLevel::None)]);
    assert!(group.members.iter().all(|it| has_lost(it) && it.is_flushing()));
    group.train(1, 0.1);
    assert!(group.members.iter().all(|it| !has_lost(it) && !it.is_flushing()), "the first whole sum carried it");
}

#[test]
fn first_whole_sum_carries_what_was_lost_once() {
    let mut group = Group::new(2, "Automatic");
    group.train(150, 20.0);
    group.train(50, 0.1);
    assert_eq!(group.train(100, 0.1), [(300, CompressionLevel::None)]);
    let sums = |locals: Vec<LocalStep>| -> Vec<Vec<f32>> {
        let values = |local: LocalStep| match local.gradient {
            LocalGradient::Sum(sum) => sum.values,
            other => panic!("{other:?}"),
        };
        locals.into_iter().map(values).collect()
    };
    let flushed = sums(group.prepare());
    let pending = group.members[0].automatic;
    group.members.iter_mut().for_each(|it| it.automatic.as_mut().unwrap().is_flushing = false);
    let plain = sums(group.prepare());
    for (rank, member) in group.members.iter_mut().enumerate() {
        let expected: Vec<f32> = plain[rank].iter().zip(&member.feedback).map(|(value, lost)| value + lost).collect();
        assert!(has_lost(member) && flushed[rank] == expected, "rank {rank}");
        member.automatic = pending;
    }
}

#[test]
fn step_without_effect_keeps_what_was_lost() {
    let mut group = Group::new(1, "Automatic");
    let trainer = &mut group.members[0];
    trainer.feedback.fill(0.5);
    trainer.automatic.as_mut().unwrap().is_flushing = true;
    let (order, step) = (group.job.part(0, 1).1, trainer.counters().step);
    let (report, _) = trainer.step(&[], &order, &mut Alone).unwrap();
    assert_eq!((report.step, report.outcome), (step, StepOutcome::SkippedEmpty));
    assert!(trainer.is_flushing() && trainer.feedback.iter().all(|lost| *lost == 0.5));
}

#[test]
fn death_in_the_step_of_a_switch_decides_once_and_a_joiner_agrees() {
    let mut group = Group::new(3, "Automatic");
    group.train(WINDOW_STEPS - 1, 20.0);
    let (mut kept, mut times) = (group.prepare(), group.times(20.0));
    // The last member dies before its sum is reduced: the others reduce what they kept, with the times of the same step.
    kept.pop();
    times.pop();
    group.members.pop();
    let switch = group.commit(kept, &times).unwrap();
    assert_eq!((switch.from, switch.to), (CompressionLevel::None, CompressionLevel::Bf16));
    let state = *group.members[0].automatic_compression().unwrap();
    assert_eq!(state, AutomaticCompression { level: CompressionLevel::Bf16, ..AutomaticCompression::default() });
    // No member has times of the first step of a generation.
    let unmeasured = vec![StepTimes::default(); 2];
    let locals = group.prepare();
    assert_eq!(group.commit(locals, &unmeasured), None);
    group.train(40, 20.0);
    let received = group.members[1].checkpoint(2, 2, BTreeMap::new()).unwrap();
    let mut joiner = Trainer::restore(&group.job.spec, &received).unwrap().0;
    joiner.forget_feedback();
    group.members.push(joiner);
    assert_eq!(group.members[2].automatic_compression().unwrap().steps, 40);
    group.train(59, 0.1);
    assert_eq!(group.level(), CompressionLevel::Bf16);
    let switches = group.train(1 + WINDOW_STEPS, 0.1);
    assert_eq!(switches.last().map(|it| it.1), Some(CompressionLevel::None), "{switches:?}");
    group.train(2, 0.1);
}

#[test]
fn restored_group_continues_at_its_level_and_within_the_window() {
    let whole = |step: u64| if step < 150 { 20.0 } else { 0.1 };
    let train = |group: &mut Group, until: u64| {
        let mut switches = Vec::new();
        while group.members[0].counters().step < until {
            switches.extend(group.train(1, whole(group.members[0].counters().step)));
        }
        switches
    };
    let mut undisturbed = Group::new(2, "Automatic");
    let switches = train(&mut undisturbed, 320);
    assert_eq!(switches, [(100, CompressionLevel::Bf16), (300, CompressionLevel::None)]);
    // Within the first window, with a level and what it lost, and before what was lost is sent.
    for at in [60, 170, 300] {
        let mut group = Group::new(2, "Automatic");
        train(&mut group, at);
        let save = |trainer: &Trainer| trainer.checkpoint(1, 2, BTreeMap::new()).unwrap();
        let saved: Vec<Checkpoint> = group.members.iter().map(save).collect();
        let digest = group.members[0].digest();
        group.members = saved.iter().map(|it| Trainer::restore(&group.job.spec, it).unwrap().0).collect();
        assert_eq!(group.members[0].digest(), digest, "step {at}");
        let remaining: Vec<_> = switches.iter().copied().filter(|(step, _)| *step > at).collect();
        assert_eq!(train(&mut group, 320), remaining, "step {at}");
        assert_eq!(group.members[0].digest(), undisturbed.members[0].digest(), "step {at}");
    }
}

#[test]
fn checkpoint_of_another_compression_leaves_nothing_behind() {
    let mut fixed = Group::new(1, "Bf16");
    let locals = fixed.prepare();
    fixed.commit(locals, &[]);
    let saved = fixed.members[0].checkpoint(1, 1, BTreeMap::new()).unwrap();
    let mut group = Group::new(1, "Automatic");
    group.members = vec![Trainer::restore(&group.job.spec, &saved).unwrap().0];
    assert!(has_lost(&group.members[0]));
    group.train(1, 0.1);
    assert!(!has_lost(&group.members[0]));
}
