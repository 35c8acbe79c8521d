//! Secure aggregation by process: the worker that relays the masks is killed while a stage waits for its last client, at each of the stages.

use super::federated::{CLIENTS, all_of, kill_driver, manifest, model, update, wait_for_success};
use engram_client::Client;
use engram_federated::secure::keys::verifying_key;
use engram_federated::secure::{ClientMessage, CohortSettings, SecureClient, ServerMessage};
use engram_proto::v1;
use engram_tests::{Cluster, cluster_manifest};

/// Keys, shares, masked input, shares that unmask.
const STAGES: usize = 4;

#[test]
fn masked_rounds_and_cohorts_survive_the_death_of_their_worker_at_each_stage_and_count_each_update_once() {
    let mut cluster = Cluster::up(&cluster_manifest("fed", 3, "  partitions: 4\n"));
    kill_at_each_stage_of_a_round(&mut cluster);
    kill_at_each_stage_of_overlapping_cohorts(&mut cluster);
    go_on_without_a_lost_client(&cluster);
    cluster.stop();
}

/// A client that restarts in a round has lost its keys, and one that is late has missed a stage: both lose their task, wait for the next round, and are in
/// its sum. The others end the round.
fn go_on_without_a_lost_client(cluster: &Cluster) {
    let all = format!("minimum: {CLIENTS}");
    let more = "    secureAggregation: { range: 1, dropOut: 0.3 }\n    deadline: 40s\n";
    let text = manifest("lost", 3, more).replace(&all, "minimum: 3");
    let file = cluster.file("lost.yaml", text);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let mut members = members("lost", CLIENTS);
    for is_late in [false, true] {
        cluster.client(async |client| {
            check_in(&client, &mut members).await;
            let (last, others) = members.split_last_mut().expect("there are clients");
            last.send(&client).await;
            if is_late {
                // Its shares are missing when the stage ends.
                let all =
                    all_of(others.iter_mut().chain([&mut *last]).map(|member| member.finish_stage(&client))).await;
                assert_eq!(all, [false; CLIENTS]);
            } else {
                assert!(last.has_task(&client).await, "its task lasts");
                last.check_in(&client).await;
                assert_eq!(last.reason(&client).await, v1::FederatedRefusalReason::LeaseExpired);
                finish_stage(&client, others, 0).await;
            }
            finish_stage(&client, others, 1).await;
            if is_late {
                assert_eq!(last.reason(&client).await, v1::FederatedRefusalReason::LeaseExpired);
            }
            assert!(!last.has_task(&client).await, "it would get the same task again and again");
            for stage in 2..STAGES {
                finish_stage(&client, others, stage).await;
            }
        });
    }
    cluster.client(async |client| {
        check_in(&client, &mut members).await;
        for stage in 0..STAGES {
            finish_stage(&client, &mut members, stage).await;
        }
    });
    let ended = wait_for_success(cluster, "lost");
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(3), Some(10)), "{ended}");
    let found = cluster.client(async |client| model(&client, "lost").await);
    for (place, value) in found.iter().enumerate() {
        let expected = 0.25 + if place + 1 == CLIENTS { 0.0 } else { 2.0 / 3.0 };
        assert!((value - expected).abs() < 2e-3, "{found:?}");
    }
}

/// One round per stage; before them one in which the worker dies when the last message of the last stage is acknowledged.
fn kill_at_each_stage_of_a_round(cluster: &mut Cluster) {
    const ROUNDS: usize = STAGES + 1;
    let file = cluster
        .file("masked.yaml", manifest("masked", ROUNDS, "    secureAggregation: { range: 1 }\n    deadline: 600s\n"));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let mut members = members("masked", CLIENTS);
    for killed in (0..ROUNDS).rev() {
        cluster.client(async |client| check_in(&client, &mut members).await);
        for stage in 0..STAGES {
            if stage == killed {
                cluster.client(async |client| hold(&client, &members).await);
                kill_driver(cluster, "masked");
                // The next driver waits for the same client.
                cluster.client(async |client| hold(&client, &members).await);
            } else if killed == STAGES && stage + 1 == STAGES {
                cluster.client(async |client| {
                    all_of(members.iter().map(|member| member.send(&client))).await;
                });
                kill_driver(cluster, "masked");
            }
            cluster.client(async |client| finish_stage(&client, &mut members, stage).await);
        }
    }
    let ended = wait_for_success(cluster, "masked");
    let updates = (ROUNDS * CLIENTS) as u64;
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(ROUNDS as u64), Some(updates)), "{ended}");
    let found = cluster.client(async |client| model(&client, "masked").await);
    let expected = ROUNDS as f32 / CLIENTS as f32;
    assert!(found.iter().all(|value| (value - expected).abs() < 1e-3), "{found:?}, expected {expected}");
}

