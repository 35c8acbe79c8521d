//! Explanations of the codes of devices: cause and remedies.

pub(super) const GPU_REQUIRED: &str = "\
`gpu.mode: Required` is set and no usable GPU was found. Nothing was started.

Check that the driver is installed and the GPU visible (`nvidia-smi`), or set `gpu.mode: Auto`, which uses GPUs \
where available.";
