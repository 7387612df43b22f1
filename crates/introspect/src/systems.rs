//! The file systems that are distinguished, a row each: the inodes of their own structures, the
//! ways to recognise their journal, and the meaning of the functions that complete their I/O.
//!
//! All other file systems are read according to [`OTHER`].

use std::fmt;
use std::ops::{Range, RangeInclusive};

use fathom_insight::Kind;

use crate::completion::{Completion, Meaning};
use crate::kernel::Kernel;
use crate::layout::Layout;

/// The row of a file system.
pub(crate) struct FileSystem {
    /// The names of the file system's types in the kernel.
    pub names: &'static [&'static str],
    /// The inodes of the file system's own structures.
    pub own: OwnInodes,
    /// Whether the journal is jbd2's, which marks its own blocks among the file system's buffers.
    pub has_marked_journal: bool,
    /// Returns the address of the buffer with the journal's super block, from that of the file
    /// system's super block.
    pub journal_buffer: Option<fn(&Kernel, u64) -> Option<u64>>,
    /// The sectors of the block device that contain the journal.
    pub journal_sectors: Option<JournalSectors>,
    /// Returns whether an inode, by its address, has content of other files, which the file system
    /// moves; `None` if that is not known.
    pub is_mover: Option<fn(&Kernel, u64) -> Option<bool>>,
    /// Returns a task that waits until the file system has made its journal durable or flushed its
    /// disk, from the address of the file system's private structure.
    pub waiter: Option<fn(&Kernel, u64) -> Option<u64>>,
    /// The symbols of the file system's functions and operations.
    pub symbols: &'static [(&'static str, Meaning)],
}

/// The place of a journal.
pub(crate) struct JournalSectors {
    /// Returns the journal's sectors, from the addresses of the super block and of the file
    /// system's private structure.
    pub get: fn(&Kernel, u64, u64) -> Option<Range<u64>>,
    /// Whether the file system writes the journal through the buffers that it uses for everything
    /// else.
    pub has_buffers: bool,
    /// Whether the file system's module has been read, which has the layout that `get` needs.
    pub is_known: fn(&Layout) -> bool,
}

/// The inodes of a file system's own structures.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OwnInodes {
    /// Inodes that cannot be opened: they have the operations with which every inode is created.
    Hidden,
    /// The inodes with these numbers.
    Numbers(&'static [u64]),
    /// The inodes below `first`, the lowest number of a file, except the root.
    Below { first: u64, root: u64 },
    /// The same, and inodes that cannot be opened.
    BelowOrHidden { first: u64, root: u64 },
    /// None. The content of inodes that cannot be opened is unknown.
    HiddenUnknown,
}

impl OwnInodes {
    /// Whether these inodes include the one with this number. `None` if its content is unknown.
    pub fn has(self, number: u64, is_hidden: impl FnOnce() -> bool) -> Option<bool> {
        Some(match self {
            Self::Hidden => is_hidden(),
            Self::Numbers(numbers) => numbers.contains(&number),
            Self::Below { first, root } => number < first && number != root,
            Self::BelowOrHidden { first, root } => number < first && number != root || is_hidden(),
            Self::HiddenUnknown if is_hidden() => return None,
            Self::HiddenUnknown => false,
        })
    }
}

/// The row of all types that are not in [`FILE_SYSTEMS`].
pub(crate) static OTHER: FileSystem = FileSystem::new(&[], OwnInodes::Hidden, &[]);

/// The inodes of ext2, 3 and 4.
const EXT: OwnInodes = OwnInodes::Below { first: 11, root: 2 };

/// The meaning of a function that completes a bio or a buffer.
const fn ends(completion: Completion) -> Meaning {
    Meaning::Completion(completion)
}

