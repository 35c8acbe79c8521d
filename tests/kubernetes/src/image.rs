//! Images without a registry: an OCI layout archive, which `ctr images import` and `podman load` take.
//!
//! Every image of an archive is one layer of files that belong to root. The same input gives the same bytes.

use crate::programs::hexadecimal;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An image, by reference to the content that it shares with others.
#[derive(Debug, Clone)]
pub struct Image<'a> {
    /// `repository:tag`, complete with a registry host.
    pub name: &'a str,
    /// Its files.
    pub content: &'a Content,
    /// Program and first arguments.
    pub entrypoint: &'a [&'a str],
    /// `uid:gid` of the process; empty for root.
    pub user: &'a str,
}

/// Files of an image: where they come from, by their absolute path inside.
#[derive(Debug, Clone, Default)]
pub struct Content(BTreeMap<String, PathBuf>);

impl Content {
    /// A program at `inside`, with the libraries that it is linked to.
    ///
    /// # Errors
    /// The libraries cannot be found out.
    pub fn program(mut self, inside: &str, program: &Path) -> Result<Self> {
        self.0.insert(inside.to_owned(), program.to_owned());
        for library in libraries_of(program)? {
            self.0.insert(library.to_string_lossy().into_owned(), library);
        }
        Ok(self)
    }

    /// A file at `inside`.
    #[must_use]
    pub fn file(mut self, inside: &str, file: &Path) -> Self {
        self.0.insert(inside.to_owned(), file.to_owned());
        self
    }

    /// The layer: folders first, then files by name, without times and owners; who may execute a file here may do so there.
    fn layer(&self) -> Result<Vec<u8>> {
        let mut archive = tar::Builder::new(Vec::new());
        let mut entry = |path: &str, kind, mode, bytes: &[u8]| -> Result<()> {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_mtime(0);
            header.set_size(bytes.len() as u64);
            archive.append_data(&mut header, path.trim_start_matches('/'), bytes)?;
            Ok(())
        };
        let folders: BTreeSet<&str> = self.0.keys().flat_map(|path| parents(path)).collect();
        for folder in folders {
            entry(folder, tar::EntryType::Directory, 0o755, &[])?;
        }
        for (inside, from) in &self.0 {
            let failed = || format!("failed to read {}", from.display());
            let bytes = fs::read(from).with_context(failed)?;
            let execute = from.metadata().with_context(failed)?.permissions().mode() & 0o111;
            entry(inside, tar::EntryType::Regular, 0o644 | execute, &bytes)?;
        }
        Ok(archive.into_inner()?)
    }
}

/// `/usr` and `/usr/lib` of `/usr/lib/x`.
fn parents(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end]).filter(|it| !it.is_empty())
}

/// The libraries that a program is linked to, the loader included; none for a static one.
///
/// # Errors
/// There is no `ldd`, or a library is missing.
pub fn libraries_of(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("failed to start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(!text.contains("not found"), "{} lacks a library:\n{text}", program.display());
    // "libc.so.6 => /lib/.../libc.so.6 (0x..)" and "/lib64/ld-linux-x86-64.so.2 (0x..)"
    let word = |line: &str| line.split_whitespace().find(|it| it.starts_with('/')).map(PathBuf::from);
    Ok(if output.status.success() { text.lines().filter_map(word).collect() } else { Vec::new() })
}

/// Writes an archive of these images.
///
/// # Errors
/// A file cannot be read, or the archive not be written.
pub fn write_archive(path: &Path, images: &[Image<'_>]) -> Result<()> {
    let mut blobs = BTreeMap::new();
    let mut manifests = Vec::new();
    let mut layers: Vec<(*const Content, Value)> = Vec::new();
    for image in images {
        let known = layers.iter().find(|(content, _)| std::ptr::eq(*content, image.content));
        let layer = if let Some((_, layer)) = known {
            layer.clone()
        } else {
            let layer = blob(&mut blobs, image.content.layer()?, "layer.v1.tar");
            layers.push((image.content, layer.clone()));
            layer
        };
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {"Entrypoint": image.entrypoint, "WorkingDir": "/", "User": image.user, "Env": ["PATH=/bin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        });
        let config = blob(&mut blobs, config.to_string().into_bytes(), "config.v1+json");
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config,
            "layers": [layer],
        });
        let mut manifest = blob(&mut blobs, manifest.to_string().into_bytes(), "manifest.v1+json");
        ensure!(image.name.contains(':'), "the image name {} has no tag", image.name);
        manifest["platform"] = json!({"architecture": architecture, "os": "linux"});
        // As buildah names the images of an archive.
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": image.name});
        manifests.push(manifest);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
    let file = File::create(path).with_context(|| format!("failed to create {}", path.display()))?;
    let mut archive = tar::Builder::new(file);
    let mut put = |name: &str, bytes: &[u8]| -> Result<()> {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, bytes)?;
        Ok(())
    };
    put("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    put("index.json", index.as_bytes())?;
    for (digest, bytes) in &blobs {
        put(&format!("blobs/sha256/{digest}"), bytes)?;
    }
    archive.finish().with_context(|| format!("failed to write {}", path.display()))
}

/// Adds a blob and returns its descriptor.
fn blob(blobs: &mut BTreeMap<String, Vec<u8>>, bytes: Vec<u8>, kind: &str) -> Value {
    let digest = hexadecimal(&Sha256::digest(&bytes));
    let descriptor = json!({
        "mediaType": format!("application/vnd.oci.image.{kind}"),
        "digest": format!("sha256:{digest}"),
        "size": bytes.len(),
    });
    blobs.insert(digest, bytes);
    descriptor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_archive_and_images_share_their_layer() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        let content = Content::default().program("/bin/deep/program", &program).unwrap();
        let image = |name| Image { name, content: &content, entrypoint: &["/bin/deep/program"], user: "1:1" };
        let [first, second] = ["first", "second"].map(|it| folder.path().join(it));
        write_archive(&first, &[image("local.test/a:1"), image("local.test/a:2")]).unwrap();
        write_archive(&second, &[image("local.test/a:1"), image("local.test/a:2")]).unwrap();
        assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());

        let mut archive = tar::Archive::new(File::open(&first).unwrap());
        let names = archive.entries().unwrap().map(|it| it.unwrap().path().unwrap().display().to_string());
        // Layout, index, and three blobs: the layer, one configuration and one manifest for two tags.
        assert_eq!(names.count(), 5);
    }
}
