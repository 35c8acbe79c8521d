//! Tests of whole aggregations.

use std::collections::{BTreeMap, BTreeSet};

use super::encoding::{apply_mask, dequantize, pack, packed_bytes, unpack};
use super::keys::{sign, verifying_key};
use super::message::{KeyAdvertisement, RevealedShare, SurvivorList};
use super::*;
use crate::random::{derive, stream, unit};

const SERVER: Seed = [200; 32];

fn identity(client: ClientId) -> Seed {
    derive(&[9; 32], &[&client.to_le_bytes()])
}

fn settings(clients: u64, parameters: usize, drop_out: f64) -> CohortSettings {
    let identities = (0..clients).map(|client| (client, verifying_key(&identity(client)))).collect();
    CohortSettings::new(7, identities, verifying_key(&SERVER), parameters, drop_out, [3; 32]).unwrap()
}

/// A cohort in which clients drop out before their message of a stage.
struct Cohort {
    settings: CohortSettings,
    server: SecureServer,
    clients: BTreeMap<ClientId, SecureClient>,
    inputs: BTreeMap<ClientId, (Vec<f32>, u64)>,
    /// Everything that the clients sent.
    transcript: Vec<(ClientId, ClientMessage)>,
}

impl Cohort {
    fn new(settings: CohortSettings) -> Self {
        let client = |id: ClientId| {
            let secret = derive(&[4; 32], &[&id.to_le_bytes()]);
            SecureClient::new(settings.clone(), id, secret, identity(id)).unwrap()
        };
        let ids: Vec<ClientId> = settings.clients.keys().copied().collect();
        let mut rng = stream(&[5; 32], "inputs", 0);
        let mut input = || {
            let values = (0..settings.parameters).map(|_| (unit(&mut rng) * 20.0 - 10.0) as f32).collect();
            (values, 1 + (unit(&mut rng) * 1_000.0) as u64)
        };
        Self {
            clients: ids.iter().map(|id| (*id, client(*id))).collect(),
            inputs: ids.iter().map(|id| (*id, input())).collect(),
            server: SecureServer::new(settings.clone(), SERVER).unwrap(),
            settings,
            transcript: Vec::new(),
        }
    }

    /// Sends the keys of all clients.
    fn advertise_all(&mut self) -> Vec<SecureAction> {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        let mut send_keys = |client| {
            let keys = self.clients[&client].advertise();
            self.send(client, keys)
        };
        ids.into_iter().flat_map(&mut send_keys).collect()
    }

    /// The answer of a client, through its serialized state and message.
    fn answer(&mut self, client: ClientId, message: &ServerMessage) -> ClientMessage {
        let state = postcard::to_stdvec(&self.clients[&client]).unwrap();
        let mut restored: SecureClient = postcard::from_bytes(&state).unwrap();
        let (values, weight) = &self.inputs[&client];
        let answer = match message {
            ServerMessage::Shares(_) => restored.mask(message, values, *weight),
            other => restored.step(other.clone()),
        };
        self.clients.insert(client, restored);
        ClientMessage::decode(&answer.unwrap().encode()).unwrap()
    }

    fn send(&mut self, client: ClientId, message: ClientMessage) -> Vec<SecureAction> {
        self.transcript.push((client, message.clone()));
        self.server.step(SecureEvent::Message(client, message))
    }

    /// Runs the aggregation; `drop_out[stage]` disappear before their message of the stage. The server restarts at each stage.
    fn run(&mut self, drop_out: &[BTreeSet<ClientId>; 4]) -> Result<SecureSum, SecureError> {
        let mut gone = drop_out[0].clone();
        let mut actions = Vec::new();
        for client in self.clients.keys().copied().collect::<Vec<_>>() {
            if !gone.contains(&client) {
                let message = self.clients[&client].advertise();
                actions.extend(self.send(client, message));
            }
        }
        for stage in 1..=4 {
            if actions.is_empty() {
                actions = self.server.step(SecureEvent::Deadline);
            }
            let state = postcard::to_stdvec(&self.server).unwrap();
            self.server = postcard::from_bytes(&state).unwrap();
            gone.extend(drop_out.get(stage).into_iter().flatten());
            let mut next = Vec::new();
            for action in std::mem::take(&mut actions) {
                match action {
                    SecureAction::Send(client, message) if !gone.contains(&client) => {
                        let answer = self.answer(client, &message);
                        next.extend(self.send(client, answer));
                    }
                    SecureAction::Send(..) => {}
                    SecureAction::Complete(sum) => return Ok(sum),
                    SecureAction::Abort(error) => return Err(error),
                    SecureAction::Refuse(client, error) => panic!("client {client}: {error}"),
                }
            }
            actions = next;
        }
        panic!("the aggregation did not end");
    }

