//! The initial state.

use crate::bounds::Bounds;
use crate::state::{Node, ProcessReport, World};
use crate::step::Step;
use engram_cluster::{Change, Entry};
use engram_memory::Ordinal;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Bounds {
    /// Returns the initial state: all have read the first map, and its primary serves and has opened its followers. How
    /// it gets there is checked at every later term.
    pub(crate) fn start(&self) -> World {
        let nodes = self.ordinals().map(|ordinal| Arc::new(Node::new(ordinal.0))).collect::<Vec<_>>();
        let members = nodes.iter().take(self.replicas).map(|node| node.me).collect();
        let reported = nodes.iter().map(|node| ProcessReport { member: node.me, lossless_since: node.lossless_since });
        let mut world = World {
            maps: vec![Arc::new(Entry::first(members))],
            reported: reported.collect(),
            nodes,
            net: BTreeSet::new(),
            proposals: BTreeSet::new(),
            committed: Vec::new(),
            harm: None,
            previous_isr: Vec::new(),
            power: 0,
            kills: 0,
            stops: 0,
            disks: 0,
            learner_changes: 0,
            leavings: 0,
            transfers: 0,
            suspicions: 0,
            reconnects: 0,
            snapshots: 0,
            reached: 0,
        };
        for ordinal in self.ordinals() {
            self.start_process(&mut world, ordinal);
        }
        self.ordinals().take(self.replicas).for_each(|ordinal| self.apply_step(&mut world, &Step::Learn(ordinal, 0)));
        for _ in 0..2 * self.replicas {
            self.ordinals().for_each(|ordinal| self.apply_step(&mut world, &Step::Keep(ordinal)));
            for envelope in std::mem::take(&mut world.net) {
                self.apply_step(&mut world, &Step::Deliver(envelope));
            }
        }
        world.net.clear();
        if self.forked {
            self.fork(&mut world);
        }
        world
    }

    /// The first primary logged an operation that no one else has, and was deposed; its successor committed another
    /// one, took a snapshot, and serves as a new process without the history below.
    fn fork(&self, world: &mut World) {
        let (old, new) = (Ordinal(0), Ordinal(1));
        self.apply_step(world, &Step::Write(old, 0));
        world.net.clear();
        self.elect(world, new);
        self.apply_step(world, &Step::Write(new, 1));
        self.apply_step(world, &Step::Flush(new, 0));
        self.apply_step(world, &Step::Snapshot(new));
        self.apply_step(world, &Step::Kill(new));
        self.apply_step(world, &Step::Restart(new));
        self.apply_step(world, &Step::Observe(new));
        self.elect(world, new);
        world.net.clear();
        (world.kills, world.snapshots) = (0, 0);
    }

    /// Promotes a process, alone, until it serves.
    fn elect(&self, world: &mut World, ordinal: Ordinal) {
        let member = world.reported[ordinal.0 as usize].member;
        let promote = Change::Promote { primary: member, isr: vec![ordinal] };
        let expected = world.entry().expectation();
        self.apply_step(world, &Step::Apply(expected, promote));
        let newest = |world: &World| Step::Learn(ordinal, world.maps.len() - 1);
        self.apply_step(world, &newest(world));
        self.apply_step(world, &Step::Keep(ordinal));
        self.apply_step(world, &Step::Flush(ordinal, 0));
        let expected = world.entry().expectation();
        self.apply_step(world, &Step::Apply(expected, Change::Activate));
        self.apply_step(world, &newest(world));
        self.forget(world);
        assert_eq!(world.at(ordinal).serves(), Some(world.entry().term), "the promoted process serves");
    }
}
