//! What this worker knows of its cluster: the map and the members, as the coordinator reported them last.

use engram_client::{Map, Placement, Worker};
use engram_cluster::PartitionMap;
use engram_memory::{ClusterId, Incarnation, Ordinal, PartitionId};
use engram_proto::v1;
use engram_wire as wire;
use prost::Message as _;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;

/// The map and the members.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterView {
    pub(crate) map: Option<Arc<PartitionMap>>,
    pub(crate) members: Vec<v1::MemberEntry>,
}

impl ClusterView {
    /// Applies a coordinator's response; returns whether anything changed. An older map, or one of another cluster or size, is
    /// ignored.
    pub(crate) fn update(&mut self, reply: &v1::HeartbeatResponse, cluster: ClusterId, partitions: u32) -> bool {
        let mut changed = false;
        if let Some(reported) = &reply.map {
            match wire::map_from_proto(reported) {
                Ok(map) => changed |= self.update_map(map, cluster, partitions),
                Err(error) => tracing::error!(%error, "rejected a malformed partition map"),
            }
        }
        if !reply.members.is_empty() && reply.members != self.members {
            let members = self.merge_unreported(&reply.members);
            changed |= members != self.members;
            self.members = members;
        }
        changed
    }

    /// Merges the reported members with the current ones: a member that the coordinator has not heard since its own start keeps its
    /// last address as long as the map refers to it.
    fn merge_unreported(&self, reported: &[v1::MemberEntry]) -> Vec<v1::MemberEntry> {
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let referenced: BTreeSet<u32> = entries.flat_map(|entry| entry.candidates().map(|it| it.ordinal.0)).collect();
        let has_reported = |member: &v1::MemberEntry| reported.iter().any(|it| it.ordinal == member.ordinal);
        let unreported = self.members.iter().filter(|it| referenced.contains(&it.ordinal) && !has_reported(it));
        let mut members: Vec<_> = reported.iter().chain(unreported).cloned().collect();
        members.sort_by_key(|member| member.ordinal);
        members
    }

    /// Replaces the map if the new one is newer and of this cluster and size; returns whether it was replaced.
    pub(crate) fn update_map(&mut self, map: PartitionMap, cluster: ClusterId, partitions: u32) -> bool {
        if map.cluster != cluster || map.partitions.len() != partitions as usize {
            let (cluster, partitions) = (map.cluster, map.partitions.len());
            tracing::error!(%cluster, partitions, "rejected a partition map of another cluster or size");
            return false;
        }
        let newer = self.map.as_ref().is_none_or(|current| current.version < map.version);
        if newer {
            self.map = Some(Arc::new(map));
        }
        newer
    }

    /// Returns the primary of a partition by the map.
    pub(crate) fn primary(&self, partition: PartitionId) -> Option<Ordinal> {
        let map = self.map.as_ref()?;
        map.partitions.get(partition.0 as usize).map(|entry| entry.primary)
    }

    /// Returns the workers that are about to be stopped and are primary of no partition.
    pub(crate) fn leavers(&self) -> BTreeSet<Ordinal> {
        let leaving = self.members.iter().filter(|member| member.alive && member.leaving);
        let mut leavers: BTreeSet<Ordinal> = leaving.map(|member| Ordinal(member.ordinal)).collect();
        if !leavers.is_empty() {
            let entries = self.map.iter().flat_map(|map| &map.partitions);
            let primaries: BTreeSet<Ordinal> = entries.map(|entry| entry.primary).collect();
            leavers.retain(|ordinal| !primaries.contains(ordinal));
        }
        leavers
    }

    /// Returns the version of the map; 0 = none.
    pub(crate) fn version(&self) -> u64 {
        self.map.as_ref().map_or(0, |map| map.version)
    }

    /// Returns the map in the form that the client library uses.
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

    /// Returns the map as a response message.
    pub(crate) fn map_reply(&self, cluster_name: &str, feature_dimension: u32) -> Option<v1::GetPartitionMapResponse> {
        let map = self.map.as_ref()?;
        let entry = |entry: &engram_cluster::Entry| v1::PartitionEntry {
            term: entry.term.0,
            primary: entry.primary.0,
            in_sync: in_sync(entry).into_iter().map(|ordinal| ordinal.0).collect(),
        };
        let reply = v1::GetPartitionMapResponse {
            cluster: engram_proto::answers::identity(map.cluster.0),
            version: map.version,
            cluster_name: cluster_name.to_owned(),
            partitions: map.partitions.iter().map(entry).collect(),
            members: self.members.clone(),
            feature_dimension,
            stamp: 0,
        };
        Some(v1::GetPartitionMapResponse { stamp: stamp(&reply), ..reply })
    }
}

/// Returns a hash of a response; never 0.
fn stamp(reply: &v1::GetPartitionMapResponse) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(&reply.encode_to_vec());
    hasher.finish().max(1)
}

/// Returns the workers with in-sync replicas.
fn in_sync(entry: &engram_cluster::Entry) -> Vec<Ordinal> {
    entry.isr.iter().map(|member| member.ordinal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{Member, StoreId};

    #[test]
    fn an_unreported_member_keeps_its_address_while_the_map_refers_to_it() {
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
        let response = |members| v1::HeartbeatResponse { members, ..v1::HeartbeatResponse::default() };
        let mut view = ClusterView::default();
        view.update_map(map, ClusterId(7), 1);
        view.update(&response(vec![at(0, "a:1"), at(1, "b:1"), at(2, "c:1")]), ClusterId(7), 1);
        assert!(view.update(&response(vec![at(1, "b:2")]), ClusterId(7), 1));
        assert_eq!(view.members, [at(0, "a:1"), at(1, "b:2")], "the map does not refer to the third");
        assert!(!view.update(&response(vec![at(0, "a:1")]), ClusterId(7), 1), "nothing changed");
    }
}