/// The rows.
pub(crate) static FILE_SYSTEMS: [FileSystem; 11] = [
    FileSystem {
        has_marked_journal: true,
        journal_buffer: Some(ext4_journal_buffer),
        waiter: Some(ext4_waiter),
        ..FileSystem::new(
            &["ext4"],
            EXT,
            &[
                ("ext4_end_bio", ends(Completion::OneFile)),
                // Fast commits.
                ("ext4_end_buffer_io_sync", ends(Completion::OfBuffer(Some(Kind::Journal)))),
                ("ext4_end_bitmap_read", ends(Completion::OfBuffer(Some(Kind::Metadata)))),
            ],
        )
    },
    FileSystem { has_marked_journal: true, ..FileSystem::new(&["ext2", "ext3"], EXT, &[]) },
    FileSystem {
        journal_sectors: Some(JournalSectors {
            get: xfs_log,
            has_buffers: false,
            is_known: |layout| layout.xfs_log.is_some(),
        }),
        ..FileSystem::new(
            &["xfs"],
            OwnInodes::Hidden,
            &[
                ("xfs_end_bio", ends(Completion::OneFile)),
                ("xfs_buf_bio_end_io", ends(Completion::XfsBuffer)),
                ("xlog_bio_end_io", ends(Completion::XfsLog)),
                ("xfs_dir3_block_buf_ops", Meaning::XfsDirectory),
                ("xfs_dir3_data_buf_ops", Meaning::XfsDirectory),
                ("xfs_dir3_free_buf_ops", Meaning::XfsDirectory),
                ("xfs_dir3_leaf1_buf_ops", Meaning::XfsDirectory),
                ("xfs_dir3_leafn_buf_ops", Meaning::XfsDirectory),
            ],
        )
    },
    FileSystem {
        is_mover: Some(is_btrfs_mover),
        ..FileSystem::new(
            &["btrfs"],
            // The inode of all extent buffers.
            OwnInodes::Numbers(&[1]),
            &[
                ("btrfs_simple_end_io", ends(Completion::Btrfs)),
                ("btrfs_orig_write_end_io", ends(Completion::Btrfs)),
                ("btrfs_raid56_end_io", ends(Completion::Btrfs)),
                ("btrfs_end_bio", ends(Completion::Btrfs)),
                ("btrfs_clone_write_end_io", ends(Completion::BtrfsStripe)),
                ("btrfs_end_super_write", ends(Completion::Kind(Kind::Metadata))),
                ("btrfs_end_empty_barrier", ends(Completion::BtrfsBarrier)),
                ("btrfs_end_dio_bio", Meaning::BtrfsDirect),
                ("btrfs_dio_end_io", Meaning::BtrfsDirect),
                ("end_compressed_bio_read", Meaning::BtrfsCompressed),
                ("end_compressed_bio_write", Meaning::BtrfsCompressed),
                ("end_bbio_compressed_read", Meaning::BtrfsCompressed),
                ("end_bbio_compressed_write", Meaning::BtrfsCompressed),
            ],
        )
    },
    FileSystem {
        waiter: Some(f2fs_waiter),
        ..FileSystem::new(
            &["f2fs"],
            // The inodes of nodes and of the segments' tables.
            OwnInodes::Numbers(&[1, 2]),
            &[
                ("f2fs_read_end_io", ends(Completion::Pages)),
                ("f2fs_write_end_io", ends(Completion::Pages)),
            ],
        )
    },
    FileSystem::new(
        &["jfs"],
        OwnInodes::Hidden,
        &[
            ("lbmIODone", ends(Completion::Kind(Kind::Journal))),
            ("metapage_read_end_io", ends(Completion::Kind(Kind::Metadata))),
            ("metapage_write_end_io", ends(Completion::Kind(Kind::Metadata))),
        ],
    ),
    FileSystem::new(
        &["nilfs2"],
        // DAT, checkpoints, segments, inodes. The nodes of a file's tree are in a separate inode,
        // which has the file's number.
        OwnInodes::BelowOrHidden { first: 11, root: 2 },
        // Segments, from the page cache of files and from that of the file system's own structures.
        &[("nilfs_end_bio_write", ends(Completion::Pages))],
    ),
    // `$MFT`, `$LogFile`, `$Bitmap`, `$UpCase` and others.
    FileSystem::new(&["ntfs3"], OwnInodes::Below { first: 16, root: 5 }, &[]),
    FileSystem::new(&["erofs"], OwnInodes::HiddenUnknown, &[]),
    FileSystem {
        journal_sectors: Some(JournalSectors {
            get: reiserfs_journal,
            has_buffers: true,
            is_known: |layout| layout.reiserfs_super.is_some(),
        }),
        ..FileSystem::new(
            &["reiserfs"],
            OwnInodes::Hidden,
            &[
                // Content that has to be written before the journal, and content of the journal.
                ("reiserfs_end_ordered_io", ends(Completion::OfBuffer(None))),
                ("reiserfs_end_buffer_io_sync", ends(Completion::OfBuffer(None))),
            ],
        )
    },
    FileSystem { has_marked_journal: true, ..FileSystem::new(&["ocfs2"], OwnInodes::Hidden, &[]) },
];