/// Two cohorts at a time, each held at another stage when the worker dies; the second to end is weighted by its age.
fn kill_at_each_stage_of_overlapping_cohorts(cluster: &mut Cluster) {
    const MEMBERS: usize = 2 * CLIENTS;
    let one = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let more = "    strategy: { kind: FedBuff }\n    secureAggregation: { range: 1 }\n    deadline: 600s\n";
    let versions = 2 * STAGES;
    let text =
        manifest("overlapping", versions, more).replace(&one, &format!("population: {MEMBERS}, perRound: {CLIENTS}"));
    let file = cluster.file("overlapping.yaml", text);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let mut waiting = members("overlapping", MEMBERS);
    let mut expected = [0.0_f32; CLIENTS];
    for killed in 0..STAGES {
        let (mut first, mut second) = cluster.client(async |client| {
            check_in(&client, &mut waiting).await;
            let round = waiting.iter().map(Member::round).min();
            std::mem::take(&mut waiting).into_iter().partition::<Vec<_>, _>(|member| Some(member.round()) == round)
        });
        assert_eq!([first.len(), second.len()], [CLIENTS, CLIENTS], "two cohorts at a time");
        let held = [killed, (killed + 2) % STAGES];
        cluster.client(async |client| {
            for (cohort, until) in [(&mut first, held[0]), (&mut second, held[1])] {
                for stage in 0..until {
                    finish_stage(&client, cohort, stage).await;
                }
                hold(&client, cohort).await;
            }
        });
        kill_driver(cluster, "overlapping");
        cluster.client(async |client| {
            for (cohort, from) in [(&mut second, held[1]), (&mut first, held[0])] {
                hold(&client, cohort).await;
                for stage in from..STAGES {
                    finish_stage(&client, cohort, stage).await;
                }
            }
        });
        for (cohort, age) in [(&second, 0.0), (&first, 1.0_f32)] {
            for member in cohort {
                expected[member.number % CLIENTS] += 1.0 / (CLIENTS as f32 * (1.0 + age).sqrt());
            }
        }
        waiting.extend(first.into_iter().chain(second));
    }
    let ended = wait_for_success(cluster, "overlapping");
    let counted = (ended["epoch"].as_u64(), ended["updates"].as_u64());
    assert_eq!(counted, (Some(versions as u64), Some((versions * CLIENTS) as u64)), "{ended}");
    let found = cluster.client(async |client| model(&client, "overlapping").await);
    for (value, expected) in found.iter().zip(expected) {
        assert!((value - expected).abs() < 2e-3, "{found:?}, expected {expected}");
    }
}

/// A client that sends one message of the protocol at a time.
struct Member {
    number: usize,
    caller: v1::FederatedCaller,
    identity: [u8; 32],
    /// Task and protocol of the round in progress.
    round: Option<(v1::FederatedTask, SecureClient)>,
    message: Option<ClientMessage>,
    received: u32,
}

fn members(run: &str, count: usize) -> Vec<Member> {
    let member = |number: usize| Member {
        number,
        caller: v1::FederatedCaller {
            run: run.to_owned(),
            client: format!("c{number}"),
            secret: vec![number as u8; 32].into(),
        },
        identity: [number as u8 + 100; 32],
        round: None,
        message: None,
        received: 0,
    };
    (0..count).map(member).collect()
}

/// Lets all members check in at once until each has a task.
async fn check_in(client: &Client, members: &mut [Member]) {
    all_of(members.iter_mut().map(|member| member.check_in(client))).await;
}

