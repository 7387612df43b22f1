//! Files: from an inode to its path, size and file system.

use fathom_insight::{Facts, Name, Names};

use crate::kernel::Kernel;
use crate::paging::printable;

/// A path has no more parts than this.
const DEPTH_MAX: usize = 128;
/// A name in a directory is no longer (`NAME_MAX`).
const NAME_MAX: usize = 255;
/// A path is no longer, in bytes.
const PATH_MAX: usize = 4096;
/// The files that a queue remembers; a power of two.
const FILES: usize = 2048;
/// The file systems that a queue remembers.
const SYSTEMS_MAX: usize = 64;
/// A kernel has no more mounted file systems than are looked through.
const SUPER_BLOCKS_MAX: usize = 1024;
/// For one request, no more names and super blocks are looked at: a guest can make each page
/// another file's, each of them as deep as can be.
const STEPS_MAX: u32 = 4096;
/// What was read is asked for again after this time: a directory above may have been renamed.
const FRESH_NS: u64 = 1_000_000_000;

const TYPE_MASK: u64 = 0o17_0000;
const TYPE_DIRECTORY: u64 = 0o04_0000;
const TYPE_REGULAR: u64 = 0o10_0000;
const TYPE_LINK: u64 = 0o12_0000;
/// The first inode of ext2, 3 and 4 that is not the file system's own; 2 is the root.
const EXT_FIRST_INODE: u64 = 11;

/// What the inode of a page stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Nature {
    /// A file, or the target of a link.
    #[default]
    File,
    Directory,
    /// The file system's own structures.
    Internal,
    /// A block device with a mounted file system: its structures. The number is the address of
    /// the buffer that holds the journal's own super block, or 0.
    Mounted(u64),
    /// A block device without one.
    Device,
}

/// What an inode is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inode {
    pub nature: Nature,
    /// All but the kind, the group and the process.
    pub facts: Facts,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// The inode's address; 0 is an empty place.
    address: u64,
    number: u64,
    generation: u32,
    super_block: u64,
    /// The inode's first name, and what that consisted of.
    dentry: u64,
    parent: u64,
    text: u64,
    read_ns: u64,
    inode: Inode,
}

/// What a super block says.
#[derive(Clone, Copy, Default)]
struct System {
    address: u64,
    type_name: Name,
    device: Name,
    family: Family,
    journal_buffer: u64,
    read_ns: u64,
}

/// File systems that keep their own structures in inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Family {
    #[default]
    Other,
    Ext,
    Btrfs,
    F2fs,
}

/// The files that were met.
pub(crate) struct FileCache {
    entries: Box<[Entry]>,
    systems: Vec<System>,
    /// What may still be looked at.
    steps: u32,
}

impl Default for FileCache {
    fn default() -> Self {
        let entries = vec![Entry::default(); FILES].into();
        Self { entries, systems: Vec::new(), steps: STEPS_MAX }
    }
}

impl FileCache {
    /// Another request begins.
    pub fn begin(&mut self) {
        self.steps = STEPS_MAX;
    }

