//! The fatbins and their kernels. `cargo xtask kernels` builds them; `manifest.toml` has their hashes.

/// Name, bytes, kernels.
pub(super) type Image = (&'static str, &'static [u8], &'static [&'static str]);

macro_rules! image {
    ($name:literal, $($kernel:literal),+) => {
        ($name, include_bytes!(concat!("../../../fatbins/", $name, ".fatbin")).as_slice(), &[$($kernel),+])
    };
}

/// All fatbins.
pub(super) const IMAGES: [Image; 16] = [
    image!("algebra", "max_plus_product", "outer_products", "add_sums"),
    image!("digest", "digest"),
    image!("epoch", "bucket_updates", "epoch"),
    image!(
        "geodesic",
        "network_values",
        "network_gradient",
        "sum_gradients",
        "metric_roots",
        "path_features",
        "path_adjoint"
    ),
    image!("group", "update_groups"),
    image!("histogram", "weight_histogram"),
    image!("index", "index_build", "index_insert", "index_erase", "index_find"),
    image!(
        "neural",
        "dense_forward",
        "dense_input",
        "dense_gradient",
        "sum_parts",
        "norm_forward",
        "norm_input",
        "norm_gradient",
        "activation_forward",
        "activation_input",
        "add_values",
        "dropout",
        "row_losses"
    ),
    image!("quality", "fold", "fold_quality"),
    image!("rank", "list_slots", "id_keys", "weight_keys"),
    image!("recall", "recall_keys"),
    image!("rows", "gather_rows", "scatter_rows"),
    image!("sample", "priority_sums", "sample"),
    image!("select", "select_histogram", "select_collect"),
    image!("sort", "radix_histogram", "radix_pass"),
    image!("update", "apply_updates"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    #[test]
    fn every_kernel_of_the_sources_is_named_once() {
        for (name, _, kernels) in IMAGES {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("cuda/{name}.cu"));
            let text = fs::read_to_string(source).unwrap();
            let named = text.lines().filter_map(|line| line.strip_prefix("CUDA_HOST_KERNEL(")?.strip_suffix(')'));
            assert_eq!(named.collect::<Vec<_>>(), kernels, "{name}.cu");
        }
    }
}
