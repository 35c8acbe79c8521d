//! The two orders of a person for when nothing automatic is safe: make a lost map anew, let a copy lead that is not in sync.
//!
//! Both begin with what the disks of the workers that answer have seen. Both write over the rules of the map, once, with a record
//! that stays; from there on the rules hold again.

use crate::Shared;
use crate::state::State;
use crate::wire;
use engram_cluster::rebuild::{self, Chosen, Testimony};
use engram_cluster::{Entry, PartitionMap, is_forsaken};
use engram_mapstore::{Error, MapStore, Order, Step, What, unless_followed};
use engram_memory::{Lsn, Member, Ordinal, PartitionId};
use engram_proto::v1::{self, OrderRefusal};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

/// How long workers may take to tell what their disks have seen: they read nothing for it, but may be busy.
const TESTIMONY: Duration = Duration::from_secs(3);

/// What workers told, by place: the number of the question, and the answer.
#[derive(Debug, Default)]
pub(crate) struct Told {
    asked: u64,
    answers: BTreeMap<Ordinal, (u64, Testimony)>,
}

impl Told {
    /// The number of the newest question; 0 = none was asked.
    pub(crate) const fn asked(&self) -> u64 {
        self.asked
    }

    /// Asks anew. Numbers go on over a restart, as far as the clock does: a worker answers each of them once.
    fn ask(&mut self) -> u64 {
        self.asked = (self.asked + 1).max(now_ms());
        self.asked
    }

    fn take(&mut self, number: u64, testimony: Testimony) {
        self.answers.insert(testimony.member.ordinal, (number, testimony));
    }

    /// What this very process answered to the question, or a later one.
    fn answer(&self, number: u64, member: &Member) -> Option<&Testimony> {
        let (of, testimony) = self.answers.get(&member.ordinal)?;
        (*of >= number && testimony.member == *member).then_some(testimony)
    }
}

/// What is known of what disks have seen.
struct Witnesses {
    told: Vec<Testimony>,
    /// Workers that should be there and said nothing in time.
    silent: BTreeSet<Ordinal>,
}

impl State {
    fn living(&self) -> impl Iterator<Item = &Member> {
        self.members().filter(|heard| heard.alive).map(|heard| &heard.member)
    }
}

impl Shared {
    /// Takes what a worker tells.
    pub(crate) fn testify(&self, testimony: &v1::Testimony) -> Result<(), Status> {
        let malformed = |error: wire::Malformed| Status::invalid_argument(error.to_string());
        let number = testimony.number;
        let testimony = wire::testimony_from_proto(testimony).map_err(malformed)?;
        self.state().told.take(number, testimony);
        self.testified.notify_one();
        Ok(())
    }

    /// Asks all workers what their disks have seen, and waits a moment for their answers, also of those that are yet to come.
    async fn witnesses(&self) -> Witnesses {
        let deadline = Instant::now() + TESTIMONY;
        let number = self.state().told.ask();
        self.publish();
        loop {
            let witnesses = {
                let state = self.state();
                let told: Vec<Testimony> =
                    state.living().filter_map(|member| state.told.answer(number, member).cloned()).collect();
                let expected = (0..state.goal().workers(self.options.workers)).map(Ordinal);
                let expected: BTreeSet<Ordinal> = expected.chain(state.living().map(|member| member.ordinal)).collect();
                let answered = told.iter().map(|it| it.member.ordinal).collect();
                Witnesses { silent: &expected - &answered, told }
            };
            if witnesses.silent.is_empty() || timeout_at(deadline, self.testified.notified()).await.is_err() {
                return witnesses;
            }
        }
    }