    /// The sum of the encoded inputs of `clients`.
    fn expected(&self, clients: &BTreeSet<ClientId>) -> (Vec<f64>, u64) {
        let CohortSettings { parameters, clip, level_bits, .. } = self.settings;
        let mut sum = vec![0; parameters + 1];
        for client in clients {
            let (values, weight) = &self.inputs[client];
            let encoded = self.clients[client].encode(values, *weight);
            sum.iter_mut().zip(encoded).for_each(|(sum, value)| *sum += value);
        }
        let weight = sum.pop().unwrap();
        (sum.into_iter().map(|value| dequantize(value, clients.len(), clip, level_bits)).collect(), weight)
    }
}

fn no_drop_outs() -> [BTreeSet<ClientId>; 4] {
    std::array::from_fn(|_| BTreeSet::new())
}

#[test]
fn sum_is_exact_with_up_to_a_third_dropping_out_at_every_stage() {
    for count in [3, 12, 21] {
        for stage in 0..4 {
            for dropped in [count / 6, count / 3] {
                let mut cohort = Cohort::new(settings(count, 20, 1.0 / 3.0));
                let mut drop_out = no_drop_outs();
                drop_out[stage] = (0..dropped).map(|i| (i * 2 + stage as u64) % count).collect();
                let sum = cohort.run(&drop_out).unwrap();
                let missing = if stage < 3 { drop_out[stage].len() } else { 0 };
                assert_eq!(sum.clients.len() + missing, count as usize, "stage {stage}");
                let (values, weight) = cohort.expected(&sum.clients);
                assert_eq!((sum.scaled, sum.weight), (values, weight), "{count} clients, {dropped} dropped at {stage}");
            }
        }
    }
}

#[test]
fn sum_is_exact_on_a_sparse_graph_with_drop_outs_at_all_stages() {
    let mut cohort = Cohort::new(settings(70, 10, 0.15));
    assert!(cohort.settings.neighbours < 69);
    let drop_out = std::array::from_fn(|stage| (0..4).map(|i| (i * 17 + stage as u64 * 5) % 70).collect());
    let sum = cohort.run(&drop_out).unwrap();
    let (values, weight) = cohort.expected(&sum.clients);
    assert_eq!((sum.scaled.clone(), sum.weight), (values, weight));
    // The encoded mean is close to the true one.
    let members = || sum.clients.iter().map(|client| &cohort.inputs[client]);
    let total: f64 = members().map(|(values, weight)| f64::from(values[0].clamp(-8.0, 8.0)) * *weight as f64).sum();
    let mean = total / members().map(|(_, weight)| *weight as f64).sum::<f64>();
    assert!((sum.weighted_mean()[0] - mean).abs() < 0.02, "{} {mean}", sum.weighted_mean()[0]);
    let over_clients = sum.mean_over_clients()[0] * sum.clients.len() as f64;
    assert!((over_clients - sum.scaled[0]).abs() < 1e-9);
}

#[test]
fn below_the_threshold_the_aggregation_aborts_and_no_share_is_revealed() {
    for stage in 0..4 {
        let mut cohort = Cohort::new(settings(12, 5, 1.0 / 3.0));
        let mut drop_out = no_drop_outs();
        drop_out[stage] = (0..6).collect();
        assert_eq!(cohort.run(&drop_out), Err(SecureError::BelowThreshold), "stage {stage}");
        let revealed = cohort.transcript.iter().filter(|(_, message)| matches!(message, ClientMessage::Unmask(_)));
        // Those that answer the last stage are fewer than the threshold.
        assert!(revealed.count() < cohort.settings.threshold);
        assert!(cohort.server.step(SecureEvent::Deadline).is_empty(), "ended");
    }
}

