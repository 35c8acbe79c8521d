//! Events from the history of a git repository: commits are epochs, the paths they touch are memories.
//!
//! The history is the line of first parents, oldest first: what the branch looked like, step by step. A merge is one
//! step that touches what it brought in, so every change counts exactly once and the order needs no tie-break. A path is
//! touched when it is added, changed or deleted; a rename is a deletion and an addition. The first commit, and the last
//! one that a shallow clone holds, touch all their paths.
//!
//! Read with a git library; no git program is started and the repository is not changed.

use super::error::with_causes;
use super::{Content, Epoch, Event, Limits, Signal, Source, SourceError, in_order};
use engram_memory::{MAX_KEY_BYTES, key_id};
use gix::ObjectId;
use gix::objs::TreeRefIter;
use gix_diff::tree::{Recorder, State, recorder::Change};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A repository and which part of its history to take.
#[derive(Debug, Clone, PartialEq)]
pub struct GitOptions {
    /// The repository, or a folder inside it.
    pub path: PathBuf,
    /// The newest commit, in any form that git understands.
    pub revision: String,
    /// Take the newest so many commits; 0 takes all.
    pub max_commits: u64,
    /// Quality of a touched path, in [0, 1].
    pub quality: f32,
}

/// Trees of neighbouring commits share most of their parts; this much of them is kept unpacked.
const OBJECT_CACHE_BYTES: usize = 32 << 20;
/// Characters of a commit id in labels: enough to be unique in any repository, short enough for an axis.
const LABEL: usize = 12;

pub(super) struct History {
    options: GitOptions,
    limits: Limits,
    repository: gix::Repository,
    /// Oldest first.
    commits: Vec<ObjectId>,
    /// Base of the oldest one: none, or its parent if the history was cut.
    base: Option<ObjectId>,
    next: usize,
    state: State,
}

/// Paths changed by one commit.
struct Step {
    commit: ObjectId,
    paths: Vec<String>,
}

/// Opens the repository and resolves its revision.
fn head(options: &GitOptions) -> Result<(gix::Repository, ObjectId), SourceError> {
    let path = &options.path;
    let repository = gix::discover(path).map_err(|e| SourceError::unreadable(path, with_causes(&e)))?;
    let no_commit = |cause: &dyn std::error::Error| SourceError::NoCommit {
        path: path.clone(),
        revision: options.revision.clone(),
        cause: with_causes(cause),
    };
    let head = repository
        .rev_parse_single(options.revision.as_str())
        .map_err(|e| no_commit(&e))?
        .object()
        .map_err(|e| no_commit(&e))?
        .peel_to_commit()
        .map_err(|e| no_commit(&e))?
        .id;
    Ok((repository, head))
}

/// Resolves the revision to a commit id. A revision may move, its commit does not.
///
/// # Errors
/// The repository cannot be read, or the revision names no commit.
pub fn resolve(options: &GitOptions) -> Result<String, SourceError> {
    Ok(head(options)?.1.to_string())
}

impl History {
    pub(super) fn open(options: &GitOptions, limits: Limits, from: u64) -> Result<Self, SourceError> {
        let path = &options.path;
        let (mut repository, head) = head(options)?;
        repository.object_cache_size_if_unset(OBJECT_CACHE_BYTES);
        let (mut commits, base) = first_parents(&repository, head, options.max_commits)
            .map_err(|e| SourceError::unreadable(path, format!("failed to walk the history: {}", with_causes(&*e))))?;
        commits.reverse();
        let next = usize::try_from(from).unwrap_or(usize::MAX);
        Ok(Self { options: options.clone(), limits, repository, commits, base, next, state: State::default() })
    }

    fn next_step(&mut self) -> Result<Option<Step>, SourceError> {
        let Some(&commit) = self.commits.get(self.next) else { return Ok(None) };
        let before = if self.next == 0 { self.base } else { Some(self.commits[self.next - 1]) };
        let step = self.step(before, commit);
        // An error ends the source.
        self.next = if step.is_ok() { self.next + 1 } else { usize::MAX };
        step.map(Some)
    }

    fn step(&mut self, before: Option<ObjectId>, commit: ObjectId) -> Result<Step, SourceError> {
        let failed = |e: &dyn std::error::Error| {
            let hint = if is_partial(&self.repository) {
                "; it is a partial clone, which lacks objects: `git fetch --refetch --no-filter` fetches them"
            } else {
                ""
            };
            let cause = with_causes(e);
            SourceError::unreadable(&self.options.path, format!("failed to read commit {commit}: {cause}{hint}"))
        };
        let tree = |id: ObjectId| self.repository.find_commit(id).and_then(|commit| commit.tree());
        let new = tree(commit).map_err(|e| failed(&e))?;
        let old = before.map(tree).transpose().map_err(|e| failed(&e))?;
        let old =
            old.as_ref().map_or_else(TreeRefIter::default, |tree| TreeRefIter::from_bytes(&tree.data, tree.id.kind()));
        let new = TreeRefIter::from_bytes(&new.data, new.id.kind());
        let mut recorder = Recorder::default();
        gix_diff::tree(old, new, &mut self.state, &self.repository.objects, &mut recorder).map_err(|e| failed(&e))?;
        let mut paths: Vec<String> = recorder.records.into_iter().filter_map(changed_path).collect();
        paths.sort_unstable();
        // A file that became a folder of the same name is deleted and added.
        paths.dedup();
        self.check(commit, &paths)?;
        Ok(Step { commit, paths })
    }

