//! A program that trains in an elastic group: a process of a run of kind `Job`, without PyTorch.
//!
//! Each process computes the gradient of a linear model over its part of the samples of a step. As `examples/python/ddp_elastic.py` it prints a line
//! per step, and at the end the digest of the parameters and the steps it took.

use crate::programs::hexadecimal;
use anyhow::{Context as _, Result, bail, ensure};
use engram_client::group::{
    Bucket, Committed, Completion, Group, GroupOptions, Outcome, Provide, Readiness, State, StateCopy, StateServer,
};
use engram_client::{Client, Network, Options, Token};
use engram_collective::group::{Position, Timing};
use engram_identity::{ExpectedPeer, Role, Roots, WatchedFiles, token};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// Features of a sample; the target is the sum of the first [`USEFUL`].
const FEATURES: usize = 64;
const USEFUL: usize = 4;
/// Samples of a step, over all processes.
const BATCH: usize = 96;
const RATE: f32 = 0.1;
/// Other work of a step: the training has to outlast the start of a pod.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest wait for other members.
const LIMIT: Duration = Duration::from_secs(120);

/// Parameters after a number of steps.
#[derive(Clone)]
struct Model {
    step: u64,
    weights: Vec<f32>,
}

impl Model {
    /// Initial parameters that differ between processes: the group makes them equal.
    fn new(seed: usize) -> Self {
        Self { step: 0, weights: (0..FEATURES).map(|feature| feature_of(seed as u64, feature, 0)).collect() }
    }

    fn bytes(&self) -> Vec<u8> {
        self.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()
    }

    fn position(&self) -> Position {
        let digest: [u8; 32] = Sha256::digest(self.bytes()).into();
        Position { step: self.step, digest: u64::from_le_bytes(digest[..8].try_into().expect("eight of 32 bytes")) }
    }

    fn install(&mut self, state: &State) {
        let numbers = state.content.as_chunks::<4>().0;
        self.weights = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        self.step = state.position.step;
    }

    /// Gradient sum and squared error over this member's samples of the next step, and their number.
    fn gradient(&self, rank: usize, members: usize) -> (Vec<f32>, f32, u64) {
        let (mut sums, mut loss, mut count) = (vec![0.0; FEATURES], 0.0, 0);
        for sample in (rank..BATCH).step_by(members) {
            let features: Vec<f32> = (0..FEATURES).map(|feature| feature_of(self.step, feature, sample)).collect();
            let predicted: f32 = features.iter().zip(&self.weights).map(|(a, b)| a * b).sum();
            let error = predicted - features[..USEFUL].iter().sum::<f32>();
            sums.iter_mut().zip(&features).for_each(|(sum, feature)| *sum += error * feature);
            loss += error * error;
            count += 1;
        }
        (sums, loss, count)
    }
}

/// A number between -1 and 1 that depends on all of these.
fn feature_of(step: u64, feature: usize, sample: usize) -> f32 {
    let text = format!("{step} {feature} {sample}");
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
}

struct Gradient {
    sums: Vec<f32>,
    reduced: Vec<f32>,
}

impl Bucket for Gradient {
    fn key(&self) -> u32 {
        1
    }

    fn parts(&mut self) -> (&[f32], &mut [f32]) {
        (&self.sums, &mut self.reduced)
    }
}

struct Member {
    group: Arc<Group>,
    model: Arc<Mutex<Model>>,
    /// Copies the state for processes that join.
    _server: StateServer,
    _runtime: Runtime,
}

/// Trains for some steps in the group that the environment names. The last process of those that start it stops in the middle, to be killed.
///
/// # Errors
/// A variable is missing, the cluster does not answer, or the group does not go on.
pub(crate) fn run(steps: u64) -> Result<()> {
    let (rank, size) = (number("ENGRAM_RANK")?, number("ENGRAM_WORLD_SIZE")?);
    let name = variable("ENGRAM_GROUP")?;
    let member = Member::join(&name, Model::new(rank))?;
    let joined = member.model().step;
    println!("{}", json!({ "joined": joined, "rank": rank, "of": size, "group": name }));
    let hold = steps / 2;
    member.wait_for(size)?;
    let mut taken = Vec::new();
    while member.model().step < steps {
        if let Some(committed) = member.step()? {
            taken.push(committed.step);
            let (members, samples) = (committed.members.len(), committed.samples);
            let report =
                json!({ "step": committed.step, "members": members, "samples": samples, "loss": member.loss() });
            println!("{report}");
        }
        std::thread::sleep(PAUSE);
        let step = member.model().step;
        if step == hold && joined == 0 && rank + 1 == size {
            // The process to be killed: the others are in a step with it meanwhile.
            std::thread::sleep(LIMIT);
            bail!("this process was not killed");
        }
        // A process that is started again takes longer than the rest of this training.
        if step == hold + 1 {
            member.wait_for(size)?;
        }
    }
    member.group.leave(Duration::from_secs(10));
    let without_gaps = taken.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let digest = hexadecimal(&Sha256::digest(member.model().bytes()));
    println!(
        "{}",
        json!({ "digest": digest, "taken": taken.len(), "first": taken.first(), "without_gaps": without_gaps, "loss": member.loss() })
    );
    Ok(())
}