/// Sends the messages of a stage of all members but the last, which keeps the stage open.
async fn hold(client: &Client, members: &[Member]) {
    let others = &members[..members.len() - 1];
    for answer in all_of(others.iter().map(|member| member.send(client))).await {
        assert!(!answer.complete && answer.message.is_empty(), "the stage ended without its last client");
    }
}

/// Lets all members finish a stage: after the last one their updates are in a sum.
async fn finish_stage(client: &Client, members: &mut [Member], stage: usize) {
    for is_complete in all_of(members.iter_mut().map(|member| member.finish_stage(client))).await {
        assert_eq!(is_complete, stage + 1 == STAGES, "stage {stage}");
    }
}

impl Member {
    fn round(&self) -> u64 {
        self.task().round
    }

    fn task(&self) -> &v1::FederatedTask {
        &self.round.as_ref().expect("the member has a task").0
    }

    async fn check_in(&mut self, client: &Client) {
        let identity_key = verifying_key(&self.identity);
        let task = loop {
            let caller = Some(self.caller.clone());
            let request = v1::CheckInRequest { caller, wait_ms: 10_000, identity_key: identity_key.to_vec().into() };
            let answer = client.federated_check_in(request).await.expect("failed to check in");
            assert_eq!((answer.refusal, answer.ended.as_str()), (None, ""));
            if let Some(task) = answer.task {
                break task;
            }
        };
        let settings = CohortSettings::decode(&task.cohort).expect("the updates are masked");
        let own = settings.clients.iter().find(|(_, key)| **key == identity_key);
        let number = *own.expect("the cohort has this member").0;
        let state = SecureClient::new(settings, number, rand::random(), self.identity).expect("valid settings");
        self.message = Some(state.advertise());
        (self.round, self.received) = (Some((task, state)), 0);
    }

    /// A run that has ended with the sum of this update is its completion.
    async fn exchange(&self, client: &Client, wait_ms: u32) -> v1::ExchangeMasksResponse {
        let mut answer = self.answer(client, wait_ms).await;
        if answer.refusal.as_ref().is_some_and(|it| it.reason() == v1::FederatedRefusalReason::Ended) {
            (answer.refusal, answer.complete) = (None, true);
        }
        assert_eq!(answer.refusal, None, "client {}", self.number);
        answer
    }

    /// Sends the message of the stage, which is refused. Returns the reason.
    async fn reason(&self, client: &Client) -> v1::FederatedRefusalReason {
        self.answer(client, 0).await.refusal.expect("the message is refused").reason()
    }

    /// Whether a check-in without a wait brings a task.
    async fn has_task(&self, client: &Client) -> bool {
        let identity_key = verifying_key(&self.identity).to_vec().into();
        let request = v1::CheckInRequest { caller: Some(self.caller.clone()), wait_ms: 0, identity_key };
        client.federated_check_in(request).await.expect("failed to check in").task.is_some()
    }

    async fn answer(&self, client: &Client, wait_ms: u32) -> v1::ExchangeMasksResponse {
        let request = v1::ExchangeMasksRequest {
            caller: Some(self.caller.clone()),
            task: self.task().number,
            message: self.message.as_ref().map(ClientMessage::encode).unwrap_or_default().into(),
            received: self.received,
            wait_ms,
            loss: None,
        };
        client.federated_exchange(request).await.expect("failed to exchange")
    }

    /// Sends the message of the stage without waiting for the end of the stage.
    async fn send(&self, client: &Client) -> v1::ExchangeMasksResponse {
        self.exchange(client, 0).await
    }

    /// Sends the message of the stage and takes the answer. Returns whether the update is in a sum.
    async fn finish_stage(&mut self, client: &Client) -> bool {
        let answer = loop {
            let answer = self.exchange(client, 10_000).await;
            if answer.complete {
                return true;
            }
            if !answer.message.is_empty() {
                break answer;
            }
        };
        self.received += 1;
        let received = ServerMessage::decode(&answer.message).expect("a message of the server");
        let values = update(self.number % CLIENTS);
        let (_, state) = self.round.as_mut().expect("the member has a task");
        let next = match received {
            ServerMessage::Shares(_) => state.mask(&received, &values, 1),
            other => state.step(other),
        };
        self.message = Some(next.expect("the server follows the protocol"));
        false
    }
}
