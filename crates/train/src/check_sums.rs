//! Which settings of the sums of a run exclude each other.

use engram_api::{
    CompressionKind, OptimizerKind, ReplayCompression, ReplayRun, ReplaySync, SumOrder, TrainingPrecision,
};

use crate::job::{JobError, field};

/// Refuses settings of the sums that exclude each other.
pub(crate) fn check_sums(run: &ReplayRun) -> Result<(), JobError> {
    let is_invariant = run.order == SumOrder::PartitionInvariant;
    let with_order = |allowed: &str| format!("{allowed} with order PartitionInvariant");
    if is_invariant && run.sync == ReplaySync::ParameterServer {
        return Err(field("spec.replay.sync", "ParameterServer", with_order("AllReduce")));
    }
    if is_invariant && run.sync_every > 1 {
        return Err(field("spec.replay.syncEvery", run.sync_every, with_order("1")));
    }
    if is_invariant && run.balance.is_some() {
        return Err(field("spec.replay.balance", "set", with_order("absent")));
    }
    let Some(compression) = &run.compression else {
        if run.sync_every > 1 && run.precision == TrainingPrecision::F16 {
            return Err(field("spec.replay.syncEvery", run.sync_every, "1 with precision F16"));
        }
        return Ok(());
    };
    let kind = format!("{:?}", compression.kind);
    if is_invariant {
        return Err(field("spec.replay.compression.kind", kind, with_order("no compression")));
    }
    if run.sync_every > 1 || run.sync == ReplaySync::ParameterServer {
        let allowed = "no compression with sync ParameterServer or syncEvery above 1";
        return Err(field("spec.replay.compression.kind", kind, allowed));
    }
    if let Some(share) = compression.share.filter(|_| compression.kind != CompressionKind::TopK) {
        return Err(field("spec.replay.compression.share", share, "absent, except with kind TopK"));
    }
    let has_rank = matches!(compression.kind, CompressionKind::PowerSgd | CompressionKind::Automatic);
    if let Some(rank) = compression.rank.filter(|_| !has_rank) {
        return Err(field("spec.replay.compression.rank", rank, "absent, except with kind PowerSgd or Automatic"));
    }
    check_one_bit(run, compression)
}

