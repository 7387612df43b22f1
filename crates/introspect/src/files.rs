//! Files: from an inode to its path, size and file system.

use std::ops::Range;

use fathom_insight::{Facts, Name, Names};

use crate::kernel::Kernel;
use crate::paging::printable;
use crate::systems::FileSystem;

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
/// What the inode of a page stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Nature {
    /// A file, or the target of a link.
    #[default]
    File,
    Directory,
    /// The file system's own structures.
    Internal,
    /// A block device with a mounted file system: its structures.
    Mounted(Mounted),
    /// A block device without one.
    Device,
}

/// A file system that is mounted from a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// The address of its super block.
    pub super_block: u64,
    /// Its row.
    pub row: &'static FileSystem,
}

/// What an inode is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inode {
    pub nature: Nature,
    /// The `block_device` that its content is on, or is; 0 where that is not known.
    pub device: u64,
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
    /// The name's hash and length: a short name lies in the dentry itself, at the same place as
    /// the one before.
    hash: u64,
    is_unlinked: bool,
    /// Of a block device: the address of its holder, or 0.
    holder_place: u64,
    /// Who held the block device, which a mount and an unmount change; of a file, the block device
    /// that its file system is on.
    holder: u64,
    read_ns: u64,
    inode: Inode,
}

/// What a super block says.
#[derive(Clone, Copy)]
struct System {
    address: u64,
    /// The address of its type, and the beginning of the text that names its device: another file
    /// system may be mounted in the same place of memory.
    type_address: u64,
    device_text: u64,
    type_name: Name,
    device: Name,
    row: &'static FileSystem,
    block_device: u64,
    read_ns: u64,
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
            && is_same_name(kernel, entry)
            && match entry.holder_place {
                // Another file system may have taken the super block's place.
                0 => kernel.u64(super_block.wrapping_add(layout.sb_device)),
                place => kernel.u64(place),
            } == Some(entry.holder);
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
            // First the holder: whoever takes it meanwhile makes what is read below old.
            if let Some(place) = layout.block_device_holder {
                if let Some(device) = device_of(kernel, address) {
                    entry.holder_place = device.wrapping_add(place);
                    entry.holder = kernel.u64(entry.holder_place)?;
                }
            }
            entry.inode = self.device(kernel, names, address, now_ns)?;
            return Some(entry);
        }
        let system = self.system(kernel, names, super_block, now_ns)?;
        let is_hidden = || Self::is_inaccessible(kernel, address);
        let internal = system.row.own.has(number, is_hidden)?;
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
                entry.hash = kernel.u64(name.wrapping_add(layout.name_hash))?;
                let chain = entry.dentry.wrapping_add(layout.dentry_hash + 8);
                entry.is_unlinked = kernel.u64(chain)? == 0;
                // The name leads back to the inode, unless it is torn.
                let back =
                    layout.dentry_inode.and_then(|at| kernel.u64(entry.dentry.wrapping_add(at)));
                if layout.dentry_inode.is_none() || back == Some(address) {
                    let path = path(kernel, entry.dentry, &mut self.steps);
                    facts.path = path.map_or(Name::NONE, |path| names.number(&path));
                }
            }
        }
        entry.holder = system.block_device;
        entry.inode = Inode { nature, device: system.block_device, facts };
        Some(entry)
    }

    /// Whether an inode was made by its file system for itself: nothing opens it, because it has
    /// the operations that each inode is born with.
    fn is_inaccessible(kernel: &Kernel, address: u64) -> bool {
        let operations = || kernel.u64(address.wrapping_add(kernel.layout.inode_operations?));
        kernel.places.no_operations.is_some_and(|none| operations() == Some(none))
    }

    /// The super block of the file system that is mounted from a block device.
    pub fn super_block_of(&mut self, kernel: &Kernel, device: u64) -> Option<u64> {
        super_block_of(kernel, device, &mut self.steps).filter(|super_block| *super_block != 0)
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
        let bdev = device_of(kernel, address);
        let mounted = match bdev {
            Some(bdev) => super_block_of(kernel, bdev, &mut self.steps)?,
            None => 0,
        };
        if mounted != 0 {
            let system = self.system(kernel, names, mounted, now_ns)?;
            let (file_system, device) = (system.type_name, system.device);
            return Some(Inode {
                nature: Nature::Mounted(Mounted { super_block: mounted, row: system.row }),
                device: bdev.unwrap_or(0),
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
        let facts = Facts { device, ..Facts::default() };
        Some(Inode { nature: Nature::Device, device: bdev.unwrap_or(0), facts })
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
            let layout = &kernel.layout;
            let word = |place: u64| kernel.u64(address.wrapping_add(place));
            if now_ns.saturating_sub(system.read_ns) < FRESH_NS
                && word(layout.sb_type) == Some(system.type_address)
                && word(layout.sb_device) == Some(system.block_device)
                && word(layout.sb_name) == Some(system.device_text)
            {
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

/// The `block_device` of the inode at an address, which is a block device's.
fn device_of(kernel: &Kernel, address: u64) -> Option<u64> {
    let (inode, device) = kernel.layout.block_device_inode.zip(kernel.layout.block_device_of)?;
    Some(address.wrapping_sub(inode).wrapping_add(device))
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
        && dentry.u64(layout.dentry_name.wrapping_add(layout.name_hash)) == Some(entry.hash)
        && dentry.u64(layout.dentry_hash + 8).map(|chain| chain == 0) == Some(entry.is_unlinked)
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
    // Names of file systems are words: what is not one is torn.
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if name.len() < 2 || !name.bytes().all(is_letter) {
        return None;
    }
    let device = kernel.text(address.wrapping_add(layout.sb_name), 32)?;
    Some(System {
        address,
        type_address: kind,
        device_text: kernel.u64(address.wrapping_add(layout.sb_name))?,
        type_name: names.number(&name),
        device: names.number(&device),
        row: FileSystem::of(&name),
        block_device: kernel.u64(address.wrapping_add(layout.sb_device))?,
        read_ns: now_ns,
    })
}

impl Kernel {
    /// Whether a sector of the disk is in the journal of the file system with a super block, which
    /// is mounted from a block device of that disk.
    pub(crate) fn is_in_journal(&self, super_block: u64, device: u64, sector: u64) -> bool {
        let start = || self.u64(device.wrapping_add(self.layout.block_device_start?));
        journal_sectors(self, super_block)
            .zip(sector.checked_sub(start().unwrap_or(0)))
            .is_some_and(|(journal, sector)| journal.contains(&sector))
    }

    /// Whether content that is on the `block_device` at `content` can be in a bio for the one at
    /// `device`; 0 is one that is not known. What is on a device that is made of others can be on
    /// any.
    pub(crate) fn may_lie_on(&self, content: u64, device: u64) -> bool {
        let layout = &self.layout;
        let is_stacked = || {
            let at = |address: u64, place: u64| self.pointer(address.wrapping_add(place));
            let disk = at(content, layout.block_device_disk?)?;
            // The disk leads back to its device.
            let whole = at(disk, layout.disk_device?)?;
            let name = self.text(disk.wrapping_add(layout.disk_name), 32)?;
            let is_disk = at(whole, layout.block_device_disk?)? == disk;
            Some(is_disk && ["dm-", "md", "bcache"].iter().any(|layer| name.starts_with(layer)))
        };
        content == device || device == 0 || content != 0 && is_stacked() == Some(true)
    }
}

/// The sectors of a block device in which the journal of the file system that is mounted from it
/// is, counted from where the device begins. `None` where the file system has none, or elsewhere,
/// or does not say.
fn journal_sectors(kernel: &Kernel, super_block: u64) -> Option<Range<u64>> {
    let layout = &kernel.layout;
    let kind = kernel.pointer(super_block.wrapping_add(layout.sb_type))?;
    let name = kernel.text(kernel.pointer(kind.wrapping_add(layout.type_name))?, 32)?;
    let private = kernel.pointer(super_block.wrapping_add(layout.sb_private?))?;
    (FileSystem::of(&name).journal_sectors.as_ref()?.get)(kernel, super_block, private)
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
