use super::*;
use crate::source::{self, SourceOptions};
use gix::objs::tree::{Entry, EntryKind};
use tempfile::TempDir;

/// A repository made of trees of one file per entry; a name with a slash is in a folder.
struct Repository {
    folder: TempDir,
    git: gix::Repository,
}

impl Repository {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let git = gix::init_bare(folder.path()).unwrap();
        Self { folder, git }
    }

    fn tree(&self, files: &[(&str, &str)]) -> ObjectId {
        let mut entries: Vec<Entry> = Vec::new();
        let mut folders: Vec<&str> = files.iter().filter_map(|(name, _)| name.split_once('/').map(|p| p.0)).collect();
        folders.dedup();
        for folder in folders {
            let inside: Vec<_> = files
                .iter()
                .filter_map(|(name, text)| name.strip_prefix(folder)?.strip_prefix('/').map(|name| (name, *text)))
                .collect();
            entries.push(Entry { mode: EntryKind::Tree.into(), filename: folder.into(), oid: self.tree(&inside) });
        }
        for (name, text) in files.iter().filter(|(name, _)| !name.contains('/')) {
            let oid = self.git.write_blob(text).unwrap().detach();
            entries.push(Entry { mode: EntryKind::Blob.into(), filename: (*name).into(), oid });
        }
        entries.sort();
        self.git.write_object(gix::objs::Tree { entries }).unwrap().detach()
    }

    fn commit(&self, parents: &[ObjectId], files: &[(&str, &str)]) -> ObjectId {
        let author = gix::actor::SignatureRef { name: "a".into(), email: "a@b".into(), time: "1700000000 +0000" };
        // Moved explicitly: the head may be elsewhere.
        let reference = format!("refs/heads/c{}", parents.len());
        let _ = self.git.find_reference(&reference).map(|found| found.delete());
        let parents = parents.iter().copied();
        let id = self.git.commit_as(author, author, reference.as_str(), "m", self.tree(files), parents);
        id.unwrap().detach()
    }

    fn options(&self, revision: &dyn std::fmt::Display, max_commits: u64) -> GitOptions {
        GitOptions { path: self.folder.path().to_owned(), revision: revision.to_string(), max_commits, quality: 0.9 }
    }
}

fn paths(options: &GitOptions, from: u64) -> Vec<(u64, Vec<String>)> {
    let mut source = source::open(&SourceOptions::Git(options.clone()), Limits::default(), from).unwrap();
    let mut epochs = Vec::new();
    while let Some(epoch) = source.next_epoch().unwrap() {
        let Content::Events(events) = epoch.content else { panic!("commits are events") };
        let mut paths: Vec<String> = events.iter().map(|event| event.key.as_deref().unwrap().to_owned()).collect();
        paths.sort();
        epochs.push((epoch.number, paths));
    }
    epochs
}

fn owned(epochs: &[(u64, &[&str])]) -> Vec<(u64, Vec<String>)> {
    epochs.iter().map(|(number, paths)| (*number, paths.iter().map(|&path| path.to_owned()).collect())).collect()
}

