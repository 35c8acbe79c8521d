//! Versions of a model as contents of its run: what clients download, and what the strategy remembers.

use crate::runs::federated::blobs::{CHUNK_BYTES, ContentName, Contents};
use crate::runs::federated::{Interruption, done, failed, patiently};
use engram_api::Code;
use engram_federated::error::InvalidInput;
use engram_federated::job::{BLOCK_PARAMETERS, Job};
use engram_federated::privacy::clipping::AdaptiveClip;
use engram_federated::quantized;
use engram_federated::round::Digest;
use engram_federated::service::{DigestStream, decode_values, digest, encode_values};
use engram_federated::strategy::{Aggregator, BlockAggregator, BlockSum, UpdateHead};

/// What a run remembers between versions.
pub(in crate::runs::federated) enum Memory {
    /// The model too.
    Whole(Aggregator),
    /// The model is on disk.
    Blocks(BlockAggregator),
}

impl Memory {
    /// Stores the first version. Returns the digest of its model too.
    pub(in crate::runs::federated) async fn create(
        job: &Job,
        contents: &Contents,
    ) -> Result<(Self, Digest), Interruption> {
        if !job.is_on_disk() {
            let aggregator = job.aggregator().map_err(invalid_job)?;
            let model = put_version(job, contents, &aggregator).await?;
            return Ok((Self::Whole(aggregator), model));
        }
        patiently(|| contents.items().create()).await?;
        let blocks = BlockAggregator::new(job.strategy.clone()).map_err(invalid_job)?;
        let mut values = job.initial_values();
        let mut written = BlockWriter::begin(job, contents, 0).await?;
        while written.is_incomplete() {
            let block: Vec<f32> = values.by_ref().take(BLOCK_PARAMETERS).collect();
            written.put_block(&block).await?;
        }
        let model = written.finish(&blocks).await?;
        Ok((Self::Blocks(blocks), model))
    }

    /// Parses what was stored.
    pub(in crate::runs::federated) fn decode(job: &Job, stored: &[u8]) -> Option<Self> {
        match job.is_on_disk() {
            true => postcard::from_bytes(stored).ok().map(Self::Blocks),
            false => postcard::from_bytes(stored).ok().map(Self::Whole),
        }
    }

    /// The clipping norm of the next aggregation, if it follows the updates.
    pub(in crate::runs::federated) const fn adaptive_clip(&self) -> Option<&AdaptiveClip> {
        match self {
            Self::Whole(aggregator) => aggregator.adaptive_clip(),
            Self::Blocks(_) => None,
        }
    }

    /// Digest of the model as 32-bit floats, where it is in memory.
    pub(in crate::runs::federated) fn exact_digest(&self) -> Option<Digest> {
        match self {
            Self::Whole(aggregator) => Some(digest(&encode_values(aggregator.model()))),
            Self::Blocks(_) => None,
        }
    }

    /// SCAFFOLD: version and correction of a client.
    pub(in crate::runs::federated) fn correction(&self, client: u64) -> Option<(u64, Vec<f32>)> {
        match self {
            Self::Whole(aggregator) if aggregator.strategy().has_control() => {
                Some((aggregator.version(), aggregator.correction(client)))
            }
            _ => None,
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that `map_err` wants")]
fn invalid_job(error: InvalidInput) -> Interruption {
    failed(Code::InvalidValue, error.to_string())
}

/// Stores the model of a version, and what its strategy remembers. Returns the digest of what clients download.
pub(in crate::runs::federated) async fn put_version(
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

/// Aggregates the updates of a batch block by block, and stores the next version. Memory holds one block of the model and one of an update.
/// Returns the digest of the model.
pub(in crate::runs::federated) async fn put_next_blocks(
    job: &Job,
    contents: &Contents,
    aggregator: &mut BlockAggregator,
    updates: &[(ContentName, UpdateHead)],
) -> Result<Digest, Interruption> {
    let heads: Vec<UpdateHead> = updates.iter().map(|(_, head)| *head).collect();
    let weights = aggregator.weights(&heads).map_err(not_aggregated)?;
    let model = ContentName::Model(aggregator.version());
    aggregator.end_version();
    let mut written = BlockWriter::begin(job, contents, aggregator.version()).await?;
    while written.is_incomplete() {
        let block = read_block(contents, model, written.next).await?;
        let mut sum = BlockSum::new(block.len());
        for (place, weight) in &weights {
            let update = read_block(contents, updates[*place].0, written.next).await?;
            sum.add(*weight, &update).map_err(not_aggregated)?;
        }
        written.put_block(&aggregator.move_block(&block, &sum).map_err(not_aggregated)?).await?;
    }
    written.finish(aggregator).await
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that `map_err` wants")]
fn not_aggregated(error: InvalidInput) -> Interruption {
    failed(Code::RunFailed, format!("failed to aggregate: {error}"))
}

async fn read_block(contents: &Contents, name: ContentName, index: u64) -> Result<Vec<f32>, Interruption> {
    let chunk = patiently(|| contents.chunk(name, index)).await?;
    let missing = || failed(Code::Corrupt, format!("chunk {index} of {name:?} is missing"));
    Ok(decode_values(&chunk.ok_or_else(missing)?.0))
}

/// Writes the model of a version, block after block.
struct BlockWriter<'a> {
    contents: &'a Contents,
    name: ContentName,
    version: u64,
    bytes: u64,
    next: u64,
    digest: DigestStream,
}

impl<'a> BlockWriter<'a> {
    /// Removes what an earlier driver wrote of the version.
    async fn begin(job: &Job, contents: &'a Contents, version: u64) -> Result<Self, Interruption> {
        let name = ContentName::Model(version);
        patiently(|| contents.remove(std::slice::from_ref(&name))).await?;
        Ok(Self { contents, name, version, bytes: job.update_bytes(), next: 0, digest: DigestStream::default() })
    }

    const fn is_incomplete(&self) -> bool {
        self.next * (CHUNK_BYTES as u64) < self.bytes
    }

    async fn put_block(&mut self, block: &[f32]) -> Result<(), Interruption> {
        let chunk = encode_values(block);
        self.digest.add(&chunk);
        let (contents, name, bytes, index) = (self.contents, self.name, self.bytes, self.next);
        let written = patiently(|| contents.append(name, bytes, index, &chunk)).await?;
        self.next += 1;
        // An append whose answer was lost conflicts with itself.
        match done(&written)? || patiently(|| contents.chunks(name)).await? == self.next {
            true => Ok(()),
            false => Err(Interruption::Superseded),
        }
    }

    async fn finish(self, aggregator: &BlockAggregator) -> Result<Digest, Interruption> {
        let memory = postcard::to_stdvec(aggregator).expect("an aggregator has no type that the encoding lacks");
        put(self.contents, &(ContentName::Aggregator(self.version), memory)).await?;
        Ok(self.digest.finish())
    }
}