impl FileSystem {
    /// A row of a file system whose journal, if it has one, is recognised only by its functions.
    const fn new(
        names: &'static [&'static str],
        own: OwnInodes,
        symbols: &'static [(&'static str, Meaning)],
    ) -> Self {
        Self {
            names,
            own,
            has_marked_journal: false,
            journal_buffer: None,
            journal_sectors: None,
            is_mover: None,
            waiter: None,
            symbols,
        }
    }

    /// The row of the type with this name.
    pub fn of(name: &str) -> &'static Self {
        FILE_SYSTEMS.iter().find(|row| row.names.contains(&name)).unwrap_or(&OTHER)
    }
}

impl PartialEq for FileSystem {
    /// Rows are equal if they are the same object.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for FileSystem {}

impl fmt::Debug for FileSystem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", self.names)
    }
}

fn ext4_journal_buffer(kernel: &Kernel, super_block: u64) -> Option<u64> {
    let layout = &kernel.layout;
    let private = kernel.pointer(super_block.wrapping_add(layout.sb_private?))?;
    let journal = kernel.pointer(private.wrapping_add(layout.ext4_journal?))?;
    kernel.pointer(journal.wrapping_add(layout.journal_superblock?))
}

/// A task that waits for a commit of the journal (`jbd2_log_wait_commit`).
fn ext4_waiter(kernel: &Kernel, private: u64) -> Option<u64> {
    let journal = at(kernel, private, kernel.layout.ext4_journal)?;
    kernel.first_waiter(journal.wrapping_add(kernel.layout.journal_waiters?))
}

/// A task that waits for the thread that flushes for all of them (`f2fs_issue_flush`).
fn f2fs_waiter(kernel: &Kernel, private: u64) -> Option<u64> {
    let layout = &kernel.layout;
    let segments = at(kernel, private, layout.f2fs_segments)?;
    let control = at(kernel, segments, layout.f2fs_control)?;
    let link = at(kernel, control, layout.f2fs_dispatched)?;
    let command = link.wrapping_sub(layout.f2fs_command_link?);
    kernel.completion_waiter(command.wrapping_add(layout.f2fs_command_wait?))
}

/// The pointer at a member of a structure.
fn at(kernel: &Kernel, address: u64, place: Option<u64>) -> Option<u64> {
    kernel.pointer(address.wrapping_add(place?))
}

fn number(kernel: &Kernel, address: u64, place: Option<u64>) -> Option<u64> {
    Some(u64::from(kernel.u32(address.wrapping_add(place?))?))
}

/// The numbers of Btrfs's trees: of the first tree of files, of those of other subvolumes, and of
/// the tree with the inodes through which a balance moves content. The numbers of those inodes are
/// also numbers of other files elsewhere.
const BTRFS_FILES: u64 = 5;
const BTRFS_SUBVOLUMES: RangeInclusive<u64> = 256..=-256_i64 as u64;
const BTRFS_RELOCATION: u64 = -9_i64 as u64;

fn is_btrfs_mover(kernel: &Kernel, inode: u64) -> Option<bool> {
    let layout = &kernel.layout;
    let own = inode.wrapping_sub(layout.btrfs_inode_inode?);
    let root = at(kernel, own, layout.btrfs_inode_root).filter(|root| root % 8 == 0)?;
    match kernel.u64(root.wrapping_add(layout.btrfs_root_number?))? {
        BTRFS_RELOCATION => Some(true),
        number if number == BTRFS_FILES || BTRFS_SUBVOLUMES.contains(&number) => Some(false),
        _ => None,
    }
}

fn xfs_log(kernel: &Kernel, super_block: u64, private: u64) -> Option<Range<u64>> {
    let layout = &kernel.layout;
    let log = at(kernel, private, layout.xfs_log)?;
    let target = at(kernel, log, layout.xfs_log_target)?;
    let device = at(kernel, target, layout.xfs_target_device)?;
    // The log may be on another device.
    if kernel.u64(super_block.wrapping_add(layout.sb_device))? != device {
        return None;
    }
    let start = kernel.u64(log.wrapping_add(layout.xfs_log_start?))?;
    Some(start..start.checked_add(number(kernel, log, layout.xfs_log_length)?)?)
}