#[test]
fn shares_below_the_threshold_and_updates_below_the_minimum_each_end_the_aggregation() {
    // Of six clients a secret needs four shares; the minimum is below and above that.
    for (minimum, missing) in [(2, 3), (6, 1)] {
        for stage in 0..3 {
            let mut cohort = Cohort::new(CohortSettings { minimum, ..settings(6, 5, 0.3) });
            let mut drop_out = no_drop_outs();
            drop_out[stage] = (0..missing).collect();
            assert_eq!(cohort.run(&drop_out), Err(SecureError::BelowThreshold), "minimum {minimum}, stage {stage}");
            let last = match cohort.transcript.last().unwrap().1 {
                ClientMessage::Keys(_) => 0,
                ClientMessage::Shares(_) => 1,
                ClientMessage::Input(_) => 2,
                ClientMessage::Unmask(_) => 3,
            };
            assert_eq!(last, stage, "the next stage does not begin");
        }
    }
}

/// Runs until the clients have masked their inputs. Returns the request to unmask.
fn until_unmask(cohort: &mut Cohort) -> SurvivorList {
    until_unmask_with(cohort, |_, input| Some(input))
}

/// As `until_unmask`, with what each client sends as its input; `None` if it disappears.
fn until_unmask_with(
    cohort: &mut Cohort,
    input: impl Fn(ClientId, ClientMessage) -> Option<ClientMessage>,
) -> SurvivorList {
    let mut actions = Vec::new();
    for client in cohort.clients.keys().copied().collect::<Vec<_>>() {
        let message = cohort.clients[&client].advertise();
        actions.extend(cohort.send(client, message));
    }
    for stage in 1..=2 {
        for action in std::mem::take(&mut actions) {
            let SecureAction::Send(client, message) = action else { panic!("{action:?}") };
            let answer = cohort.answer(client, &message);
            if let Some(answer) = if stage == 2 { input(client, answer) } else { Some(answer) } {
                actions.extend(cohort.send(client, answer));
            }
        }
    }
    if actions.is_empty() {
        actions = cohort.server.step(SecureEvent::Deadline);
    }
    match actions.swap_remove(0) {
        SecureAction::Send(_, ServerMessage::Survivors(list)) => list,
        other => panic!("{other:?}"),
    }
}

fn signed(mut list: SurvivorList) -> SurvivorList {
    list.signature = sign(&SERVER, &list.signed_bytes(7));
    list
}

#[test]
fn client_refuses_to_reveal_both_kinds_of_shares() {
    let mut cohort = Cohort::new(settings(6, 5, 0.3));
    let list = until_unmask(&mut cohort);
    let client = cohort.clients.get_mut(&0).unwrap();
    let request = |list: &SurvivorList| ServerMessage::Survivors(list.clone());
    let forged = SurvivorList { survivors: (0..5).collect(), ..list.clone() };
    assert_eq!(client.step(request(&forged)), Err(SecureError::InvalidSignature));
    let forged = SurvivorList { dropped: BTreeSet::from([5]), ..list.clone() };
    assert_eq!(client.step(request(&forged)), Err(SecureError::InvalidSignature));
    let of_another_round = SurvivorList { signature: sign(&SERVER, &list.signed_bytes(6)), ..list.clone() };
    assert_eq!(client.step(request(&of_another_round)), Err(SecureError::InvalidSignature));
    let both = signed(SurvivorList { dropped: BTreeSet::from([3]), ..list.clone() });
    assert_eq!(client.step(request(&both)), Err(SecureError::BothKinds));
    let few = signed(SurvivorList { survivors: (0..2).collect(), dropped: (2..6).collect(), ..list.clone() });
    assert_eq!(client.step(request(&few)), Err(SecureError::BelowThreshold));
    let first = client.step(request(&list)).unwrap();
    assert_eq!(client.step(request(&list)).unwrap(), first, "the same list has the same answer");
    let other = signed(SurvivorList { survivors: (0..5).collect(), dropped: BTreeSet::from([5]), ..list });
    assert_eq!(client.step(request(&other)), Err(SecureError::BothKinds));
}