    fn check(&self, commit: ObjectId, paths: &[String]) -> Result<(), SourceError> {
        let refuse = |value, allowed| {
            let (path, commit) = (self.options.path.clone(), commit.to_string());
            Err(SourceError::Commit { path, commit, value, allowed })
        };
        let limit = self.limits.epoch_events;
        if paths.len() > limit {
            return refuse(format!("{} touched paths", paths.len()), format!("at most {limit} paths in one commit"));
        }
        Ok(())
    }
}

impl Source for History {
    fn next_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        let number = self.next as u64;
        let signal = Signal::Quality(self.options.quality);
        Ok(self.next_step()?.map(|step| {
            let event = |path: String| Event { id: key_id(path.as_bytes()), key: Some(Arc::from(path)), signal };
            let label = Some(step.commit.to_hex_with_len(LABEL).to_string());
            Epoch { number, label, content: Content::Events(in_order(step.paths.into_iter().map(event).collect())) }
        }))
    }

    fn epochs(&self) -> Option<u64> {
        Some(self.commits.len() as u64)
    }
}

/// Returns first parents from `head` on, newest first, and the next commit where `most` cut the line.
fn first_parents(
    repository: &gix::Repository,
    head: ObjectId,
    max_commits: u64,
) -> Result<(Vec<ObjectId>, Option<ObjectId>), Box<dyn std::error::Error + Send + Sync>> {
    let mut commits = Vec::new();
    for step in repository.rev_walk([head]).first_parent_only().all()? {
        let id = step?.id;
        if max_commits > 0 && commits.len() as u64 == max_commits {
            return Ok((commits, Some(id)));
        }
        commits.push(id);
    }
    Ok((commits, None))
}

/// Returns the path of a change, `None` for a folder. Bytes that are not UTF-8 become U+FFFD, because keys are text.
fn changed_path(change: Change) -> Option<String> {
    let (mode, path) = match change {
        Change::Addition { entry_mode, path, .. } | Change::Deletion { entry_mode, path, .. } => (entry_mode, path),
        Change::Modification { entry_mode, path, .. } => (entry_mode, path),
    };
    (!mode.is_tree()).then(|| key_of_path(path.to_string()))
}

/// Returns the key of a path. A path longer than a key is cut and ends in its hash, so that different paths stay different memories.
fn key_of_path(mut path: String) -> String {
    if path.len() > MAX_KEY_BYTES {
        let hash = format!("...{:016x}", key_id(path.as_bytes()).0);
        let end = (0..=MAX_KEY_BYTES - hash.len()).rev().find(|&end| path.is_char_boundary(end)).unwrap_or(0);
        path.truncate(end);
        path.push_str(&hash);
    }
    path
}

/// Whether the repository was cloned with a filter and fetches missing objects on demand, which this library does not.
fn is_partial(repository: &gix::Repository) -> bool {
    let configuration = repository.config_snapshot();
    let promises = |name: &str| configuration.boolean(format!("remote.{name}.promisor").as_str()).unwrap_or(false);
    configuration.string("extensions.partialClone").is_some()
        || repository.remote_names().iter().any(|name| promises(&name.to_string()))
}

/// Returns whether a repository is a shallow clone: commits before its oldest one are missing.
///
/// # Errors
/// The repository cannot be read.
pub fn is_shallow(path: &Path) -> Result<bool, SourceError> {
    let unreadable = |error: &dyn std::error::Error| SourceError::unreadable(path, with_causes(error));
    let repository = gix::discover(path).map_err(|error| unreadable(&error))?;
    repository.is_shallow().map_err(|error| unreadable(&error))
}

/// Writes the history as events: CSV with the columns `epoch`, `commit`, `path`. Commits that touch nothing have no row. Returns the
/// output and the numbers of epochs and events written.
///
/// # Errors
/// The repository cannot be read, or writing fails; `name` is the output's name in errors.
pub fn export<W: Write>(
    options: &GitOptions,
    output: W,
    name: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<(W, u64, u64), SourceError> {
    let mut history = History::open(options, Limits::default(), 0)?;
    let unwritable = |cause| SourceError::Unwritable { path: name.to_owned(), cause };
    let failed = |error: csv::Error| {
        unwritable(match error.into_kind() {
            csv::ErrorKind::Io(cause) => cause,
            other => std::io::Error::other(format!("{other:?}")),
        })
    };
    let total = history.commits.len() as u64;
    let mut rows = csv::Writer::from_writer(output);
    rows.write_record(["epoch", "commit", "path"]).map_err(failed)?;
    let (mut epoch, mut events) = (0_u64, 0);
    while let Some(step) = history.next_step()? {
        let (number, commit) = (epoch.to_string(), step.commit.to_string());
        for path in &step.paths {
            rows.write_record([number.as_str(), &commit, path]).map_err(failed)?;
        }
        events += step.paths.len() as u64;
        epoch += 1;
        progress(epoch, total);
    }
    let output =
        rows.into_inner().map_err(|error| unwritable(std::io::Error::new(error.error().kind(), error.to_string())))?;
    Ok((output, total, events))
}

#[cfg(test)]
mod tests;
