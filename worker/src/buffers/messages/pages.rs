//! Answers with more fields than fit into memory: the rows are decided at once, their fields are read in pages while the client receives
//! them.
//!
//! All workers together read at most [`ANSWER_BYTES`] of fields for a call at a time: each has an equal share. Above, a worker returns rows without
//! columns.

use super::rows::{ANSWER_BYTES, Selection};
use crate::buffers::{Batches, Buffers};
use engram_memory::MemoryId;
use engram_proto::v1::{ItemBatch, Problem, ProblemKind};
use futures::stream::{StreamExt as _, try_unfold};

/// Rows of the first page.
const FIRST_ROWS: usize = 8;

/// Items of a call.
pub(crate) struct Answer {
    pub(crate) selection: Selection,
    /// All rows; without columns if their fields are read in pages.
    pub(crate) batch: ItemBatch,
    /// Whether the answer is a sample, of which no item may be missing.
    pub(crate) is_sample: bool,
}

/// Reads the fields of rows page by page.
struct Pages {
    buffers: Buffers,
    answer: Answer,
    start: usize,
    rows: usize,
}

impl Buffers {
    /// Returns the messages of an answer.
    pub(crate) fn messages(&self, answer: Answer) -> Result<Batches, Problem> {
        if !answer.selection.lacks_columns(&answer.batch) {
            let messages = answer.selection.cut(answer.batch);
            return Ok(futures::stream::iter(messages.into_iter().map(Ok)).boxed());
        }
        let pages = Pages { buffers: self.clone(), answer, start: 0, rows: FIRST_ROWS };
        let messages = try_unfold(pages, |mut pages| async move {
            let page = pages.next().await.map_err(Problem::into_status)?;
            Ok::<_, tonic::Status>(page.map(|page| (futures::stream::iter(page.into_iter().map(Ok)), pages)))
        });
        Ok(futures::TryStreamExt::try_flatten(messages).boxed())
    }

    /// Returns an answer in one piece, whatever its size: for a member of a training run, which holds its batch anyhow.
    pub(crate) async fn whole(&self, answer: Answer) -> Result<ItemBatch, Problem> {
        if !answer.selection.lacks_columns(&answer.batch) {
            return Ok(answer.batch);
        }
        let selection = answer.selection.clone();
        let mut pages = Pages { buffers: self.clone(), answer, start: 0, rows: FIRST_ROWS };
        let mut messages = Vec::new();
        while let Some(page) = pages.next().await? {
            messages.extend(page);
        }
        selection.join(messages)
    }
}

impl Pages {
    /// Returns the messages of the next page; `None` after the last.
    async fn next(&mut self) -> Result<Option<Vec<ItemBatch>>, Problem> {
        let Answer { selection, batch, is_sample } = &self.answer;
        let total = batch.handles.len();
        if self.start == total {
            return Ok(None);
        }
        let (page, rows) = loop {
            let rows = self.start..total.min(self.start + self.rows);
            let handles: Vec<MemoryId> = batch.handles[rows.clone()].iter().copied().map(MemoryId).collect();
            let page = self.buffers.items(selection, &handles).await?;
            if rows.len() == 1 || !selection.lacks_columns(&page) {
                let bytes = page.columns.iter().map(|column| column.data.len()).sum::<usize>();
                if bytes < ANSWER_BYTES / 4 {
                    self.rows *= 2;
                }
                break (page, rows);
            }
            self.rows = (self.rows / 2).max(1);
        };
        let is_first = self.start == 0;
        self.start = rows.end;
        if *is_sample && page.handles.len() < rows.len() {
            let text = "items were removed while they were read";
            return Err(Problem::of(ProblemKind::Unavailable, text).retry_after(10));
        }
        let mut page = ItemBatch { weights: batch.weights.get(rows).unwrap_or_default().to_vec(), ..page };
        if is_first {
            page.scale = batch.scale;
            page.missing.extend(&batch.missing);
        }
        Ok(Some(selection.cut(page)))
    }
}
