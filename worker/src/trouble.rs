//! Why a worker does without a GPU that the settings want, in words for the coordinator: nobody looks at each worker.

use engram_api::GpuMode;
use engram_kernels::Standing;
use engram_proto::v1::GpuTrouble;

/// What is wrong with the GPUs of a worker; `without`: why it opened none, `standing`: how those stand that it opened, once the store has
/// told.
pub(crate) fn of_gpu(mode: GpuMode, without: Option<&str>, standing: Option<&Standing>) -> Option<GpuTrouble> {
    if mode == GpuMode::Disabled {
        return None;
    }
    if let Some(why) = without {
        return Some(GpuTrouble { given_up: false, why: why.to_owned() });
    }
    let devices = standing.into_iter().flat_map(|standing| &standing.devices);
    let given_up = devices.filter_map(|held| Some(format!("{} was given up: {}", held.name, held.given_up.as_ref()?)));
    let why = given_up.collect::<Vec<_>>().join("; ");
    (!why.is_empty()).then_some(GpuTrouble { given_up: true, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_kernels::Held;

    #[test]
    fn trouble_is_told_of_gpus_that_are_wanted_alone() {
        let absent = Some("there is no CUDA driver");
        assert_eq!(of_gpu(GpuMode::Disabled, absent, None), None);
        let trouble = of_gpu(GpuMode::Auto, absent, None).unwrap();
        assert_eq!((trouble.given_up, trouble.why.as_str()), (false, "there is no CUDA driver"));
        assert_eq!(of_gpu(GpuMode::Auto, None, None), None, "nothing is known yet");

        let held = |given_up: Option<&str>| Held {
            name: "H100".into(),
            given_up: given_up.map(str::to_owned),
            ..Held::default()
        };
        let whole = Standing { devices: vec![held(None)], ..Standing::default() };
        assert_eq!(of_gpu(GpuMode::Required, None, Some(&whole)), None);
        let failed = Standing { devices: vec![held(None), held(Some("it failed (code 700)"))], ..whole };
        let trouble = of_gpu(GpuMode::Required, None, Some(&failed)).unwrap();
        assert_eq!((trouble.given_up, trouble.why.as_str()), (true, "H100 was given up: it failed (code 700)"));
    }
}