#[test]
fn every_first_parent_commit_is_an_epoch_of_its_changed_paths() {
    let repository = Repository::new();
    let root = repository.commit(&[], &[("a", "1"), ("src/b", "1"), ("src/c", "1")]);
    let side = repository.commit(&[root], &[("a", "1"), ("side", "1"), ("src/b", "1"), ("src/c", "1")]);
    let main = repository.commit(&[root], &[("a", "2"), ("src/b", "1")]);
    let merge = repository.commit(&[main, side], &[("a", "2"), ("side", "1"), ("src/b", "1")]);
    // A file becomes a folder of the same name.
    let head = repository.commit(&[merge], &[("a/x", "1"), ("side", "1"), ("src/b", "1")]);
    let all: &[(u64, &[&str])] =
        &[(0, &["a", "src/b", "src/c"]), (1, &["a", "src/c"]), (2, &["side"]), (3, &["a", "a/x"])];
    assert_eq!(paths(&repository.options(&head, 0), 0), owned(all));
    assert_eq!(paths(&repository.options(&head, 0), 2), owned(&all[2..]));
    assert_eq!(paths(&repository.options(&format!("{head}^"), 100), 0), owned(&all[..3]));
    // The newest two; the older one is compared with its parent, not with an empty tree.
    assert_eq!(paths(&repository.options(&head, 2), 0), owned(&[(0, &["side"]), (1, &["a", "a/x"])]));

    let written = repository.folder.path().join("events.csv.zst");
    let mut progress = Vec::new();
    let file = zstd::Encoder::new(std::fs::File::create(&written).unwrap(), 1).unwrap();
    let (file, commits, events) =
        export(&repository.options(&head, 0), file, &written, |done, of| progress.push((done, of))).unwrap();
    file.finish().unwrap();
    assert_eq!((commits, events, progress.last()), (4, 8, Some(&(4, 4))));
    let columns = source::Columns {
        memory: source::MemoryColumn::Key("path".to_owned()),
        time: source::TimeColumn::Epoch("epoch".to_owned()),
    };
    let signal = source::SignalSource::Quality(0.9);
    let events = source::EventsOptions {
        path: written,
        origin: source::Origin::Disk,
        format: source::Format::Auto,
        separator: None,
        columns,
        signal,
    };
    let mut from_file = source::open(&SourceOptions::Events(events), Limits::default(), 0).unwrap();
    let mut from_git = source::open(&SourceOptions::Git(repository.options(&head, 0)), Limits::default(), 0).unwrap();
    assert_eq!(from_git.epochs(), Some(4));
    while let Some(epoch) = from_git.next_epoch().unwrap() {
        assert_eq!(epoch.content, from_file.next_epoch().unwrap().unwrap().content);
    }
    assert!(from_file.next_epoch().unwrap().is_none());
}

#[test]
fn missing_repositories_and_commits_are_rejected() {
    let repository = Repository::new();
    let root = repository.commit(&[], &[("a", "1")]);
    let refused = |options: GitOptions| {
        let error = source::open(&SourceOptions::Git(options), Limits::default(), 0).err().expect("it is refused");
        (error.code(), error.to_string())
    };
    let (code, message) = refused(repository.options(&"no-such-branch", 0));
    assert_eq!(code, "ENG-0305", "{message}");
    assert!(message.contains("revision \"no-such-branch\" names no commit"), "{message}");
    let (code, message) = refused(repository.options(&repository.tree(&[("a", "1")]), 0));
    assert_eq!(code, "ENG-0305", "{message}");
    let elsewhere = TempDir::new().unwrap();
    let (code, message) = refused(GitOptions { path: elsewhere.path().join("absent"), ..repository.options(&root, 0) });
    assert_eq!(code, "ENG-0302", "{message}");
    let limits = Limits { epoch_events: 0, ..Limits::default() };
    let mut source = source::open(&SourceOptions::Git(repository.options(&root, 0)), limits, 0).unwrap();
    let error = source.next_epoch().expect_err("one path is more than none");
    assert_eq!(error.code(), "ENG-0304", "{error}");
    assert!(source.next_epoch().unwrap().is_none());
}

#[test]
fn paths_longer_than_a_key_stay_distinct_keys() {
    let repository = Repository::new();
    let long = "\u{e4}".repeat(600);
    let (first, second) = (format!("{long}1"), format!("{long}2"));
    let root = repository.commit(&[], &[(&first, "1"), (&second, "1"), ("short", "1")]);
    let epochs = paths(&repository.options(&root, 0), 0);
    let [(0, keys)] = &epochs[..] else { panic!("one commit") };
    assert_eq!((keys.len(), keys[0].as_str()), (3, "short"));
    assert!(keys[1] != keys[2] && keys[1..].iter().all(|key| key.len() <= MAX_KEY_BYTES && key.contains("...")));
}

#[test]
fn errors_of_the_git_library_have_their_causes() {
    let repository = Repository::new();
    let root = repository.commit(&[], &[("a", "1")]);
    std::fs::write(
        repository.folder.path().join("config"),
        "[core]\nbare = true\nrepositoryformatversion = 1\n[extensions]\nobjectFormat = sha256\n",
    )
    .unwrap();
    let error = resolve(&repository.options(&root, 0)).unwrap_err().to_string();
    assert!(error.contains("sha256"), "{error}");
}