fn keys_of(cohort: &Cohort, clients: impl IntoIterator<Item = ClientId>) -> BTreeMap<ClientId, KeyAdvertisement> {
    let keys = |id: ClientId| match cohort.clients[&id].advertise() {
        ClientMessage::Keys(keys) => keys,
        other => panic!("{other:?}"),
    };
    clients.into_iter().map(|id| (id, keys(id))).collect()
}

#[test]
fn client_shares_its_secrets_once_and_with_neighbours_that_signed_their_keys() {
    let mut cohort = Cohort::new(settings(6, 5, 0.3));
    let keys = keys_of(&cohort, 1..6);
    let (with_own, few, fewer) = (keys_of(&cohort, 0..6), keys_of(&cohort, 1..3), keys_of(&cohort, 1..5));
    let client = cohort.clients.get_mut(&0).unwrap();
    let no_shares = ServerMessage::Shares(BTreeMap::new());
    assert_eq!(client.mask(&no_shares, &[0.0; 5], 1), Err(SecureError::WrongStage), "before the keys");
    let list = signed(SurvivorList { survivors: (0..6).collect(), dropped: BTreeSet::new(), signature: vec![] });
    assert_eq!(client.step(ServerMessage::Survivors(list)), Err(SecureError::WrongStage), "before the input");
    let exchanged = keys.iter().map(|(id, own)| (*id, if *id == 1 { keys[&2].clone() } else { own.clone() }));
    let exchanged = ServerMessage::Keys(exchanged.collect());
    assert_eq!(client.step(exchanged), Err(SecureError::InvalidSignature), "a key of the server's choice");
    let altered: [fn(&mut KeyAdvertisement); 3] =
        [|it| it.sealing[0] ^= 1, |it| it.masking[0] ^= 1, |it| it.commitment[0] ^= 1];
    for alter in altered {
        let mut keys = keys.clone();
        alter(keys.get_mut(&1).unwrap());
        assert_eq!(client.step(ServerMessage::Keys(keys)), Err(SecureError::InvalidSignature));
    }
    assert_eq!(client.step(ServerMessage::Keys(with_own)), Err(SecureError::NotInCohort(0)), "no neighbour");
    assert_eq!(client.step(ServerMessage::Keys(few)), Err(SecureError::BelowThreshold));
    let shares = client.step(ServerMessage::Keys(keys.clone())).unwrap();
    assert_eq!(client.step(ServerMessage::Keys(keys)).unwrap(), shares, "a repeated message has the same answer");
    assert_eq!(client.step(ServerMessage::Keys(fewer)), Err(SecureError::Conflict));
    assert_eq!(client.mask(&no_shares, &[0.0; 5], 1), Err(SecureError::BelowThreshold));
    let unsafe_settings = CohortSettings { minimum: 1, ..cohort.settings };
    assert!(matches!(SecureClient::new(unsafe_settings, 0, [1; 32], identity(0)), Err(SecureError::Input(_))));
}

#[test]
fn client_reveals_shares_only_for_a_list_that_it_can_belong_to() {
    for (minimum, few) in [(2, 0..3), (6, 0..5)] {
        let mut cohort = Cohort::new(CohortSettings { minimum, ..settings(6, 5, 0.3) });
        let keys = keys_of(&cohort, 1..6);
        let list = until_unmask(&mut cohort);
        let client = cohort.clients.get_mut(&0).unwrap();
        assert_eq!(client.step(ServerMessage::Keys(keys)), Err(SecureError::WrongStage), "the input is sent");
        let mut answer = |survivors: BTreeSet<ClientId>| {
            let list = SurvivorList { survivors, dropped: BTreeSet::new(), ..list.clone() };
            client.step(ServerMessage::Survivors(signed(list)))
        };
        let strangers = (0..6).chain([77]).collect();
        assert_eq!(answer(strangers), Err(SecureError::NotInCohort(0)));
        assert_eq!(answer((1..6).collect()), Err(SecureError::NotInCohort(0)), "its own input is not in the sum");
        assert_eq!(answer(few.collect()), Err(SecureError::BelowThreshold));
        if minimum == 2 {
            let Ok(ClientMessage::Unmask(shares)) = answer((0..5).collect()) else { panic!("shares") };
            assert_eq!(shares.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4], "5 is on neither list");
        }
    }
}