    /// Carries out, or shows, an order to make a lost map anew.
    pub(crate) async fn rebuild_map(&self, request: &v1::RebuildMapRequest) -> Result<v1::RebuildMapReply, Status> {
        let _alone = self.ordering.lock().await;
        check_words(&request.by, &request.accept_data_loss)?;
        let refused = |refusal: OrderRefusal, text: String| v1::RebuildMapReply {
            refusal: refusal.into(),
            text,
            ..Default::default()
        };
        let (lost, known, expected) = {
            let state = self.state();
            let expected: BTreeSet<Ordinal> = (0..state.goal().workers(self.options.workers)).map(Ordinal).collect();
            (state.lost().map(str::to_owned), state.map().cloned(), expected)
        };
        if lost.is_none() {
            let text = match known {
                Some(map) => {
                    format!("the partition map is there, version {}: nothing has to be made anew", map.version)
                }
                None => "no worker that answers has ever seen a partition map: there is none to make anew".to_owned(),
            };
            return Ok(refused(OrderRefusal::NotNeeded, text));
        }
        let Witnesses { mut told, .. } = self.witnesses().await;
        // What this coordinator has in memory was in force as well.
        if let (Some(map), Some(first)) = (known, told.first_mut())
            && first.seen.as_ref().is_none_or(|seen| seen.version < map.version)
        {
            first.seen = Some(map);
        }
        let rebuilt = rebuild::rebuild(self.options.cluster, self.options.partitions, &expected, &told)
            .ok_or_else(|| Status::unavailable("no worker answers: nothing is known of the map"))?;
        let doubt = |(partition, why): (&PartitionId, &String)| v1::MapDoubt {
            partition: partition.0,
            why: why.clone(),
            seen: rebuilt.seen[partition.0 as usize].as_ref().map(wire::entry_to_proto),
        };
        let mut reply = v1::RebuildMapReply {
            map: Some(wire::map_to_proto(&rebuilt.map)),
            doubts: rebuilt.doubts.iter().map(doubt).collect(),
            ..Default::default()
        };
        if !rebuilt.doubts.is_empty() && request.accept_data_loss.trim().is_empty() {
            let whys: BTreeSet<&str> = rebuilt.doubts.values().map(String::as_str).collect();
            let whys: Vec<&str> = whys.into_iter().collect();
            reply.refusal = OrderRefusal::NotAccepted.into();
            reply.text = format!(
                "{} of {} partitions are guessed, not proven, and may lose what was acknowledged: {}",
                rebuilt.doubts.len(),
                rebuilt.map.partitions.len(),
                whys.join("; ")
            );
            return Ok(reply);
        }
        if request.write {
            let step = |(partition, why): (&PartitionId, &String)| Step {
                partition: *partition,
                before: rebuilt.seen[partition.0 as usize].clone(),
                after: rebuilt.map.partitions[partition.0 as usize].clone(),
                lost: why.clone(),
            };
            let steps = rebuilt.doubts.iter().map(step).collect();
            let order = Order::now(What::RebuildMap, &request.by, &request.accept_data_loss, steps);
            let rebuilt = rebuilt.map;
            let written = self.overrule(order, move |there| unless_followed(&rebuilt, there)).await?;
            reply.map = Some(wire::map_to_proto(&written));
            reply.written = true;
        }
        Ok(reply)
    }

    /// Carries out an order to let a copy lead that is not in sync.
    pub(crate) async fn force_promote(
        &self,
        request: &v1::ForcePromoteRequest,
    ) -> Result<v1::ForcePromoteReply, Status> {
        let _alone = self.ordering.lock().await;
        check_words(&request.by, &request.accept_data_loss)?;
        let partition = PartitionId(request.partition);
        let partitions = self.options.partitions;
        if partition.0 >= partitions {
            return Err(Status::invalid_argument(format!(
                "partition {partition} does not exist: there are {partitions}, numbered from 0"
            )));
        }
        let Witnesses { told, silent } = self.witnesses().await;
        let damaged = told.iter().filter(|it| rebuild::copy(it, partition).damaged).map(|it| it.member.ordinal);
        let damaged: BTreeSet<Ordinal> = damaged.collect();
        let (map, observed) = {
            let state = self.state();
            if let Some(lost) = state.lost() {
                return Err(Status::failed_precondition(format!(
                    "{lost}; `engram partition rebuild-map` comes before anything else"
                )));
            }
            let map = state.map().cloned();
            let map = map.ok_or_else(|| Status::failed_precondition("the cluster has no partition map yet"))?;
            (map, state.observed(&self.options, self.now_ms()))
        };
        let refused =
            |refusal: OrderRefusal, text: String, step| v1::ForcePromoteReply { refusal: refusal.into(), text, step };
        if let Err(why) = is_forsaken(&map, partition, &observed, &damaged) {
            let text = format!("partition {partition} needs no order: {why}");
            return Ok(refused(OrderRefusal::NotNeeded, text, None));
        }
        let asked = |it: &&Testimony| request.worker.is_none_or(|worker| it.member.ordinal.0 == worker);
        let chosen = rebuild::most_advanced(partition, told.iter().filter(asked)).ok_or_else(|| {
            Status::not_found(match request.worker {
                Some(worker) => {
                    format!("worker {worker} does not answer, or its copy of partition {partition} is damaged")
                }
                None => format!("no worker that answers has a whole copy of partition {partition}"),
            })
        })?;
        let before = map.partitions[partition.0 as usize].clone();
        let promised = rebuild::highest_promise(partition, &told);
        let after = rebuild::forced(Some(&before), &chosen.member, promised);
        let lost = given_up(&before, partition, &chosen, &told, &silent);
        let step = Step { partition, before: Some(before), after, lost };
        let told = wire::step_to_proto(&step);
        if request.accept_data_loss.trim().is_empty() {
            return Ok(refused(OrderRefusal::NotAccepted, step.lost, Some(told)));
        }
        let order = Order::now(What::ForcePromote, &request.by, &request.accept_data_loss, vec![step.clone()]);
        // Other partitions may have changed since; this one was judged as it was.
        self.overrule(order, move |there| step.taken(there)).await?;
        Ok(v1::ForcePromoteReply { step: Some(told), ..Default::default() })
    }