    /// What the inode at `address` is.
    pub fn inode(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        address: u64,
        now_ns: u64,
    ) -> Option<Inode> {
        let layout = &kernel.layout;
        // Inodes are slab objects: in the direct map, and aligned.
        if address % 8 != 0 {
            return None;
        }
        let physical = kernel.space.direct(address)?;
        let window = kernel.memory.window(physical);
        let number = window.u64(layout.inode_number)?;
        let super_block = window.u64(layout.inode_sb)?;
        let size = window.u64(layout.inode_size)?;
        let generation = window.u32(layout.inode_generation)?;
        let first = window.u64(layout.inode_dentries)?;
        let place = (address >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let place = place as usize & (FILES - 1);
        let entry = &self.entries[place];
        let same = entry.address == address
            && entry.number == number
            && entry.super_block == super_block
            && entry.generation == generation
            && now_ns.saturating_sub(entry.read_ns) < FRESH_NS
            && first.wrapping_sub(if first == 0 { 0 } else { layout.dentry_alias }) == entry.dentry
            && is_same_name(kernel, entry);
        if same {
            let mut inode = entry.inode;
            if inode.nature == Nature::File || inode.nature == Nature::Directory {
                inode.facts.file_size = size;
            }
            return Some(inode);
        }
        let entry = self.read(kernel, names, address, now_ns)?;
        self.entries[place] = entry;
        Some(entry.inode)
    }

    fn read(&mut self, kernel: &Kernel, names: &Names, address: u64, now_ns: u64) -> Option<Entry> {
        let layout = &kernel.layout;
        step(&mut self.steps)?;
        let super_block = kernel.pointer(address + layout.inode_sb)?;
        let number = kernel.u64(address + layout.inode_number)?;
        let mode = u64::from(kernel.u32(address + layout.inode_mode)?) & TYPE_MASK;
        let mut entry = Entry {
            address,
            number,
            generation: kernel.u32(address + layout.inode_generation)?,
            super_block,
            read_ns: now_ns,
            ..Entry::default()
        };
        let device_super = kernel.places.device_super.and_then(|place| kernel.u64(place));
        if device_super == Some(super_block) {
            entry.inode = self.device(kernel, names, address, now_ns)?;
            return Some(entry);
        }
        let system = self.system(kernel, names, super_block, now_ns)?;
        let internal = match system.family {
            // The inode of all extent buffers.
            Family::Btrfs => number == 1,
            // Nodes and what the segments' tables are in.
            Family::F2fs => number == 1 || number == 2,
            Family::Ext => number < EXT_FIRST_INODE && number != 2,
            Family::Other => false,
        };
        let nature = match mode {
            _ if internal => Nature::Internal,
            TYPE_REGULAR | TYPE_LINK => Nature::File,
            TYPE_DIRECTORY => Nature::Directory,
            _ => return None,
        };
        let mut facts =
            Facts { file_system: system.type_name, device: system.device, ..Facts::default() };
        if nature != Nature::Internal {
            facts.inode = number;
            facts.file_size = kernel.u64(address + layout.inode_size)?;
            facts.owner = kernel.u32(address + layout.inode_owner)?;
            if let Some(place) = layout.inode_write_hint {
                facts.write_hint = (kernel.u32(address + place)? & 0xff) as u8;
            }
            let first = kernel.u64(address + layout.inode_dentries)?;
            if first != 0 {
                entry.dentry = first.wrapping_sub(layout.dentry_alias);
                entry.parent = kernel.u64(entry.dentry.wrapping_add(layout.dentry_parent))?;
                let name = entry.dentry.wrapping_add(layout.dentry_name);
                entry.text = kernel.u64(name.wrapping_add(layout.name_text))?;
                // The name leads back to the inode, unless it is torn.
                let back =
                    layout.dentry_inode.and_then(|at| kernel.u64(entry.dentry.wrapping_add(at)));
                if layout.dentry_inode.is_none() || back == Some(address) {
                    let path = path(kernel, entry.dentry, &mut self.steps);
                    facts.path = path.map_or(Name::NONE, |path| names.number(&path));
                }
            }
        }
        entry.inode = Inode { nature, facts };
        Some(entry)
    }

    /// What a block device's inode stands for: the structures of the file system on it, or the
    /// device itself. `None` where the list of file systems is torn.
    fn device(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        address: u64,
        now_ns: u64,
    ) -> Option<Inode> {
        let layout = &kernel.layout;
        let bdev = layout
            .block_device_inode
            .zip(layout.block_device_of)
            .map(|(inode, bdev)| address.wrapping_sub(inode).wrapping_add(bdev));
        let mounted = match bdev {
            Some(bdev) => super_block_of(kernel, bdev, &mut self.steps)?,
            None => 0,
        };
        if mounted != 0 {
            let system = self.system(kernel, names, mounted, now_ns)?;
            let (file_system, device) = (system.type_name, system.device);
            return Some(Inode {
                nature: Nature::Mounted(system.journal_buffer),
                facts: Facts { file_system, device, ..Facts::default() },
            });
        }
        let device = bdev.and_then(|bdev| {
            let disk = kernel.pointer(bdev.wrapping_add(layout.block_device_disk?))?;
            if let Some(place) = layout.disk_device {
                // The whole disk's device leads back to the disk.
                let whole = kernel.pointer(disk.wrapping_add(place))?;
                if kernel.u64(whole.wrapping_add(layout.block_device_disk?))? != disk {
                    return None;
                }
            }
            kernel.text(disk.wrapping_add(layout.disk_name), 32)
        });
        let device = device.map_or(Name::NONE, |name| names.number(&name));
        Some(Inode { nature: Nature::Device, facts: Facts { device, ..Facts::default() } })
    }

    fn system(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        address: u64,
        now_ns: u64,
    ) -> Option<System> {
        let known = self.systems.iter().position(|system| system.address == address);
        if let Some(system) = known.map(|place| self.systems[place]) {
            if now_ns.saturating_sub(system.read_ns) < FRESH_NS {
                return Some(system);
            }
        }
        let system = read_system(kernel, names, address, now_ns)?;
        if let Some(place) = known {
            self.systems[place] = system;
        } else {
            if self.systems.len() == SYSTEMS_MAX {
                self.systems.clear();
            }
            self.systems.push(system);
        }
        Some(system)
    }
}

/// Whether an inode's first name is still the one that was read.
#[inline]
fn is_same_name(kernel: &Kernel, entry: &Entry) -> bool {
    let layout = &kernel.layout;
    if entry.dentry == 0 {
        return true;
    }
    let dentry = kernel.object(entry.dentry);
    dentry.u64(layout.dentry_parent) == Some(entry.parent)
        && dentry.u64(layout.dentry_name.wrapping_add(layout.name_text)) == Some(entry.text)
}

fn read_system(kernel: &Kernel, names: &Names, address: u64, now_ns: u64) -> Option<System> {
    let layout = &kernel.layout;
    // All super blocks are in one list: the next one's link leads back.
    let own = address.wrapping_add(layout.sb_list);
    if kernel.u64(kernel.pointer(own)?.wrapping_add(8))? != own {
        return None;
    }
    let kind = kernel.pointer(address.wrapping_add(layout.sb_type))?;
    let text = kernel.pointer(kind.wrapping_add(layout.type_name))?;
    let name = kernel.text(text, 32)?;
    if name.len() < 2 || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    let family = match name.as_str() {
        "ext2" | "ext3" | "ext4" => Family::Ext,
        "btrfs" => Family::Btrfs,
        "f2fs" => Family::F2fs,
        _ => Family::Other,
    };
    let device = kernel.text(address.wrapping_add(layout.sb_name), 32)?;
    let journal_buffer = || {
        let private = kernel.pointer(address.wrapping_add(layout.sb_private?))?;
        let journal = kernel.pointer(private.wrapping_add(layout.ext4_journal?))?;
        kernel.pointer(journal.wrapping_add(layout.journal_superblock?))
    };
    Some(System {
        address,
        type_name: names.number(&name),
        device: names.number(&device),
        family,
        journal_buffer: if name == "ext4" { journal_buffer().unwrap_or(0) } else { 0 },
        read_ns: now_ns,
    })
}

/// Takes a step; `None` when there have been too many.
fn step(steps: &mut u32) -> Option<()> {
    *steps = steps.checked_sub(1)?;
    Some(())
}

/// The super block of the file system that is mounted from a block device; 0 where there is none.
/// `None` where the list is torn.
fn super_block_of(kernel: &Kernel, bdev: u64, steps: &mut u32) -> Option<u64> {
    let Some(head) = kernel.places.super_blocks else { return Some(0) };
    let layout = &kernel.layout;
    let (mut before, mut entry) = (head, kernel.pointer(head)?);
    for _ in 0..SUPER_BLOCKS_MAX {
        // Each link leads back.
        if kernel.u64(entry.wrapping_add(8))? != before {
            return None;
        }
        if entry == head {
            return Some(0);
        }
        step(steps)?;
        let super_block = entry.wrapping_sub(layout.sb_list);
        if kernel.u64(super_block.wrapping_add(layout.sb_device))? == bdev {
            return Some(super_block);
        }
        (before, entry) = (entry, kernel.pointer(entry)?);
    }
    None
}

/// The path from a file system's root to a name; what was unlinked says so.
fn path(kernel: &Kernel, mut dentry: u64, steps: &mut u32) -> Option<String> {
    let layout = &kernel.layout;
    let mut parts: Vec<String> = Vec::new();
    let mut length = 0;
    // A name that is in no hash chain has been unlinked (`d_hash.pprev` is null).
    let unlinked = kernel.u64(dentry.wrapping_add(layout.dentry_hash + 8))? == 0;
    loop {
        let parent = kernel.pointer(dentry.wrapping_add(layout.dentry_parent))?;
        step(steps)?;
        let name = name(kernel, dentry)?;
        if parent == dentry {
            match (name.as_str(), parts.is_empty()) {
                ("/", true) => return Some("/".to_owned()),
                ("/", false) => break,
                // It hangs in no tree: memory that a process calls a file.
                (_, true) => parts.push(name),
                (_, false) => return None,
            }
            break;
        }
        length += name.len() + 1;
        if length > PATH_MAX || parts.len() == DEPTH_MAX {
            return None;
        }
        parts.push(name);
        dentry = parent;
    }
    let mut path = String::with_capacity(length + 10);
    for part in parts.iter().rev() {
        path.push('/');
        path.push_str(part);
    }
    if unlinked {
        path.push_str(" (deleted)");
    }
    Some(path)
}

/// The name of a directory's entry; `None` where it is torn.
fn name(kernel: &Kernel, dentry: u64) -> Option<String> {
    let layout = &kernel.layout;
    let name = dentry.wrapping_add(layout.dentry_name);
    let count = kernel.u32(name.wrapping_add(layout.name_length))? as usize;
    let text = kernel.pointer(name.wrapping_add(layout.name_text))?;
    if count == 0 || count > NAME_MAX {
        return None;
    }
    // A zero byte follows.
    let mut bytes = [0; NAME_MAX + 1];
    kernel.space.read(&kernel.memory, text, &mut bytes[..=count])?;
    let is_whole = !bytes[..count].contains(&0) && bytes[count] == 0;
    is_whole.then(|| printable(&bytes[..count]))
}