#[test]
fn sum_with_exchanged_shares_or_an_altered_input_is_not_released() {
    let bits = settings(6, 5, 0.3).modulus_bits;
    let altered = |place: usize, by: u64| {
        let settings = CohortSettings { max_weight: 1, ..settings(6, 5, 0.3) };
        let mut cohort = Cohort::new(settings.clone());
        cohort.inputs.values_mut().for_each(|(values, weight)| (*values, *weight) = (vec![0.0; 5], 1));
        let list = until_unmask_with(&mut cohort, |client, input| match input {
            ClientMessage::Input(packed) if client == 0 => {
                let mut values = unpack(&packed, settings.values(), bits).unwrap();
                values[place] = values[place].wrapping_add(by) & (u64::MAX >> (64 - bits));
                Some(ClientMessage::Input(pack(&values, bits)))
            }
            input => Some(input),
        });
        finish(&mut cohort, &list, |_, shares| shares)
    };
    assert!(altered(0, 0).is_ok());
    assert_eq!(altered(0, 1 << 18), Err(SecureError::InvalidVector), "above what six clients can reach");
    assert_eq!(altered(5, 1), Err(SecureError::InvalidVector), "a weight above the largest");
    // Shares of the owners 1 and 2, which survive, and of 4 and 5, which dropped out.
    for (a, b) in [(1, 2), (4, 5)] {
        let mut cohort = Cohort::new(settings(6, 5, 0.3));
        let list = until_unmask_with(&mut cohort, |client, input| (client < 4).then_some(input));
        let result = finish(&mut cohort, &list, |_, mut shares| {
            let (of_a, of_b) = (shares[&a].clone(), shares[&b].clone());
            shares.extend([(a, of_b), (b, of_a)]);
            shares
        });
        assert_eq!(result, Err(SecureError::InvalidShare), "{a} {b}");
    }
}

/// Lets the survivors reveal their shares, as `alter` changes them.
fn finish(
    cohort: &mut Cohort,
    list: &SurvivorList,
    alter: impl Fn(ClientId, BTreeMap<ClientId, RevealedShare>) -> BTreeMap<ClientId, RevealedShare>,
) -> Result<SecureSum, SecureError> {
    let mut actions = Vec::new();
    for client in list.survivors.clone() {
        let answer = cohort.answer(client, &ServerMessage::Survivors(list.clone()));
        let ClientMessage::Unmask(shares) = answer else { panic!("{answer:?}") };
        actions.extend(cohort.send(client, ClientMessage::Unmask(alter(client, shares))));
    }
    match actions.swap_remove(0) {
        SecureAction::Complete(sum) => Ok(sum),
        SecureAction::Abort(error) => Err(error),
        other => panic!("{other:?}"),
    }
}

#[test]
fn server_refuses_shares_that_leave_out_a_neighbour() {
    let mut cohort = Cohort::new(settings(4, 5, 0.3));
    let actions = cohort.advertise_all();
    let SecureAction::Send(0, keys) = &actions[0] else { panic!("{actions:?}") };
    let ClientMessage::Shares(mut sealed) = cohort.answer(0, keys) else { panic!("shares") };
    sealed.remove(&3);
    let refused = cohort.send(0, ClientMessage::Shares(sealed));
    assert_eq!(refused, [SecureAction::Refuse(0, SecureError::InvalidShare)]);
}

