//! Decides which stage starts next. Pure: starting stages and waiting for them is the caller's.

use super::stages::Stage;

/// What to do next.
#[derive(Debug)]
pub(super) enum Decision {
    /// Start this stage.
    Start(&'static Stage),
    /// Wait until a running stage ends.
    Wait,
    /// No stage is left that can run.
    Done,
}

/// The stages of one run. Stages start in the order of the table.
pub(super) struct Schedule {
    waiting: Vec<&'static Stage>,
    running: Vec<&'static Stage>,
    /// Stages that passed or were not selected: they block nothing.
    unmet: Vec<&'static str>,
    lanes: usize,
}

impl Schedule {
    /// Creates the schedule of `stages`, of which `lanes` run at the same time.
    pub(super) fn new(stages: impl IntoIterator<Item = &'static Stage>, lanes: usize) -> Self {
        let waiting: Vec<_> = stages.into_iter().collect();
        let unmet = waiting.iter().map(|stage| stage.name).collect();
        Self { waiting, running: Vec::new(), unmet, lanes }
    }

    /// Returns the next decision. A stage that is returned counts as running.
    pub(super) fn next(&mut self) -> Decision {
        let exclusive = self.running.iter().any(|stage| stage.exclusive);
        let taken = self.running.iter().filter(|stage| !stage.background).count();
        let free = !exclusive && taken < self.lanes;
        let ready = |stage: &Stage| stage.needs.iter().all(|need| !self.unmet.contains(need));
        let background_free = self.running.len() == taken;
        let has_place = |stage: &Stage| match stage.background {
            true => background_free,
            false => free && (!stage.exclusive || taken == 0),
        };
        match self.waiting.iter().position(|stage| ready(stage) && has_place(stage)) {
            Some(index) => {
                let stage = self.waiting.remove(index);
                self.running.push(stage);
                Decision::Start(stage)
            }
            None if self.running.is_empty() => Decision::Done,
            None => Decision::Wait,
        }
    }

    /// Records the end of a running stage.
    pub(super) fn finish(&mut self, name: &str, passed: bool) {
        self.running.retain(|stage| stage.name != name);
        if passed {
            self.unmet.retain(|it| *it != name);
        }
    }

    /// Returns the stages that cannot run because a stage that they need failed.
    pub(super) fn blocked(&self) -> Vec<&'static str> {
        self.waiting.iter().map(|stage| stage.name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::Verdict;
    use super::*;

    const fn stage(name: &'static str, needs: &'static [&'static str], exclusive: bool) -> Stage {
        Stage { name, about: "", needs, exclusive, background: false, root: false, run: |_| Ok(Verdict::Passed) }
    }

    static TABLE: [Stage; 5] = [
        stage("build", &[], false),
        stage("lint", &[], false),
        stage("test", &["build"], true),
        stage("report", &["test"], false),
        stage("fuzz", &[], false),
    ];

    fn start(schedule: &mut Schedule) -> Option<&'static str> {
        match schedule.next() {
            Decision::Start(stage) => Some(stage.name),
            Decision::Wait | Decision::Done => None,
        }
    }

    #[test]
    fn exclusive_stage_runs_alone_and_after_its_needs() {
        let mut schedule = Schedule::new(&TABLE, 2);
        assert_eq!(start(&mut schedule), Some("build"));
        assert_eq!(start(&mut schedule), Some("lint"));
        assert!(matches!(schedule.next(), Decision::Wait), "two lanes are taken");
        schedule.finish("lint", true);
        assert_eq!(start(&mut schedule), Some("fuzz"));
        schedule.finish("build", true);
        assert!(matches!(schedule.next(), Decision::Wait), "test is exclusive and fuzz is running");
        schedule.finish("fuzz", true);
        assert_eq!(start(&mut schedule), Some("test"));
        assert!(matches!(schedule.next(), Decision::Wait));
        schedule.finish("test", true);
        assert_eq!(start(&mut schedule), Some("report"));
        schedule.finish("report", true);
        assert!(matches!(schedule.next(), Decision::Done));
        assert!(schedule.blocked().is_empty());
    }

    #[test]
    fn background_stages_take_no_lane_and_run_one_at_a_time_next_to_exclusive_ones() {
        const LINT: Stage = stage("lint", &[], false);
        const FUZZ: Stage = stage("fuzz", &[], false);
        static STAGES: [Stage; 4] = [
            stage("test", &[], true),
            Stage { background: true, ..LINT },
            Stage { background: true, ..FUZZ },
            stage("bench", &[], false),
        ];
        let mut schedule = Schedule::new(&STAGES, 1);
        assert_eq!(start(&mut schedule), Some("test"));
        assert_eq!(start(&mut schedule), Some("lint"));
        assert!(matches!(schedule.next(), Decision::Wait), "test is exclusive, and fuzz waits for lint");
        schedule.finish("test", true);
        assert_eq!(start(&mut schedule), Some("bench"));
        assert!(matches!(schedule.next(), Decision::Wait));
        schedule.finish("lint", false);
        assert_eq!(start(&mut schedule), Some("fuzz"), "a failed lint does not hold it");
        schedule.finish("bench", true);
        assert!(matches!(schedule.next(), Decision::Wait), "fuzz is running");
        schedule.finish("fuzz", true);
        assert!(matches!(schedule.next(), Decision::Done));
    }

    #[test]
    fn failed_stage_blocks_what_needs_it_and_nothing_else() {
        let mut schedule = Schedule::new(&TABLE, 1);
        assert_eq!(start(&mut schedule), Some("build"));
        schedule.finish("build", false);
        assert_eq!(start(&mut schedule), Some("lint"));
        schedule.finish("lint", true);
        assert_eq!(start(&mut schedule), Some("fuzz"));
        schedule.finish("fuzz", true);
        assert!(matches!(schedule.next(), Decision::Done));
        assert_eq!(schedule.blocked(), ["test", "report"]);
    }
}