    /// Writes a map over the rules: what `ordered` makes of the one that is there (`None`: it is lost), if it makes something of it.
    async fn overrule(
        &self,
        order: Order,
        ordered: impl Fn(Option<&PartitionMap>) -> Option<PartitionMap> + Send + 'static,
    ) -> Result<PartitionMap, Status> {
        if !self.options.carries_out_orders {
            return Err(Status::permission_denied(
                "the coordinator of this cluster judges an order, and whoever gives it writes it, by rights of their own",
            ));
        }
        tell(&order);
        let write =
            move |store: &dyn MapStore| -> Result<_, Error> { Ok((order.carry_out(store, ordered)?, store.orders()?)) };
        let (map, orders) = match crate::writer::with_store(self, write).await {
            Some(Ok(written)) => written,
            Some(Err(Error::Conflict { .. })) => {
                return Err(Status::aborted(
                    "the partition changed meanwhile, nothing was done: look at it, and order it again",
                ));
            }
            Some(Err(error)) => return Err(Status::unavailable(format!("the order was not carried out: {error}"))),
            None => return Err(Status::internal("the map store panicked")),
        };
        let now_ms = self.now_ms();
        let mut state = self.state();
        state.overruled(map.clone(), orders, now_ms);
        drop(state);
        self.publish();
        self.reconsider.notify_one();
        Ok(map)
    }
}

fn check_words(by: &str, reason: &str) -> Result<(), Status> {
    for (field, words) in [("by", by), ("accept_data_loss", reason)] {
        if words.len() > Order::WORDS_MOST {
            let (length, most) = (words.len(), Order::WORDS_MOST);
            return Err(Status::invalid_argument(format!("{field}: {length} bytes; allowed are {most}")));
        }
    }
    Ok(())
}

/// Says in the log what a person ordered.
pub(crate) fn tell(order: &Order) {
    tracing::warn!(by = order.by, reason = order.reason, what = ?order.what, steps = order.steps.len(), "ordered");
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// What a promotion gives up, in words.
fn given_up(
    before: &Entry,
    partition: PartitionId,
    chosen: &Chosen,
    told: &[Testimony],
    silent: &BTreeSet<Ordinal>,
) -> String {
    let ordinals: BTreeSet<Ordinal> = before.candidates().map(|member| member.ordinal).collect();
    let in_sync: Vec<String> = ordinals.iter().map(ToString::to_string).collect();
    let leads = chosen.member.ordinal;
    let held = |copy: &rebuild::Copy| match copy.last {
        Lsn(0) => "nothing".to_owned(),
        last => format!("all up to lsn {last}, written at term {}", copy.last_term),
    };
    let others = told.iter().filter(|it| it.member.ordinal != leads);
    let others = others.map(|it| format!("worker {} holds {}", it.member.ordinal, held(&rebuild::copy(it, partition))));
    let silent = silent.iter().map(|ordinal| format!("worker {ordinal} does not answer, and may hold more"));
    let others: Vec<String> = others.chain(silent).collect();
    let others = if others.is_empty() { String::new() } else { format!("; {}", others.join(", ")) };
    format!(
        "partition {partition}: everything that was acknowledged is on worker {} at term {}, and gone; worker {leads} holds {}, and \
         what was acknowledged after that is lost{others}",
        in_sync.join(", "),
        before.term,
        held(&chosen.copy)
    )
}