#[test]
fn server_refuses_duplicate_foreign_and_damaged_messages() {
    let mut cohort = Cohort::new(settings(4, 5, 0.3));
    let keys = cohort.clients[&0].advertise();
    let refused = |actions: Vec<SecureAction>| match &actions[..] {
        [SecureAction::Refuse(_, error)] => error.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(cohort.send(9, keys.clone())), SecureError::NotInCohort(9));
    assert_eq!(refused(cohort.send(1, keys.clone())), SecureError::InvalidSignature, "keys of another client");
    assert_eq!(refused(cohort.send(0, ClientMessage::Input(vec![]))), SecureError::WrongStage);
    assert!(cohort.send(0, keys.clone()).is_empty());
    assert!(cohort.send(0, keys).is_empty(), "a repeated message changes nothing");
    let foreign = cohort.clients[&1].advertise();
    assert_eq!(refused(cohort.send(0, foreign)), SecureError::Conflict);
    let mut cohort = Cohort::new(settings(4, 5, 0.3));
    let list = until_unmask(&mut cohort);
    let ClientMessage::Unmask(shares) = cohort.answer(0, &ServerMessage::Survivors(list)) else { panic!() };
    let wrong_kind = shares.iter().map(|(owner, share)| {
        let RevealedShare::SelfMask(share) = share.clone() else { panic!() };
        (*owner, RevealedShare::MaskingSecret(share))
    });
    assert_eq!(refused(cohort.send(0, ClientMessage::Unmask(wrong_kind.collect()))), SecureError::BothKinds);
    assert_eq!(refused(cohort.send(1, ClientMessage::Unmask(shares.clone()))), SecureError::InvalidShare);
    assert!(cohort.send(0, ClientMessage::Unmask(shares)).is_empty());
    assert!(ClientMessage::decode(&[250, 1]).is_err());
}

#[test]
fn server_refuses_the_self_mask_of_a_dropped_client() {
    let mut cohort = Cohort::new(settings(6, 5, 0.3));
    let list = until_unmask_with(&mut cohort, |client, input| (client < 4).then_some(input));
    let ClientMessage::Unmask(mut shares) = cohort.answer(0, &ServerMessage::Survivors(list)) else { panic!() };
    let RevealedShare::MaskingSecret(share) = shares[&5].clone() else { panic!("5 dropped out") };
    // Neither kind of share shows its content in a log.
    assert_eq!(format!("{:?}", shares[&5]), "MaskingSecret(SecretShare(1))");
    assert_eq!(format!("{:?}", shares[&1]), "SelfMask(SecretShare(1))");
    shares.insert(5, RevealedShare::SelfMask(share));
    let refused = cohort.send(0, ClientMessage::Unmask(shares));
    assert_eq!(refused, [SecureAction::Refuse(0, SecureError::BothKinds)]);
}

#[test]
fn by_default_two_thirds_of_a_cohort_have_to_be_in_the_sum() {
    for (clients, minimum) in [(3, 2), (4, 3), (10, 7), (12, 8), (70, 47)] {
        assert_eq!(settings(clients, 1, 0.15).minimum, minimum, "{clients} clients");
    }
}

#[test]
fn keys_of_a_client_belong_to_one_round_and_one_client() {
    let keys = |round, client| {
        let settings = CohortSettings { round, ..settings(3, 2, 0.3) };
        match SecureClient::new(settings, client, [4; 32], identity(client)).unwrap().advertise() {
            ClientMessage::Keys(keys) => [keys.sealing, keys.masking, keys.commitment],
            other => panic!("{other:?}"),
        }
    };
    let all: BTreeSet<Seed> = [(7, 0), (8, 0), (7, 1)].into_iter().flat_map(|(round, id)| keys(round, id)).collect();
    assert_eq!(all.len(), 9, "the same secret bytes give other keys for another round, client or purpose");
}

#[test]
fn values_are_clipped_before_they_are_weighted() {
    let settings = CohortSettings { max_weight: 4, clip: 8.0, ..settings(3, 2, 0.3) };
    let client = SecureClient::new(settings.clone(), 0, [1; 32], identity(0)).unwrap();
    let encoded = client.encode(&[1_000.0, -1_000.0], 1);
    let decoded = [0, 1].map(|place: usize| dequantize(encoded[place], 1, 8.0, settings.level_bits));
    // A quarter of the weight: a quarter of the clipping bound, within one level.
    let level = 16.0 / f64::from((1 << settings.level_bits) - 1);
    assert!((decoded[0] - 2.0).abs() <= level && (decoded[1] + 2.0).abs() <= level, "{decoded:?}");
    assert_eq!(encoded[2], 1, "the weight");
}

