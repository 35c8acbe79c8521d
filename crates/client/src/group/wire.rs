//! Conversions between the state machines of a group and the messages of services.

use engram_collective::group::{Cause, MemberId, Notice, Position, Prepared, Record, Report, Stage, Suspicion};
use engram_proto::v1;
use engram_proto::v1::group_notice::Notice as WireNotice;

/// Converts a position.
pub const fn position_to_wire(position: Position) -> v1::GroupPosition {
    v1::GroupPosition { step: position.step, digest: position.digest }
}

/// Converts a position; an absent one is that before the first step.
pub fn position_from_wire(wire: Option<v1::GroupPosition>) -> Position {
    wire.map_or_else(Position::default, |it| Position { step: it.step, digest: it.digest })
}

/// Converts a status.
pub fn report_to_wire(report: &Report) -> v1::GroupReport {
    let stage = match report.stage {
        Stage::Outside => v1::GroupStage::Outside,
        Stage::Paused => v1::GroupStage::Paused,
        Stage::Computing => v1::GroupStage::Computing,
        Stage::Reducing => v1::GroupStage::Reducing,
        Stage::Flagged => v1::GroupStage::Flagged,
        Stage::Fenced => v1::GroupStage::Fenced,
    };
    v1::GroupReport {
        generation: report.generation,
        stage: stage.into(),
        fence_term: report.fence.0,
        fence_generation: report.fence.1,
        position: Some(position_to_wire(report.position)),
        skipped: report.skipped,
        prepared: report.prepared.map(|it| v1::PreparedStep {
            generation: it.generation,
            step: it.step,
            valid: it.valid,
        }),
        suspicion: report.suspicion.map(|it| v1::GroupSuspicion { peer: it.peer.0, broken: it.cause == Cause::Broken }),
        leaving: report.leaving,
    }
}

/// Converts the status of a member.
pub fn report_from_wire(member: MemberId, wire: &v1::GroupReport) -> Report {
    let stage = match wire.stage() {
        v1::GroupStage::Outside => Stage::Outside,
        v1::GroupStage::Paused => Stage::Paused,
        v1::GroupStage::Computing => Stage::Computing,
        v1::GroupStage::Reducing => Stage::Reducing,
        v1::GroupStage::Flagged => Stage::Flagged,
        v1::GroupStage::Fenced => Stage::Fenced,
    };
    Report {
        member,
        generation: wire.generation,
        stage,
        fence: (wire.fence_term, wire.fence_generation),
        position: position_from_wire(wire.position),
        skipped: wire.skipped,
        prepared: wire.prepared.map(|it| Prepared { generation: it.generation, step: it.step, valid: it.valid }),
        suspicion: wire.suspicion.map(|it| Suspicion {
            peer: MemberId(it.peer),
            cause: if it.broken { Cause::Broken } else { Cause::Stalled },
        }),
        leaving: wire.leaving,
    }
}

/// Converts a notice; `address` finds the members that it names.
pub fn notice_to_wire(term: u64, notice: Notice, address: &dyn Fn(MemberId) -> v1::GroupMember) -> v1::GroupNotice {
    let notice = match notice {
        Notice::Fence { generation } => WireNotice::Fence(generation),
        Notice::Finish { generation, step, apply } => WireNotice::Finish(v1::FinishStep { generation, step, apply }),
        Notice::CatchUp { position, sources } => WireNotice::CatchUp(v1::CatchUpTraining {
            position: Some(position_to_wire(position)),
            sources: sources.into_iter().map(address).collect(),
        }),
        Notice::Release => WireNotice::Release(v1::ReleaseMember {}),
        Notice::Publish { record, paused } => WireNotice::Start(v1::StartGeneration {
            record: Some(v1::GroupRecord {
                generation: record.generation,
                members: record.members.into_iter().map(address).collect(),
                position: Some(position_to_wire(record.position)),
            }),
            paused,
        }),
    };
    v1::GroupNotice { term, notice: Some(notice) }
}

/// Returns the term, the notice, and the members that it names with their addresses; `None` for a notice of a newer version.
pub fn notice_from_wire(wire: v1::GroupNotice) -> Option<(u64, Notice, Vec<v1::GroupMember>)> {
    let ids = |members: &[v1::GroupMember]| members.iter().map(|it| MemberId(it.id)).collect();
    let (notice, members) = match wire.notice? {
        WireNotice::Fence(generation) => (Notice::Fence { generation }, Vec::new()),
        WireNotice::Finish(it) => {
            (Notice::Finish { generation: it.generation, step: it.step, apply: it.apply }, Vec::new())
        }
        WireNotice::CatchUp(it) => {
            (Notice::CatchUp { position: position_from_wire(it.position), sources: ids(&it.sources) }, it.sources)
        }
        WireNotice::Release(_) => (Notice::Release, Vec::new()),
        WireNotice::Start(it) => {
            let record = it.record?;
            let members = ids(&record.members);
            let position = position_from_wire(record.position);
            let notice = Notice::Publish {
                record: Record { generation: record.generation, members, position },
                paused: it.paused,
            };
            (notice, record.members)
        }
    };
    Some((wire.term, notice, members))
}
