//! Reports to the coordinator why a worker does not use a GPU that its settings ask for.

use engram_api::GpuMode;
use engram_kernels::MirrorStatus;
use engram_proto::v1::GpuFault;

/// Returns the fault of a worker's GPUs. `without`: why none was opened; `status`: status of the opened ones, once the store has
/// reported it.
pub(crate) fn gpu_fault(mode: GpuMode, without: Option<&str>, status: Option<&MirrorStatus>) -> Option<GpuFault> {
    if mode == GpuMode::Disabled {
        return None;
    }
    if let Some(why) = without {
        return Some(GpuFault { was_in_use: false, reason: why.to_owned() });
    }
    let devices = status.into_iter().flat_map(|status| &status.devices);
    let given_up =
        devices.filter_map(|device| Some(format!("{} was disabled: {}", device.name, device.given_up.as_ref()?)));
    let why = given_up.collect::<Vec<_>>().join("; ");
    (!why.is_empty()).then_some(GpuFault { was_in_use: true, reason: why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_kernels::DeviceStatus;

    #[test]
    fn faults_are_reported_only_of_requested_gpus() {
        let absent = Some("there is no CUDA driver");
        assert_eq!(gpu_fault(GpuMode::Disabled, absent, None), None);
        let fault = gpu_fault(GpuMode::Auto, absent, None).unwrap();
        assert_eq!((fault.was_in_use, fault.reason.as_str()), (false, "there is no CUDA driver"));
        assert_eq!(gpu_fault(GpuMode::Auto, None, None), None, "no status is known yet");

        let device = |given_up: Option<&str>| DeviceStatus {
            name: "H100".into(),
            given_up: given_up.map(str::to_owned),
            ..DeviceStatus::default()
        };
        let healthy = MirrorStatus { devices: vec![device(None)], ..MirrorStatus::default() };
        assert_eq!(gpu_fault(GpuMode::Required, None, Some(&healthy)), None);
        let failed = MirrorStatus { devices: vec![device(None), device(Some("it failed (code 700)"))], ..healthy };
        let fault = gpu_fault(GpuMode::Required, None, Some(&failed)).unwrap();
        assert_eq!((fault.was_in_use, fault.reason.as_str()), (true, "H100 was disabled: it failed (code 700)"));
    }
}
