//! What this worker knows of its cluster: the map and the members, as the coordinator told them last.

use engram_client::{Map, Placement, Worker};
use engram_cluster::PartitionMap;
use engram_coordinator::wire;
use engram_memory::{ClusterId, Incarnation, Ordinal, PartitionId};
use engram_proto::v1;
use prost::Message as _;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;

/// The map and the members.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    pub(crate) map: Option<Arc<PartitionMap>>,
    pub(crate) members: Vec<v1::MemberEntry>,
}

impl View {
    /// Takes what a coordinator says; whether anything is new. An older map, or one of another cluster or size, is not taken.
    pub(crate) fn take(&mut self, reply: &v1::BeatReply, cluster: ClusterId, partitions: u32) -> bool {
        let mut news = false;
        if let Some(told) = &reply.map {
            match wire::map_from_proto(told) {
                Ok(map) => news |= self.take_map(map, cluster, partitions),
                Err(error) => tracing::error!(%error, "refused a malformed partition map"),
            }
        }
        if !reply.members.is_empty() && reply.members != self.members {
            let members = self.with_unheard(&reply.members);
            news |= members != self.members;
            self.members = members;
        }
        news
    }

    /// What a coordinator says of the members. Whom it has not heard since its own start is where it was, as long as the map names it.
    fn with_unheard(&self, told: &[v1::MemberEntry]) -> Vec<v1::MemberEntry> {
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let named: BTreeSet<u32> = entries.flat_map(|entry| entry.candidates().map(|it| it.ordinal.0)).collect();
        let heard = |member: &v1::MemberEntry| told.iter().any(|it| it.ordinal == member.ordinal);
        let unheard = self.members.iter().filter(|it| named.contains(&it.ordinal) && !heard(it));
        let mut members: Vec<_> = told.iter().chain(unheard).cloned().collect();
        members.sort_by_key(|member| member.ordinal);
        members
    }

    /// Takes a map, if it is newer than the one known and of this cluster and size; whether it is.
    pub(crate) fn take_map(&mut self, map: PartitionMap, cluster: ClusterId, partitions: u32) -> bool {
        if map.cluster != cluster || map.partitions.len() != partitions as usize {
            let (cluster, partitions) = (map.cluster, map.partitions.len());
            tracing::error!(%cluster, partitions, "refused a partition map of another cluster or size");
            return false;
        }
        let newer = self.map.as_ref().is_none_or(|known| known.version < map.version);
        if newer {
            self.map = Some(Arc::new(map));
        }
        newer
    }

    /// Who serves a partition by the map.
    pub(crate) fn owner(&self, partition: PartitionId) -> Option<Ordinal> {
        let map = self.map.as_ref()?;
        map.partitions.get(partition.0 as usize).map(|entry| entry.primary)
    }

    /// Who is about to be stopped and leads nothing any more.
    pub(crate) fn leavers(&self) -> BTreeSet<Ordinal> {
        let leave = self.members.iter().filter(|member| member.alive && member.leaving);
        let mut leavers: BTreeSet<Ordinal> = leave.map(|member| Ordinal(member.ordinal)).collect();
        if !leavers.is_empty() {
            let entries = self.map.iter().flat_map(|map| &map.partitions);
            let leads: BTreeSet<Ordinal> = entries.map(|entry| entry.primary).collect();
            leavers.retain(|ordinal| !leads.contains(ordinal));
        }
        leavers
    }

    /// Version of the map; 0 = none.
    pub(crate) fn version(&self) -> u64 {
        self.map.as_ref().map_or(0, |map| map.version)
    }

    /// The map as clients see it.
    pub(crate) fn client_map(&self, cluster_name: &str, feature_dimension: u32) -> Option<Map> {
        let map = self.map.as_ref()?;
        let worker = |member: &v1::MemberEntry| {
            let worker = Worker {
                incarnation: Incarnation(member.incarnation),
                client_address: member.client_address.clone(),
                peer_address: member.peer_address.clone(),
                http_address: member.http_address.clone(),
                alive: member.alive,
            };
            (Ordinal(member.ordinal), worker)
        };
        Some(Map {
            cluster: map.cluster,
            cluster_name: cluster_name.to_owned(),
            version: map.version,
            partitions: map
                .partitions
                .iter()
                .map(|entry| Placement { term: entry.term, primary: entry.primary })
                .collect(),
            in_sync: map.partitions.iter().map(in_sync).collect(),
            workers: self.members.iter().map(worker).collect(),
            feature_dimension,
        })
    }

    /// The map as it travels.
    pub(crate) fn map_reply(&self, cluster_name: &str, feature_dimension: u32) -> Option<v1::PartitionMapReply> {
        let map = self.map.as_ref()?;
        let entry = |entry: &engram_cluster::Entry| v1::PartitionEntry {
            term: entry.term.0,
            primary: entry.primary.0,
            in_sync: in_sync(entry).into_iter().map(|ordinal| ordinal.0).collect(),
        };
        let reply = v1::PartitionMapReply {
            cluster: engram_proto::answers::identity(map.cluster.0),
            version: map.version,
            cluster_name: cluster_name.to_owned(),
            partitions: map.partitions.iter().map(entry).collect(),
            members: self.members.clone(),
            feature_dimension,
            stamp: 0,
        };
        Some(v1::PartitionMapReply { stamp: stamp(&reply), ..reply })
    }
}

/// Stands for what an answer says; never 0.
fn stamp(reply: &v1::PartitionMapReply) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(&reply.encode_to_vec());
    hasher.finish().max(1)
}

/// Who has a copy in sync.
fn in_sync(entry: &engram_cluster::Entry) -> Vec<Ordinal> {
    entry.isr.iter().map(|member| member.ordinal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{Member, StoreId};

    #[test]
    fn whom_another_coordinator_has_not_heard_yet_keeps_its_address_as_long_as_the_map_names_it() {
        let member = |ordinal| Member { ordinal: Ordinal(ordinal), store: StoreId(1), incarnation: Incarnation(1) };
        let map = PartitionMap {
            cluster: ClusterId(7),
            version: 1,
            partitions: vec![Entry::first(vec![member(0), member(1)])],
        };
        let at = |ordinal, address: &str| v1::MemberEntry {
            ordinal,
            client_address: address.to_owned(),
            ..v1::MemberEntry::default()
        };
        let says = |members| v1::BeatReply { members, ..v1::BeatReply::default() };
        let mut view = View::default();
        view.take_map(map, ClusterId(7), 1);
        view.take(&says(vec![at(0, "a:1"), at(1, "b:1"), at(2, "c:1")]), ClusterId(7), 1);
        assert!(view.take(&says(vec![at(1, "b:2")]), ClusterId(7), 1));
        assert_eq!(view.members, [at(0, "a:1"), at(1, "b:2")], "nothing is on the third");
        assert!(!view.take(&says(vec![at(0, "a:1")]), ClusterId(7), 1), "no news");
    }
}