#[test]
fn client_masks_one_input_per_round_and_checks_it() {
    let mut cohort = Cohort::new(settings(3, 2, 0.3));
    let actions = cohort.advertise_all();
    let mut delivery = Vec::new();
    for action in actions {
        let SecureAction::Send(client, message) = action else { panic!("{action:?}") };
        let answer = cohort.answer(client, &message);
        delivery.extend(cohort.send(client, answer));
    }
    let SecureAction::Send(0, shares) = &delivery[0] else { panic!("{delivery:?}") };
    let client = cohort.clients.get_mut(&0).unwrap();
    assert!(client.mask(shares, &[1.0], 1).is_err(), "length");
    assert!(client.mask(shares, &[1.0, f32::NAN], 1).is_err());
    assert!(client.mask(shares, &[1.0, 2.0], 0).is_err(), "weight");
    let first = client.mask(shares, &[1.0, 2.0], 5).unwrap();
    assert_eq!(client.mask(shares, &[-3.0, 0.5], 5).unwrap(), first, "another input under the same masks is not sent");
    let stranger = SecureClient::new(cohort.settings.clone(), 0, [1; 32], identity(1));
    assert!(matches!(stranger, Err(SecureError::NotInCohort(0))));
}

/// Chi-square of the top and of the low 4 bits of values modulo 2^bits, 15 degrees of freedom each.
fn chi_squares(values: &[u64], bits: u32) -> [f64; 2] {
    [bits - 4, 0].map(|shift| {
        let mut counts = [0.0_f64; 16];
        values.iter().for_each(|value| counts[(value >> shift & 15) as usize] += 1.0);
        let expected = values.len() as f64 / 16.0;
        counts.iter().map(|count| (count - expected).powi(2) / expected).sum()
    })
}

/// Exceeded with probability 1e-6.
const CHI_LIMIT: f64 = 56.5;

/// What the server and colluding clients can strip from the input of client 0.
fn stripped(cohort: &Cohort, colluding: &BTreeSet<ClientId>, self_mask: bool) -> Vec<u64> {
    let bits = cohort.settings.modulus_bits;
    let (_, message) =
        cohort.transcript.iter().find(|(id, m)| *id == 0 && matches!(m, ClientMessage::Input(_))).unwrap();
    let ClientMessage::Input(packed) = message else { panic!() };
    let mut values = unpack(packed, cohort.settings.values(), bits).unwrap();
    let advertised = |id: ClientId| match cohort.clients[&id].advertise() {
        ClientMessage::Keys(keys) => keys,
        other => panic!("{other:?}"),
    };
    for id in colluding {
        // Client 0 is the smaller number and adds the mask.
        let key = cohort.clients[id].agreed(b"mask", b"masking", 0, &advertised(0).masking).unwrap();
        apply_mask(&mut values, &key, true, bits);
    }
    if self_mask {
        apply_mask(&mut values, &cohort.clients[&0].secret_for(b"self mask"), true, bits);
    }
    values
}

#[test]
fn transcript_and_all_clients_below_the_threshold_say_nothing_about_an_input() {
    let mut cohort = Cohort::new(settings(9, 20_000, 0.3));
    // An input that would be visible at once.
    cohort.inputs.insert(0, (vec![8.0; 20_000], 1_000));
    let threshold = cohort.settings.threshold;
    let sum = cohort.run(&no_drop_outs()).unwrap();
    assert_eq!(sum.clients.len(), 9);
    let bits = cohort.settings.modulus_bits;
    let colluding: BTreeSet<ClientId> = (1..threshold as u64).collect();
    // The server knows the self masks of all survivors, since it unmasked the sum.
    let seen = stripped(&cohort, &colluding, true);
    let chi = chi_squares(&seen, bits);
    assert!(chi.iter().all(|chi| *chi < CHI_LIMIT), "{chi:?}");
    // The test detects an input without its masks: every other client colludes.
    let exposed = chi_squares(&stripped(&cohort, &(1..9).collect(), true), bits);
    assert!(exposed.iter().any(|chi| *chi > 1_000.0), "{exposed:?}");
    let alone = chi_squares(&stripped(&cohort, &(1..9).collect(), false), bits);
    assert!(alone.iter().all(|chi| *chi < CHI_LIMIT), "the self mask alone hides it: {alone:?}");
}

