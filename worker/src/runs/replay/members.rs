//! What the members of a group compute: their parts of a batch, and the devices that compute them.

use engram_memory::Ordinal;
use engram_proto::v1;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Newest work of each member.
#[derive(Debug, Default)]
pub(in crate::runs) struct MemberWork {
    members: BTreeMap<Ordinal, Member>,
    /// Steps of all members since this driver began: those whose gradients a GPU computed, and all.
    gpu_steps: u64,
    steps: u64,
}

#[derive(Debug)]
struct Member {
    samples_per_step: f64,
    /// Empty if the worker does not report it.
    device: String,
}

impl MemberWork {
    /// Takes the progress of at least one step of a member.
    pub(in crate::runs) fn observe(&mut self, worker: Ordinal, progress: &v1::TrainingProgress) {
        let samples_per_step = progress.own_samples as f64 / progress.steps as f64;
        self.members.insert(worker, Member { samples_per_step, device: progress.device.clone() });
        self.gpu_steps += progress.gpu_steps;
        self.steps += progress.steps;
    }

    /// A member left.
    pub(in crate::runs) fn remove(&mut self, worker: Ordinal) {
        self.members.remove(&worker);
    }

    /// Returns the largest part of a batch divided by the smallest; `None` if a member has none.
    pub(in crate::runs) fn part_ratio(&self) -> Option<f64> {
        let parts = || self.members.values().map(|member| member.samples_per_step);
        let (least, most) = (parts().fold(f64::INFINITY, f64::min), parts().fold(0.0, f64::max));
        (least > 0.0 && most > 0.0).then(|| most / least)
    }

    /// Returns the share of the steps of all members whose gradients a GPU computed; `None` if there are none.
    pub(in crate::runs) fn gpu_share(&self) -> Option<f64> {
        (self.gpu_steps > 0).then(|| self.gpu_steps as f64 / self.steps as f64)
    }

    /// Returns the devices of all members: `NVIDIA H100 on 2 workers, CPU on 1 worker`; without the numbers if all have the same.
    pub(in crate::runs) fn devices(&self) -> Option<String> {
        let mut workers: BTreeMap<&str, usize> = BTreeMap::new();
        let devices = self.members.values().map(|member| &*member.device).filter(|device| !device.is_empty());
        devices.for_each(|device| *workers.entry(device).or_default() += 1);
        if workers.len() < 2 {
            return workers.into_keys().next().map(str::to_owned);
        }
        // The device of most members first.
        let mut devices: Vec<(&str, usize)> = workers.into_iter().collect();
        devices.sort_by_key(|(_, count)| Reverse(*count));
        let named = devices.into_iter().map(|(device, count)| {
            let plural = if count == 1 { "" } else { "s" };
            format!("{device} on {count} worker{plural}")
        });
        Some(named.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_computed_the_gradients_are_named() {
        let mut work = MemberWork::default();
        assert_eq!((work.devices(), work.gpu_share()), (None, None));
        let mut observe = |worker, device: &str, gpu_steps| {
            let device = device.to_owned();
            let progress = v1::TrainingProgress { steps: 10, device, gpu_steps, ..Default::default() };
            work.observe(Ordinal(worker), &progress);
            (work.devices().unwrap(), work.gpu_share())
        };
        assert_eq!(observe(0, "CPU", 0), ("CPU".to_owned(), None));
        assert_eq!(observe(1, "H100", 10), ("CPU on 1 worker, H100 on 1 worker".to_owned(), Some(0.5)));
        assert_eq!(observe(2, "H100", 10).0, "H100 on 2 workers, CPU on 1 worker");
        // The GPU of a worker failed after two more steps.
        let (devices, share) = observe(2, "CPU: H100 failed", 2);
        assert_eq!(devices, "CPU on 1 worker, CPU: H100 failed on 1 worker, H100 on 1 worker");
        assert!(share.is_some_and(|share| (share - 22.0 / 40.0).abs() < 1e-9), "{share:?}");
        work.remove(Ordinal(0));
        work.remove(Ordinal(2));
        assert_eq!(work.devices().unwrap(), "H100");
    }
}
