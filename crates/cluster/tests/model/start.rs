//! Where a model begins.

use crate::bounds::Bounds;
use crate::state::{Node, Statement, World};
use crate::step::Step;
use engram_cluster::{Change, Entry};
use engram_memory::Ordinal;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Bounds {
    /// Everybody has read the first map, and its primary serves and has opened its followers: how it does is seen at every later term.
    pub(crate) fn start(&self) -> World {
        let nodes = self.ordinals().map(|ordinal| Arc::new(Node::new(ordinal.0))).collect::<Vec<_>>();
        let members = nodes.iter().take(self.replicas).map(|node| node.me).collect();
        let stated = nodes.iter().map(|node| Statement { member: node.me, lossless_since: node.lossless_since });
        let mut world = World {
            maps: vec![Arc::new(Entry::first(members))],
            stated: stated.collect(),
            nodes,
            net: BTreeSet::new(),
            proposals: BTreeSet::new(),
            committed: Vec::new(),
            harm: None,
            ousted: Vec::new(),
            power: 0,
            kills: 0,
            stops: 0,
            disks: 0,
            hints: 0,
            departures: 0,
            drains: 0,
            doubts: 0,
            reconnects: 0,
            snapshots: 0,
            seen: 0,
        };
        for ordinal in self.ordinals() {
            self.start_process(&mut world, ordinal);
        }
        self.ordinals().take(self.replicas).for_each(|ordinal| self.take(&mut world, &Step::Learn(ordinal, 0)));
        for _ in 0..2 * self.replicas {
            self.ordinals().for_each(|ordinal| self.take(&mut world, &Step::Keep(ordinal)));
            for envelope in std::mem::take(&mut world.net) {
                self.take(&mut world, &Step::Deliver(envelope));
            }
        }
        world.net.clear();
        if self.forked {
            self.fork(&mut world);
        }
        world
    }

    /// The first primary logged an operation that nobody else has, and was deposed; its successor committed another one,
    /// made a snapshot of it, and serves as a new process that knows no names below.
    fn fork(&self, world: &mut World) {
        let (old, new) = (Ordinal(0), Ordinal(1));
        self.take(world, &Step::Write(old, 0));
        world.net.clear();
        self.elect(world, new);
        self.take(world, &Step::Write(new, 1));
        self.take(world, &Step::Flush(new, 0));
        self.take(world, &Step::Snapshot(new));
        self.take(world, &Step::Kill(new));
        self.take(world, &Step::Restart(new));
        self.take(world, &Step::Hear(new));
        self.elect(world, new);
        world.net.clear();
        (world.kills, world.snapshots) = (0, 0);
    }

    /// Promotes a process, alone, until it serves.
    fn elect(&self, world: &mut World, place: Ordinal) {
        let member = world.stated[place.0 as usize].member;
        let promote = Change::Promote { primary: member, isr: vec![place] };
        let expected = world.entry().expectation();
        self.take(world, &Step::Apply(expected, promote));
        let newest = |world: &World| Step::Learn(place, world.maps.len() - 1);
        self.take(world, &newest(world));
        self.take(world, &Step::Keep(place));
        self.take(world, &Step::Flush(place, 0));
        let expected = world.entry().expectation();
        self.take(world, &Step::Apply(expected, Change::Activate));
        self.take(world, &newest(world));
        self.forget(world);
        assert_eq!(world.at(place).serves(), Some(world.entry().term), "the start is as it is described");
    }
}