fn reiserfs_journal(kernel: &Kernel, _: u64, private: u64) -> Option<Range<u64>> {
    let layout = &kernel.layout;
    // The block of the super block in its format on disk: little-endian and packed.
    let on_disk = at(kernel, private, layout.reiserfs_super)?;
    let size = kernel.u32(on_disk.wrapping_add(layout.reiserfs_block_size?))?;
    let sectors = u64::from(size & 0xffff) / 512;
    let start = number(kernel, on_disk, layout.reiserfs_journal_start)?;
    // One block more, for the journal's own header.
    let length = number(kernel, on_disk, layout.reiserfs_journal_length)? + 1;
    Some(start * sectors..(start + length) * sectors)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write as _;

    use super::*;
    use crate::completion::{ENTRIES_MAX, meanings};

    /// The markers of the part of the page that is written from the rows.
    const BEGIN: &str = "<!-- the rows, made by the test `the_page_has_all_rows` -->\n";
    const END: &str = "<!-- end of the rows -->\n";

    #[test]
    fn names_and_symbols_are_in_one_row() {
        let mut names = BTreeSet::new();
        for row in &FILE_SYSTEMS {
            for name in row.names {
                assert!(names.insert(*name), "{name}");
                assert_eq!(FileSystem::of(name), row);
            }
        }
        assert_eq!(FileSystem::of("udf"), &OTHER);
        let symbols: Vec<&str> = meanings().map(|(symbol, _)| symbol).collect();
        assert_eq!(symbols.iter().collect::<BTreeSet<_>>().len(), symbols.len());
        assert!(symbols.len() <= ENTRIES_MAX);
    }

    #[test]
    fn own_inodes_are_distinguished_from_files() {
        let of = |name: &str, number, is_hidden| FileSystem::of(name).own.has(number, || is_hidden);
        for (name, own, files) in [
            ("ext4", &[1, 3, 8, 10][..], &[2, 11, 12][..]),
            ("ext2", &[1, 10], &[2, 11]),
            ("btrfs", &[1], &[2, 256]),
            ("f2fs", &[1, 2], &[3, 4]),
            ("nilfs2", &[1, 3, 10], &[2, 11]),
            ("ntfs3", &[0, 4, 6, 15], &[5, 16]),
            ("xfs", &[], &[1, 128]),
            ("minix", &[], &[1, 2]),
        ] {
            for number in own {
                assert_eq!(of(name, *number, false), Some(true), "{name} {number}");
            }
            for number in files {
                assert_eq!(of(name, *number, false), Some(false), "{name} {number}");
            }
        }
        for name in ["xfs", "nilfs2", "reiserfs", "ocfs2", "udf"] {
            assert_eq!(of(name, 100, true), Some(true), "{name}");
        }
        assert_eq!(of("ext4", 100, true), Some(false));
        assert_eq!((of("erofs", 100, true), of("erofs", 100, false)), (None, Some(false)));
    }

    /// The text of a row in the page.
    fn description(row: &FileSystem) -> String {
        let own = match row.own {
            OwnInodes::Hidden => "inodes that cannot be opened".to_owned(),
            OwnInodes::Numbers(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
                format!("inode {}", numbers.join(", inode "))
            }
            OwnInodes::Below { first, root } => {
                format!("inodes below {first} but the root, {root}")
            }
            OwnInodes::BelowOrHidden { first, root } => {
                format!("inodes below {first} but the root, {root}; those that cannot be opened")
            }
            OwnInodes::HiddenUnknown => "inodes that cannot be opened are `unknown`".to_owned(),
        };
        let own = match row.is_mover {
            Some(_) => format!("{own}; what a balance moves is `unknown`"),
            None => own,
        };
        let mut journal = Vec::new();
        for (symbol, meaning) in row.symbols {
            let Meaning::Completion(completion) = meaning else { continue };
            let kinds = [
                Completion::Kind(Kind::Journal),
                Completion::OfBuffer(Some(Kind::Journal)),
                Completion::XfsLog,
            ];
            if kinds.contains(completion) {
                journal.push(format!("I/O that `{symbol}` completes"));
            }
        }
        if row.has_marked_journal {
            journal.push("blocks that jbd2 writes or marks".into());
        }
        if row.journal_buffer.is_some() {
            journal.push("the journal's super block".into());
        }
        if row.journal_sectors.is_some() {
            journal.push("its place on the disk".into());
        }
        format!("{own} | {}", journal.join("; "))
    }

    #[test]
    fn the_page_has_all_rows() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/introspection.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (before, rest) = page.split_once(BEGIN).expect("the page has a beginning of the rows");
        let (written, after) = rest.split_once(END).expect("the page has an end of the rows");
        let mut made =
            "| file system | its own structures | its journal |\n|---|---|---|\n".to_owned();
        for row in &FILE_SYSTEMS {
            writeln!(made, "| `{}` | {} |", row.names.join("`, `"), description(row)).unwrap();
        }
        writeln!(made, "| others | {} |", description(&OTHER)).unwrap();
        if std::env::var_os("FATHOM_WRITE_DOCS").is_some() {
            std::fs::write(path, format!("{before}{BEGIN}{made}{END}{after}")).unwrap();
        } else {
            assert_eq!(written, made, "FATHOM_WRITE_DOCS=1 writes the page");
        }
    }
}