/// Refuses settings that `OneBitAdam` excludes: it sends no gradients that could be clipped or scaled.
fn check_one_bit(run: &ReplayRun, compression: &ReplayCompression) -> Result<(), JobError> {
    if compression.kind != CompressionKind::OneBitAdam {
        return compression.warmup_steps.map_or(Ok(()), |steps| {
            Err(field("spec.replay.compression.warmupSteps", steps, "absent, except with kind OneBitAdam"))
        });
    }
    let with_kind = |allowed: &str| format!("{allowed} with compression.kind OneBitAdam");
    if run.optimizer.kind != OptimizerKind::AdamW {
        let kind = format!("{:?}", run.optimizer.kind);
        return Err(field("spec.replay.optimizer.kind", kind, with_kind("AdamW")));
    }
    if let Some(clip) = run.optimizer.clip {
        return Err(field("spec.replay.optimizer.clip", clip, with_kind("absent")));
    }
    if run.precision == TrainingPrecision::F16 {
        return Err(field("spec.replay.precision", "F16", with_kind("F32 or Bf16")));
    }
    let steps = compression.warmup_steps.unwrap_or(1);
    if !(1..run.steps).contains(&steps) {
        let allowed = format!("1 to below steps, {}", run.steps);
        return Err(field("spec.replay.compression.warmupSteps", steps, allowed));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::job::tests::job;

    #[test]
    fn settings_of_sums_that_exclude_each_other_are_refused() {
        let refused = |changes: &[(&str, serde_json::Value)]| job(changes).unwrap_err().to_string();
        let invariant = ("/order", "PartitionInvariant".into());
        let topk = ("/compression", serde_json::json!({ "kind": "TopK" }));
        let server = ("/sync", "ParameterServer".into());
        let local = ("/syncEvery", 2.into());
        for (other, named) in [
            (server.clone(), "spec.replay.sync is ParameterServer; allowed: AllReduce"),
            (local.clone(), "spec.replay.syncEvery is 2; allowed: 1 with order"),
            (topk.clone(), "spec.replay.compression.kind is TopK; allowed: no compression"),
            (("/balance", serde_json::json!({})), "spec.replay.balance is set; allowed: absent"),
        ] {
            assert!(job(std::slice::from_ref(&other)).is_ok(), "{named}");
            let text = refused(&[invariant.clone(), other]);
            assert!(text.starts_with(named), "{text}");
        }
        for other in [server, local.clone()] {
            let text = refused(&[topk.clone(), other]);
            assert!(text.contains("with sync ParameterServer or syncEvery above 1"), "{text}");
        }
        let text = refused(&[local, ("/precision", "F16".into())]);
        assert_eq!(text, "spec.replay.syncEvery is 2; allowed: 1 with precision F16");
        let text = refused(&[("/compression", serde_json::json!({ "kind": "F16", "share": 0.5 }))]);
        assert!(text.starts_with("spec.replay.compression.share is 0.5"), "{text}");
        let text = refused(&[("/compression", serde_json::json!({ "kind": "TopK", "rank": 2 }))]);
        assert!(text.starts_with("spec.replay.compression.rank is 2"), "{text}");
        assert!(job(&[("/compression", serde_json::json!({ "kind": "PowerSgd", "rank": 2 }))]).is_ok());
    }

    #[test]
    fn settings_that_exclude_automatic_compression_are_refused() {
        let automatic = |more: &str| {
            let text = format!("{{ \"kind\": \"Automatic\"{more} }}");
            ("/compression", serde_json::from_str(&text).unwrap())
        };
        assert!(job(&[automatic(", \"rank\": 2")]).is_ok());
        let kind = "spec.replay.compression.kind is Automatic; allowed: no compression with";
        for (more, other, expected) in [
            ("", ("/order", "PartitionInvariant".into()), format!("{kind} order PartitionInvariant")),
            ("", ("/syncEvery", 2.into()), format!("{kind} sync ParameterServer or syncEvery above 1")),
            ("", ("/sync", "ParameterServer".into()), format!("{kind} sync ParameterServer or syncEvery above 1")),
            ("", ("/ensemble", 2.into()), "spec.replay.ensemble is 2; allowed: 1 with compression".to_owned()),
            (
                ", \"share\": 0.5",
                ("/batch", 64.into()),
                "spec.replay.compression.share is 0.5; allowed: absent, except with kind TopK".to_owned(),
            ),
            (
                ", \"warmupSteps\": 5",
                ("/batch", 64.into()),
                "spec.replay.compression.warmupSteps is 5; allowed: absent, except with kind OneBitAdam".to_owned(),
            ),
        ] {
            assert_eq!(job(&[automatic(more), other]).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn settings_that_exclude_one_bit_adam_are_refused() {
        let kind = |more: &str| {
            let text = format!("{{ \"kind\": \"OneBitAdam\"{more} }}");
            ("/compression", serde_json::from_str(&text).unwrap())
        };
        let steps = ("/steps", 20.into());
        let refused = |other: (&str, serde_json::Value), more: &str| {
            job(&[steps.clone(), kind(more), other]).unwrap_err().to_string()
        };
        let unchanged = ("/batch", 64.into());
        assert!(job(&[steps.clone(), kind("")]).is_ok());
        let spec = job(&[steps.clone(), kind("")]).unwrap().spec;
        assert_eq!(spec.compression.unwrap().warmup_steps, Some(4), "a fifth of the steps");
        assert!(job(&[steps.clone(), kind(", \"warmupSteps\": 19")]).is_ok());
        for warmup in [0, 20] {
            let text = refused(unchanged.clone(), &format!(", \"warmupSteps\": {warmup}"));
            let field = "spec.replay.compression.warmupSteps is";
            assert_eq!(text, format!("{field} {warmup}; allowed: 1 to below steps, 20"));
        }
        let text = refused(("/optimizer", serde_json::json!({ "kind": "Sgd", "rate": 0.1 })), "");
        assert_eq!(text, "spec.replay.optimizer.kind is Sgd; allowed: AdamW with compression.kind OneBitAdam");
        let text = refused(("/optimizer", serde_json::json!({ "rate": 0.1, "clip": 1.0 })), "");
        assert!(text.starts_with("spec.replay.optimizer.clip is 1; allowed: absent"), "{text}");
        let text = refused(("/precision", "F16".into()), "");
        assert!(text.starts_with("spec.replay.precision is F16; allowed: F32 or Bf16"), "{text}");
        let other = ("/compression", serde_json::json!({ "kind": "Bf16", "warmupSteps": 2 }));
        let text = job(&[other]).unwrap_err().to_string();
        assert!(text.starts_with("spec.replay.compression.warmupSteps is 2; allowed: absent"), "{text}");
    }
}