#[test]
fn masked_values_of_two_rounds_are_unrelated() {
    let run = |round| {
        let mut cohort = Cohort::new(CohortSettings { round, ..settings(3, 5_000, 0.3) });
        cohort.run(&no_drop_outs()).unwrap();
        stripped(&cohort, &BTreeSet::new(), false)
    };
    let bits = settings(3, 5_000, 0.3).modulus_bits;
    let difference: Vec<u64> =
        run(1).iter().zip(run(2)).map(|(a, b)| a.wrapping_sub(b) & (u64::MAX >> (64 - bits))).collect();
    let chi = chi_squares(&difference, bits);
    assert!(chi.iter().all(|chi| *chi < CHI_LIMIT), "{chi:?}");
}

#[test]
fn expansion_stays_below_one_point_seven() {
    let (count, parameters) = (1_024, 1 << 20);
    let settings = settings(count, parameters, 0.1);
    assert_eq!((settings.level_bits, settings.modulus_bits), (16, 26));
    let mut own = SecureClient::new(settings.clone(), 0, [1; 32], identity(0)).unwrap();
    let neighbours = settings.graph().remove(&0).unwrap();
    let others: BTreeMap<ClientId, SecureClient> = neighbours
        .iter()
        .map(|id| (*id, SecureClient::new(settings.clone(), *id, [2; 32], identity(*id)).unwrap()))
        .collect();
    let keys = |client: &SecureClient| match client.advertise() {
        ClientMessage::Keys(keys) => keys,
        other => panic!("{other:?}"),
    };
    let near = others.iter().map(|(id, client)| (*id, keys(client))).collect();
    let shares = own.step(ServerMessage::Keys(near)).unwrap();
    // Sealed shares of one size: those that the neighbours would send are as long as the own ones.
    let ClientMessage::Shares(sealed) = &shares else { panic!() };
    let unmask_bytes: usize = sealed.values().map(Vec::len).sum();
    let input = packed_bytes(settings.values(), settings.modulus_bits) + 8;
    let total = own.advertise().encode().len() + shares.encode().len() + input + unmask_bytes;
    let expansion = total as f64 / (parameters * 2) as f64;
    assert!(expansion <= 1.7, "{expansion}");
    assert!(expansion > 1.625, "{expansion}");
}

#[test]
fn settings_that_would_expose_inputs_or_overflow_are_refused() {
    let valid = settings(10, 5, 0.3);
    let refused = |settings: CohortSettings| settings.validate().unwrap_err().field;
    assert_eq!(refused(CohortSettings { modulus_bits: 19, ..valid.clone() }), "modulusBits");
    assert_eq!(refused(CohortSettings { threshold: 4, ..valid.clone() }), "threshold");
    assert_eq!(refused(CohortSettings { minimum: 1, ..valid.clone() }), "minimum");
    assert_eq!(refused(CohortSettings { max_weight: 1 << 16, ..valid.clone() }), "maxWeight");
    assert_eq!(refused(CohortSettings { neighbours: 3, ..valid.clone() }), "neighbours");
    assert_eq!(refused(CohortSettings { clip: f64::NAN, ..valid.clone() }), "clip");
    assert_eq!(refused(CohortSettings { parameters: 0, ..valid.clone() }), "parameters");
    assert_eq!(refused(CohortSettings { level_bits: 1, max_weight: 1, ..valid.clone() }), "levelBits");
    let two = valid.clients.clone().into_iter().take(2).collect();
    assert_eq!(refused(CohortSettings { clients: two, neighbours: 1, threshold: 1, ..valid }), "clients");
    let new = |drop_out| CohortSettings::new(1, valid.clients.clone(), [0; 32], 5, drop_out, [0; 32]).map(drop);
    assert_eq!(new(0.35).unwrap_err().field, "dropOut");
    assert!(CohortSettings::new(1, BTreeMap::new(), [0; 32], 5, 0.3, [0; 32]).is_err());
    assert!(matches!(SecureServer::new(valid, [1; 32]), Err(SecureError::Input(_))));
}