impl Member {
    fn join(name: &str, model: Model) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let client = runtime.block_on(Client::connect(options()?))?;
        let options = GroupOptions {
            name: name.to_owned(),
            address: None,
            timing: Timing::new(1_000),
            min_members: 1,
            layout: FEATURES as u64,
            wait_limit: LIMIT,
            position: model.position(),
        };
        let (model, known) = (Arc::new(Mutex::new(model)), Arc::<OnceLock<Arc<Group>>>::default());
        let (group, server) = Group::join(&client, runtime.handle(), &options, provider(&model, &known))?;
        let group = Arc::new(group);
        // It is set here only.
        let _ = known.set(Arc::clone(&group));
        let member = Self { group, model, _server: server, _runtime: runtime };
        member.wait_ready()?;
        Ok(member)
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().expect("no holder panics")
    }

    fn loss(&self) -> f32 {
        self.model().gradient(0, 1).1 / BATCH as f32
    }

    /// Waits until the group has so many members.
    fn wait_for(&self, size: usize) -> Result<()> {
        let began = Instant::now();
        while self.group.view().size < size {
            ensure!(began.elapsed() < LIMIT, "the group has {} of {size} members", self.group.view().size);
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits until this process is a member, and installs the state of the group if it has another one.
    fn wait_ready(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            match self.group.wait_ready(Duration::from_millis(100))? {
                Readiness::Ready => return Ok(()),
                Readiness::Install(state) => {
                    self.model().install(&state);
                    self.group.installed(state.position);
                }
                Readiness::Pending(why) if began.elapsed() > LIMIT => bail!("not a member of the group: {why}"),
                Readiness::Pending(_) => {}
            }
        }
    }

    /// Takes a step; `None` if the group went on without this process.
    fn step(&self) -> Result<Option<Committed>> {
        let view = self.group.view();
        let (sums, _, samples) = self.model().gradient(view.rank, view.size.max(1));
        self.group.submit(Box::new(Gradient { reduced: vec![0.0; sums.len()], sums }))?;
        let (sender, receiver) = channel();
        let completion: Completion = Box::new(move |result, mut buckets| {
            let reduced = buckets.first_mut().map(|bucket| bucket.parts().1.to_vec());
            // The receiver waits for it.
            let _ = sender.send((result, reduced));
        });
        self.group.finish(samples, 0, completion)?;
        let (result, reduced) = receiver.recv().context("the group has ended")?;
        let committed = match result? {
            Outcome::Applied(committed) => committed,
            Outcome::Skipped(committed) => bail!("gradient of step {} is not finite", committed.step),
            Outcome::Superseded => {
                self.wait_ready()?;
                return Ok(None);
            }
        };
        let mut model = self.model();
        let reduced = reduced.context("a step without a bucket")?;
        model.weights.iter_mut().zip(&reduced).for_each(|(weight, gradient)| *weight -= RATE * gradient);
        model.step = committed.step;
        Ok(Some(committed))
    }
}

fn provider(model: &Arc<Mutex<Model>>, group: &Arc<OnceLock<Arc<Group>>>) -> Provide {
    let (model, group) = (Arc::clone(model), Arc::clone(group));
    Arc::new(move || {
        let model = model.lock().expect("no holder panics").clone();
        let position = group.get()?.position_after(model.step)?;
        Some(StateCopy { position, content: Arc::new(model.bytes()) })
    })
}

fn variable(name: &str) -> Result<String> {
    std::env::var(name).with_context(|| format!("{name} is not set: not a process of a run of kind Job"))
}

fn number(name: &str) -> Result<usize> {
    let text = variable(name)?;
    text.parse().with_context(|| format!("{name} is {text:?}; allowed: a number"))
}

/// Options of a client of the cluster that the environment names, with the token of the pod.
fn options() -> Result<Options> {
    let ca = PathBuf::from(variable("ENGRAM_CERTIFICATE_AUTHORITY")?);
    let source = Token::file(variable("ENGRAM_TOKEN_FILE")?)?;
    let cluster = token::cluster_of(&source.text()).context("the token has no cluster as audience")?;
    let roots = WatchedFiles::open("CA certificates", vec![ca], |contents: &[Vec<u8>]| Roots::parse(&contents[0]))?;
    let network = Network::with_token(source, roots, cluster, ExpectedPeer::any(Role::Worker));
    Ok(Options { network, ..Options::new([variable("ENGRAM_ADDRESS")?]) })
}
