//! The text of a configuration.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fathom_options::Origin;

/// A configuration's text, and its path.
pub(super) struct ConfigurationText<'a> {
    pub(super) text: &'a str,
    pub(super) path: Arc<Path>,
    /// The folder to which relative paths refer.
    folder: PathBuf,
}

impl<'a> ConfigurationText<'a> {
    pub(super) fn new(text: &'a str, path: &Path) -> Self {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let folder = absolute.parent().unwrap_or(Path::new("/")).to_owned();
        Self { text, path: path.into(), folder }
    }

    /// The place of the byte at `offset`.
    pub(super) fn origin(&self, offset: usize) -> Origin {
        let mut offset = offset.min(self.text.len());
        while !self.text.is_char_boundary(offset) {
            offset -= 1;
        }
        let before = &self.text[..offset];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Origin::File {
            path: Arc::clone(&self.path),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }

    /// The configuration's folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}
