//! NCCL on the emulated driver: ranks are threads, each with a GPU of its own.

use crate::emulated_driver::run_with_emulated_nccl;
use engram_kernels::gpu::nccl::{Communicator, Nccl, NcclError, UniqueId, device_uuid};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

const TWO: (&str, &str) = ("CUDA_HOST_DEVICES", "2");
/// For a loaded machine; a failure of the test only.
const PATIENT: Duration = Duration::from_secs(120);

/// Keeps waiting until a limit that only a hang reaches.
fn patient() -> impl FnMut() -> bool {
    let started = Instant::now();
    move || started.elapsed() < PATIENT
}

fn join(nccl: &Arc<Nccl>, id: &UniqueId, rank: usize) -> Result<Communicator, NcclError> {
    Communicator::join(nccl, id, (rank, 2), rank, &mut patient())
}

/// Runs both ranks.
fn both<T: Send>(work: impl Fn(usize, Communicator) -> T + Sync) -> [T; 2] {
    let nccl = Arc::new(Nccl::load().unwrap());
    let id = nccl.unique_id().unwrap();
    thread::scope(|scope| {
        let rank = |rank: usize| {
            let (nccl, work) = (&nccl, &work);
            scope.spawn(move || work(rank, join(nccl, &id, rank).unwrap()))
        };
        [rank(0), rank(1)].map(|it| it.join().unwrap())
    })
}

fn input(rank: usize, elements: usize) -> Vec<f32> {
    (0..elements).map(|index| ((rank * 7_919 + index * 104_729) % 1_009) as f32).collect()
}

#[test]
fn sums_over_gpus_are_those_of_all_ranks_at_every_size() {
    run_with_emulated_nccl("nccl::sums_over_gpus_are_those_of_all_ranks_at_every_size", &[TWO], || {
        assert_eq!(Nccl::load().unwrap().version(), 22_000);
        assert_ne!(device_uuid(0).unwrap(), device_uuid(1).unwrap());
        let sizes = [0, 1, 1_000, 100_001, 10];
        let sums = both(|rank, mut own| {
            let sum = |elements: usize| {
                let mut output = vec![f32::NAN; elements];
                own.all_reduce(&input(rank, elements), &mut output, &mut patient()).unwrap();
                output
            };
            let sums = sizes.map(sum);
            // Alive until both have their sums: a communicator ends for all ranks.
            (sums, own)
        });
        for (sums, _) in sums {
            for (sum, elements) in sums.iter().zip(sizes) {
                let expected = input(0, elements).into_iter().zip(input(1, elements)).map(|(one, other)| one + other);
                assert!(sum.iter().copied().eq(expected), "{elements} elements");
            }
        }
    });
}

#[test]
fn rank_without_others_gives_up_and_ranks_of_an_aborted_communicator_fail() {
    let name = "nccl::rank_without_others_gives_up_and_ranks_of_an_aborted_communicator_fail";
    run_with_emulated_nccl(name, &[TWO], || {
        let nccl = Arc::new(Nccl::load().unwrap());
        let mut polls = 0;
        let alone = Communicator::join(&nccl, &nccl.unique_id().unwrap(), (0, 2), 0, &mut || {
            polls += 1;
            polls < 20
        });
        assert!(matches!(alone.err(), Some(NcclError::GaveUp("join the communicator"))));
        let joined = Barrier::new(2);
        let sums = both(|rank, mut own| {
            joined.wait();
            // Rank 1 ends, as when its process fails or its generation is fenced.
            (rank == 0).then(|| own.all_reduce(&[1.0], &mut [0.0], &mut patient()).unwrap_err().to_string())
        });
        assert_eq!(sums, [Some("nccl: failed to sum (code 6)".to_owned()), None]);
        let silent = both(|rank, mut own| {
            let mut polls = 0;
            let mut few = || {
                polls += 1;
                polls < 20
            };
            let error = (rank == 0).then(|| own.all_reduce(&[1.0], &mut [0.0], &mut few).unwrap_err());
            (own, error)
        });
        assert!(matches!(silent[0].1, Some(NcclError::GaveUp("sum"))), "{:?}", silent[0].1);
    });
}

#[test]
fn failed_call_is_reported_with_its_code() {
    let settings = [TWO, ("NCCL_HOST_FAIL", "ncclAllReduce:1:1")];
    run_with_emulated_nccl("nccl::failed_call_is_reported_with_its_code", &settings, || {
        let errors = both(|rank, mut own| {
            let error =
                (rank == 0).then(|| own.all_reduce(&[1.0], &mut [0.0], &mut patient()).unwrap_err().to_string());
            (own, error)
        });
        assert_eq!(errors[0].1.as_deref(), Some("nccl: failed to sum (code 1)"));
    });
}

#[test]
fn absent_and_too_old_libraries_are_named() {
    // A machine may have NCCL. The emulated process has an old one.
    let absent = |error: &NcclError| error.to_string() == "nccl: not found";
    assert!(Nccl::load().err().is_none_or(|error| absent(&error) || matches!(error, NcclError::OldVersion { .. })));
    let settings = [TWO, ("NCCL_HOST_VERSION", "21003")];
    run_with_emulated_nccl("nccl::absent_and_too_old_libraries_are_named", &settings, || {
        let error = Nccl::load().err().unwrap().to_string();
        assert_eq!(error, "nccl: version 21003 is too old; allowed: 21400 or newer");
    });
}
