//! The content of a guest's page cache.

use std::collections::HashMap;

use fathom_insight::{Facts, Kind, Names};

use crate::files::{FileCache, Nature};
use crate::kernel::Kernel;
use crate::pages::{PageCache, PageUse};
use crate::vmcoreinfo::PAGE;

/// The most inodes that are counted.
const INODES_MAX: usize = 1 << 20;
/// The most files that are reported.
const FILES_MAX: usize = 1 << 15;

/// A file, directory or device with pages in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct CachedFile {
    /// The facts about the file.
    pub facts: Facts,
    /// The number of its pages in memory.
    pub pages: u64,
}

impl Kernel {
    /// Examines every page of the guest's memory. Returns the files with the most pages in the
    /// page cache, at most 32,768, in descending order. Takes some 10 ns per page.
    pub fn cached_files(&self, names: &Names) -> Vec<CachedFile> {
        let (mut pages, mut files) = (PageCache::default(), FileCache::default());
        let mut counts: HashMap<u64, u64> = HashMap::new();
        for region in self.memory.regions() {
            let mut address = region.start.next_multiple_of(PAGE);
            while address + PAGE <= region.start + region.length {
                if let Some(PageUse::Cached { inode, .. }) = pages.page(self, self.page_of(address))
                {
                    if counts.len() < INODES_MAX || counts.contains_key(&inode) {
                        *counts.entry(inode).or_default() += 1;
                    }
                }
                address += PAGE;
            }
        }
        let mut counts: Vec<(u64, u64)> = counts.into_iter().collect();
        counts.sort_unstable_by_key(|(inode, pages)| (std::cmp::Reverse(*pages), *inode));
        counts.truncate(FILES_MAX);
        let mut cached: Vec<CachedFile> = counts
            .into_iter()
            .filter_map(|(inode, pages)| {
                files.begin();
                let inode = files.inode(self, names, inode, 0)?;
                let mut facts = inode.facts;
                facts.kind = match inode.nature {
                    Nature::File | Nature::Mover => Kind::Data,
                    Nature::Directory => Kind::Directory,
                    Nature::Internal | Nature::Mounted(_) => Kind::Metadata,
                    Nature::Device => Kind::Device,
                };
                Some(CachedFile { facts, pages })
            })
            .collect();
        cached.sort_by_key(|file| (std::cmp::Reverse(file.pages), file.facts.inode));
        cached
    }
}
