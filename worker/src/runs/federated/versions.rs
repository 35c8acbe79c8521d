//! Versions of a model as contents of its run: what clients download, and what the strategy remembers.

use super::blobs::{ContentName, Contents};
use super::{Interruption, done, patiently};
use engram_federated::job::Job;
use engram_federated::quantized;
use engram_federated::round::Digest;
use engram_federated::service::{decode_values, digest, encode_values};
use engram_federated::strategy::Aggregator;

/// Stores the model of a version, and what its strategy remembers. Returns the digest of what clients download.
pub(super) async fn put_version(
    job: &Job,
    contents: &Contents,
    aggregator: &Aggregator,
) -> Result<Digest, Interruption> {
    let version = aggregator.version();
    let mut model = (ContentName::Model(version), encode_values(aggregator.model()));
    debug_assert_eq!(decode_values(&model.1).len(), aggregator.model().len());
    if job.is_quantized() {
        put(contents, &model).await?;
        model = (ContentName::Quantized(version), quantized::encode(aggregator.model()));
    }
    put(contents, &model).await?;
    let memory = postcard::to_stdvec(aggregator).expect("an aggregator has no type that the encoding lacks");
    put(contents, &(ContentName::Aggregator(version), memory)).await?;
    Ok(digest(&model.1))
}

async fn put(contents: &Contents, (name, content): &(ContentName, Vec<u8>)) -> Result<(), Interruption> {
    let written = patiently(|| contents.put(*name, content)).await?;
    if done(&written)? { Ok(()) } else { Err(Interruption::Superseded) }
}
